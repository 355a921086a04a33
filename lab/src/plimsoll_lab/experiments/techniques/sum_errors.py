"""How far sums of products in FP16 are off, by their length: of the readout's gradient in the LSTM language model.

That gradient is a sum over all characters of a step, of a state times a score's gradient: the longest sum that there
is. It is taken of the model as it is drawn, over as many characters of text as it has products.
"""

import torch
from torch import Tensor

from plimsoll.emulate import emulate
from plimsoll_lab.experiments.techniques.training import CHUNK, Language
from plimsoll_lab.source_text import SYMBOLS, held_out_batch, standard_library

_LENGTH, _WIDTH, _COLUMNS = 16, 64, 16


def error_of_sums(length: int, seed: int) -> float:
    """The root mean square of the error over that of the sums, over the most frequent symbols' rows of the gradient."""
    states, gradients = _operands(length, seed)
    exact = gradients.T.double() @ states.double()
    with emulate("fp16", lists=None, accumulate="fp16", chunk=CHUNK):
        summed = gradients.T @ states
    return float((summed.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _operands(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """FP16 operands: states (length, width) and gradients of scores (length, symbols), at a sound loss scale."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Language(width=_WIDTH, layers=1)
        batch = held_out_batch(standard_library(), pieces=length // _LENGTH, length=_LENGTH)
        states = model.lstm(model.characters(batch.inputs))[0].flatten(0, 1)
        targets = batch.targets.flatten()
        gradients = model.readout(states).softmax(dim=1)
        gradients -= torch.nn.functional.one_hot(targets, SYMBOLS)
        frequent = torch.bincount(targets, minlength=SYMBOLS).topk(_COLUMNS).indices
    return states.half(), gradients[:, frequent].half()

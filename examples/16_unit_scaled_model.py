"""A unit-scaled model: every tensor starts at unit scale, so that FP16 trains it with no loss scale at all."""

import random

import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.unit import nn as unn, optim as uoptim

torch.set_num_threads(1)
WIDTH, CONTEXT, STEPS = 64, 24, 60
WORDS = "the loss of a small model falls while gradients keep their place in what eight bits can hold".split()
DRAW = random.Random(1).random  # the same numbers, so the same text, in every version of Python
TEXT = torch.tensor([ord(letter) for letter in " ".join(WORDS[int(len(WORDS) * DRAW())] for _ in range(20_000))])
LAYER = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}


class Characters(nn.Module):
    """A language model; `made` is torch.nn or plimsoll.unit.nn, which take the same arguments."""

    def __init__(self, made: object, readout: type[nn.Linear]) -> None:
        super().__init__()
        self.embedding = made.Embedding(128, WIDTH)
        layer = made.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **LAYER)
        self.body = made.TransformerEncoder(layer, 2, made.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = readout(WIDTH, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the character after each."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embedding(tokens), mask, is_causal=True))


def batch(seed: int) -> Tensor:
    """Sixteen passages of the text."""
    starts = torch.randint(len(TEXT) - CONTEXT, (16, 1), generator=torch.Generator().manual_seed(seed))
    return TEXT[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, cross_entropy: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of the next character."""
    return cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)
unit, plain = Characters(unn, unn.LinearReadout), Characters(nn, nn.Linear)

# 1. Where gradients lie at the start, and how many FP16 would turn to zero or keep in fewer bits, at worst.
print("        gradients' root mean square, largest and smallest   lost or rounded coarsely by FP16")
harmed = {}
for name, model, made in (("unit", unit, unn), ("plain", plain, nn)):
    spectra = []
    for module in model.body.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda _, __, out, kept=spectra: kept.append(pl.measure(out[0])))
    loss_of(model, made.CrossEntropyLoss(), batch(0)).backward()
    fits = [spectrum.fit("fp16") for spectrum in spectra]
    harmed[name] = max(fit.lost.estimate + fit.subnormal.estimate for fit in fits)
    rms = [spectrum.rms for spectrum in spectra]
    print(f"{name:<8}{max(rms):>36.2g}{min(rms):>15.2g}{harmed[name]:>36.1%}")
assert harmed["unit"] < 0.01 < harmed["plain"]

# 2. Trained in FP32, and in FP16 as a GPU computes it, without any loss scale.
final = {}
for name, precision in {"fp32": {}, "fp16": {"precision": "fp16"}}.items():
    torch.manual_seed(0)
    model = Characters(unn, unn.LinearReadout)
    optimizer, losses = uoptim.AdamW(model, lr=0.25, weight_decay=1e-4), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with pl.emulate(**precision) if precision else torch.enable_grad():
            loss = loss_of(model, unn.CrossEntropyLoss(), batch(step))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    final[name] = sum(losses[-10:]) / 10
    print(f"{name}: loss {losses[0]:.3f} -> {final[name]:.3f}")
assert final["fp32"] < 2
assert abs(final["fp16"] - final["fp32"]) < 0.01 * final["fp32"]

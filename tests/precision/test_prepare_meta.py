"""Levels on "meta", where shapes and dtypes are computed and no values: how memory is counted without spending it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plimsoll.precision import LEVELS, prepare
from tests.support.cases import each
from tests.support.precision.training import HERE, SCALED, adamw

# The input and the weight that the second linear layer keeps for its backward.
KEPT = {
    "fp32": torch.float32, "tf32": torch.float32, "amp-fp16": torch.float16, "amp-bf16": torch.bfloat16,
    "fp16-master": torch.float16, "fp16-pure": torch.float16, "bf16-master": torch.bfloat16,
    "bf16-stochastic": torch.bfloat16, "bf16-kahan": torch.bfloat16, "fp8-tensor": torch.float8_e4m3fn,
}  # fmt: skip


def model_on_meta() -> nn.Sequential:
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)]
    return nn.Sequential(*layers).to("meta")


@each("level", HERE)
def test_a_level_keeps_for_the_backward_what_it_would_keep_on_a_gpu(level: str) -> None:
    model = model_on_meta()
    kept: list[Tensor] = []
    with prepare(model, adamw(model, level), level) as loop:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x), loop.forward():
            loss = model(torch.empty(16, 16, device="meta")).float().square().mean()
        assert sum(set(x.shape) == {16, 32} and x.dtype is KEPT[level] for x in kept) >= 2
        assert model[0].weight.dtype == LEVELS[level].dtype
        if level not in SCALED:  # a scaler asks whether gradients are finite, which nothing on "meta" can tell
            assert loop.step(loss).stepped
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_a_weight_with_a_value_is_still_refused_where_fp16_has_none_for_it() -> None:
    model: Any = nn.Linear(16, 16)
    nn.init.constant_(model.weight, 1e6)
    with pytest.raises(TypeError, match=r"expected weights that torch.float16 can hold; got weight with .* 1e\+06"):
        prepare(model, adamw(model), "fp16-master")

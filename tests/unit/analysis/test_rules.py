"""Every rule, where nothing is shared: its operation's result and its input's gradient come out at unit scale."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.analysis.analyzer import analyse
from plimsoll.unit.capture.captured_program import capture
from tests.support.cases import each
from tests.support.unit.interpreter import back, drawn, inputs_of, run

IMAGES, ROWS, SEQUENCES = (16, 8, 12, 12), (512, 24), (32, 12, 16)


class After(nn.Module):
    """A function of normal values that depend on a parameter, and on others of given shapes."""

    def __init__(self, function: Any, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.shift = function, nn.Parameter(torch.zeros(1))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x + self.shift)


# Each: the function, the input's shape, the parameters' shapes, and how far from 1 the two scales may be: sampling, and
# borders of convolutions.
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, tuple[int, ...]], float]] = {
    "linear": (lambda m, x: F.linear(x, m.w), ROWS, {"w": (16, 24)}, 0.1),
    "matmul": (lambda m, x: x @ m.w, SEQUENCES, {"w": (16, 64)}, 0.1),
    "conv1d": (lambda m, x: F.conv1d(x, m.w), (32, 12, 64), {"w": (8, 12, 3)}, 0.1),
    "conv2d": (lambda m, x: F.conv2d(x, m.w, padding=1), IMAGES, {"w": (16, 8, 3, 3)}, 0.2),
    "conv2d, strided": (lambda m, x: F.conv2d(x, m.w, stride=2), IMAGES, {"w": (16, 8, 2, 2)}, 0.1),
    "conv2d, groups": (lambda m, x: F.conv2d(x, m.w, groups=4), IMAGES, {"w": (8, 2, 1, 1)}, 0.4),
    "conv_transpose2d": (lambda m, x: F.conv_transpose2d(x, m.w, stride=2), IMAGES, {"w": (8, 4, 2, 2)}, 0.15),
    "gelu": (lambda m, x: F.gelu(x), ROWS, {}, 0.05),
    "gelu, tanh": (lambda m, x: F.gelu(x, approximate="tanh"), ROWS, {}, 0.05),
    "silu": (lambda m, x: F.silu(x), ROWS, {}, 0.05),
    "relu": (lambda m, x: F.relu(x), ROWS, {}, 0.05),
    "sigmoid": (lambda m, x: x.sigmoid(), ROWS, {}, 0.05),
    "hardswish": (lambda m, x: F.hardswish(x), ROWS, {}, 0.05),
    "elu": (lambda m, x: F.elu(x), ROWS, {}, 0.05),
    "leaky_relu": (lambda m, x: F.leaky_relu(x, 0.1), ROWS, {}, 0.05),
    "softplus": (lambda m, x: F.softplus(x), ROWS, {}, 0.05),
    "glu": (lambda m, x: F.glu(x), ROWS, {}, 0.05),
    "swish by hand": (lambda m, x: x * torch.sigmoid(1.702 * x), ROWS, {}, 0.05),
    "square": (lambda m, x: x**2, ROWS, {}, 0.05),
    "softmax": (lambda m, x: x.softmax(-1), ROWS, {}, 0.05),
    "log_softmax": (lambda m, x: x.log_softmax(-1), ROWS, {}, 0.05),
    "layer_norm": (lambda m, x: F.layer_norm(x, (24,)), ROWS, {}, 0.1),
    "group_norm": (lambda m, x: F.group_norm(x, 2), IMAGES, {}, 0.05),
    "norm by hand": (lambda m, x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), ROWS, {}, 0.1),
    "unit vectors": (lambda m, x: F.normalize(x, dim=-1), ROWS, {}, 0.1),
    "max_pool2d": (lambda m, x: F.max_pool2d(x, 2), IMAGES, {}, 0.05),
    "avg_pool2d": (lambda m, x: F.avg_pool2d(x, 2), IMAGES, {}, 0.05),
    "adaptive_avg_pool2d": (lambda m, x: F.adaptive_avg_pool2d(x, 1), IMAGES, {}, 0.2),
    "mean": (lambda m, x: x.mean(1), SEQUENCES, {}, 0.1),
    "sum": (lambda m, x: x.sum(1), SEQUENCES, {}, 0.1),
    "a mean behind a ReLU": (lambda m, x: F.relu(x).mean((2, 3)), IMAGES, {}, 1.0),
    "upsample": (lambda m, x: F.interpolate(x, scale_factor=2), IMAGES, {}, 0.05),
    "expand": (lambda m, x: x[:, :, None].expand(-1, -1, 9), ROWS, {}, 0.1),
    "dropout": (lambda m, x: F.dropout(x, 0.1), ROWS, {}, 0.1),
    "a constant": (lambda m, x: x * -3, ROWS, {}, 0.05),
    "a quotient": (lambda m, x: x / 8, ROWS, {}, 0.05),
    "a gain": (lambda m, x: x * m.g, ROWS, {"g": (24,)}, 0.05),
    "gelu, then a product": (lambda m, x: F.gelu(x) @ m.w, ROWS, {"w": (24, 24)}, 0.15),
    "relu after relu": (lambda m, x: F.relu(F.relu(x)), ROWS, {}, 1.0),
    "chunks, put together": (lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1), ROWS, {}, 0.05),
    "a transposed view": (lambda m, x: x.transpose(1, 2), SEQUENCES, {}, 0.05),
}  # fmt: skip


@each("name", CASES)
def test_a_rule_brings_its_operation_to_unit_scale(name: str) -> None:
    function, shape, shapes, tolerance = CASES[name]
    model = After(function, **shapes).double()
    generator = torch.Generator().manual_seed(1)
    captured = capture(model, torch.randn(shape, generator=generator, dtype=torch.float64))
    analysis = analyse(captured)
    assert not analysis.skipped
    torch.manual_seed(2)
    state = drawn(captured, analysis.parameters, torch.float64, seed=3)
    carried, _ = run(captured, analysis.changes, state, inputs_of(captured), true=False)
    back(carried, analysis.flow.outputs)
    (end,) = (carried.kept[one] for one in analysis.flow.outputs)
    start = carried.kept["add"]
    assert abs(float(end.detach().std()) - 1) < tolerance
    assert abs(float(start.grad.square().mean().sqrt()) - 1) < tolerance

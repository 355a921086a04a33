"""Values that modules and hooks round to codes or narrow formats by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.diagnosis.finding import Finding
from tests.support.diagnosis.trainings import watched


def coded(path: Path, store: Callable[[Tensor], Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(_: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(16, 64)
        (model(x) - x.roll(1, dims=1)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(store(p))

    return [f for f in watched(path, model, optimizer, step, 10) if f.rule == "kept-narrow"]


def in_int8(p: Tensor) -> Tensor:
    step = p.abs().amax() / 127
    return (p / step).round() * step


class Keeps(torch.autograd.Function):
    """A product with two, which keeps what it is given in E4M3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn))
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def kept(path: Path, pack: Callable[[Tensor], Any], places: int, size: float = 1.0) -> list[Finding]:
    """One query attends to all places; what the backward needs is packed."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"score": nn.Linear(8, 1), "head": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def unpack(packed: Any) -> Tensor:
        return packed[0].float() / packed[1] if isinstance(packed, tuple) else packed.float()

    def step(_: int) -> None:
        x = torch.randn(4, places, 8)
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            h = (model["score"](x).softmax(dim=1) * x).sum(dim=1)
        h = Keeps.apply(size * model["head"](h))
        functional.cross_entropy(h / size, x[:, 0, :4].argmax(dim=1)).backward()
        optimizer.step()

    return [f for f in watched(path, model, optimizer, step, 6) if f.rule == "cast-flushes"]


def test_weights_that_are_kept_as_codes_of_8_bits(tmp_path: Path) -> None:
    def in_e4m3(p: Tensor) -> Tensor:
        scale = 448 / p.abs().amax()
        return (p * scale).to(torch.float8_e4m3fn).float() / scale

    for name, store in (("E4M3", in_e4m3), ("INT8", in_int8)):
        (found,) = coded(tmp_path / name, store)
        assert (
            found.evidence["format"] == "8-bit codes" and found.evidence["cause"] == "weights rounded after each step"
        )
        assert "8-bit codes" in found.meaning
    if hasattr(torch._C._autograd.SavedTensor, "data"):  # type: ignore[attr-defined]
        in_e5m2, whole = (lambda x: x.to(torch.float8_e5m2)), (lambda x: x)
        in_bits = lambda x: x.to(torch.float8_e4m3fn)  # noqa: E731
        with_scale = lambda x: ((x * (448 / x.abs().amax())).to(torch.float8_e4m3fn), 448 / x.abs().amax())  # noqa: E731
        (found,) = kept(tmp_path / "softmax", in_bits, 4096)
        assert found.evidence["operation"] == "Softmax" and found.evidence["flushed"] > 0.9 and "scale" in found.advice
        (found,) = kept(tmp_path / "of a function", whole, 16, 4e-3)
        assert found.evidence["operation"] == "Keeps"
        for name, pack, places in (
            ("few places", in_bits, 16),
            ("E5M2", in_e5m2, 4096),
            ("a scale", with_scale, 4096),
            ("nothing packed", whole, 4096),
            ("BF16", torch.Tensor.bfloat16, 4096),
        ):
            assert kept(tmp_path / name, pack, places) == [], name
    assert coded(tmp_path / "as they are", torch.Tensor.clone) == []
    assert coded(tmp_path / "halved", lambda p: p * 0.5) == []


def cast(path: Path, change: Callable[[Tensor], Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight.copy_(change(0.01 * model[0].weight))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1e-3)

    def step(_: int) -> None:
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()

    return [f for f in watched(path, model, optimizer, step, 6) if f.rule == "cast-flushes"]


def in_fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


class Sent(nn.Module):
    """What a cast, or something that comes near one, makes of values."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def sent(path: Path, change: Callable[[Tensor], Tensor], spread: float = 2.0) -> list[Finding]:
    """A student of probabilities of 512 classes, as they arrive."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"sent": Sent(change), "student": nn.Linear(8, 512)})
    optimizer = torch.optim.SGD(model["student"].parameters(), lr=1e-2)
    maker = spread * torch.randn(8, 512)

    def step(_: int) -> None:
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        given = model["sent"]((x @ maker / 8**0.5).softmax(dim=1))
        (-(given * model["student"](x).log_softmax(dim=1)).sum(dim=1).mean()).backward()
        optimizer.step()

    return [f for f in watched(path, model, optimizer, step, 6) if f.rule == "cast-flushes"]


def test_weights_that_a_cast_has_made_zero(tmp_path: Path) -> None:
    (found,) = cast(tmp_path / "cast", in_fp8)
    assert found.where == ("0.weight",) and found.evidence["format"] == "e4m3"
    assert float(found.evidence["flushed"]) > 0.5 and "power of two" in found.advice
    for name, change in (
        ("scaled", lambda x: in_fp8(x, 2.0**15)),
        ("pruned", lambda x: x * (x.abs() > 0.001)),
        ("as they are", torch.Tensor.clone),
    ):
        assert cast(tmp_path / name, change) == [], name
    (found,) = sent(tmp_path / "sent", in_fp8)
    assert found.where == ("sent:output",) and found.evidence["format"] == "e4m3"
    assert float(found.evidence["flushed"]) > 0.25 and float(found.evidence["missing"]) > 0.02
    for name, change, spread in (
        ("sent with a scale", lambda x: in_fp8(x, 2.0**8), 2.0),
        ("sent with a scale for each row", lambda x: in_fp8(x, 448 / x.amax(dim=1, keepdim=True)), 2.0),
        ("the largest", lambda x: x * (x > 2.0**-10), 2.0),
        ("where next to nothing is lost", in_fp8, 12.0),
        ("in BF16", lambda x: x.bfloat16().float(), 2.0),
        ("as they come", lambda x: x, 2.0),
    ):
        assert sent(tmp_path / name, change, spread) == [], name

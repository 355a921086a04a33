"""Gradients and moments that are exactly zero: which cause is named, and sound trainings that look alike."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Run
from tests.support.cases import each


class Adapted(nn.Module):
    """A frozen layer and two factors, of which the second begins at zero; the first is drawn, or zero too."""

    def __init__(self, into: int, out: int, *, drawn: bool) -> None:
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.down, self.up = nn.Linear(into, 4, bias=False), nn.Linear(4, out, bias=False)
        nn.init.zeros_(self.up.weight)
        if not drawn:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Factors(nn.Module):
    """The same with factors that are its own parameters, as in many a LoRA."""

    def __init__(self, into: int, out: int, *, drawn: bool) -> None:
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.down, self.up = nn.Parameter(drawn * torch.randn(into, 4)), nn.Parameter(torch.zeros(4, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


class Rounded(nn.Linear):
    """A layer that computes with rounded weights; `straight` passes the gradient through the rounding."""

    straight = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        rounded = (self.weight * 50).round() / 50
        weight = self.weight + (rounded - self.weight).detach() if self.straight else rounded
        return F.linear(input, weight, self.bias)


class Straight(Rounded):
    straight = True


class Reader(nn.Module):
    """A layer beside one that sees the input and a row of padding, of which one goes on."""

    def __init__(self, into: int, out: int, *, reads_padding: bool) -> None:
        super().__init__()
        self.own, self.value, self.row = nn.Linear(into, out), nn.Linear(into, out), int(reads_padding)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, torch.zeros_like(x)], dim=1)
        return self.own(x) + self.value(rows)[:, self.row]


class WithoutGraph(nn.Linear):
    """A layer that computes with a cast of its weight, made under no_grad."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with torch.no_grad():
            weight = self.weight.bfloat16().float()
        return F.linear(input, weight, self.bias)


class Halved(nn.Module):
    """One cast to FP16 on the way."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half().float()


class Late(nn.Module):
    """A second path, which nothing takes in the first `idle` steps."""

    def __init__(self, idle: int) -> None:
        super().__init__()
        self.own, self.idle, self.calls = nn.Linear(32, 32), idle, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.own(x) * (self.calls > self.idle)


class Routed(nn.Module):
    """Two experts, of which the second gets the rows from number `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.one, self.other, self.first = nn.Linear(32, 32), nn.Linear(32, 32), first

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x[: self.first]), self.other(x[self.first :])])


class Steps(nn.Module):
    """Values in steps of a tenth: nothing has a slope."""

    def forward(self, x: Tensor) -> Tensor:
        return (10 * x).round() / 10


class Product(nn.Module):
    """Logits behind a product of many factors that is zero, plus what does not depend on them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + (x * 1e-9).unsqueeze(0).expand(8, *x.shape).prod(dim=0)


class Moments(torch.optim.Optimizer):
    """Adam without its corrections; first moments have a dtype and a scale, both evenly spaced codes if any.

    Those of the second moments have a zero, of the first ones not.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, scale: float, codes: int = 0, first_codes: int = 0
    ) -> None:
        super().__init__(model.parameters(), {"lr": 1e-2})
        self.dtype, self.scale, self.codes, self.first_codes = dtype, scale, codes, first_codes

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            first = state.setdefault("exp_avg", torch.zeros_like(p, dtype=self.dtype))
            second = state.setdefault("exp_avg_sq", torch.zeros_like(p))
            new = 0.9 * first.float() / self.scale + 0.1 * p.grad
            if self.first_codes:
                code = (new.amax() - new.amin()) / self.first_codes
                new = ((new - new.amin()) / code).round() * code + new.amin()
            first.copy_(new * self.scale)
            second.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            if self.codes:
                code = second.amax() / self.codes
                second.copy_((second / code).round() * code)
            p.sub_(self.param_groups[0]["lr"] * first.float() / self.scale / (second.sqrt() + 1e-8))


class HalfOf(nn.Module):
    """Inputs of which the second half is zero, so that half of the weights behind them have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :4], torch.zeros_like(x[:, 4:])], dim=1)


def layers(kind: Callable[[int, int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(8, 32), nn.Tanh(), kind(32, 4))


def ending_in(*last: nn.Module) -> nn.Module:
    return nn.Sequential(*layers(nn.Linear), *last)  # type: ignore[arg-type]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-15)


def in_each_group(model: nn.Module, *rates: float) -> torch.optim.Optimizer:
    groups = zip((model[0], model[2]), rates, strict=True)  # type: ignore[index]
    return torch.optim.SGD([{"params": part.parameters(), "lr": rate} for part, rate in groups])


def nothing(x: Tensor) -> Tensor:
    return x


def rounded_to(dtype: torch.dtype) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.copy_(p.grad.to(dtype))

    return run


def in_steps_of_the_largest(model: nn.Module) -> None:
    """One step for all gradients, as INT8 codes have that share it with a gradient of 1,000."""
    for p in model[0].parameters():  # type: ignore[index]
        p.grad = (p.grad / 8).round() * 8


class Gained(nn.Linear):
    """A layer times a positive number, of which a negative one is cut off."""

    def __init__(self, into: int, out: int, first: float = 0.5) -> None:
        super().__init__(into, out)
        self.gain = nn.Parameter(torch.tensor(first))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * self.gain.relu()


def thrown(name: str) -> Callable[[nn.Module], None]:
    """A gradient that moves a parameter by 1 at the fourth step."""
    steps = itertools.count()

    def before(model: nn.Module) -> None:
        if next(steps) == 3:
            model.get_parameter(name).grad.fill_(10.0)  # type: ignore[union-attr]

    return before


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    path: Path,
    model: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    before: Callable[[nn.Module], None] = lambda model: None,
    size: float = 1.0,
    of: Callable[[Tensor], Tensor] = nothing,
    every: int = 1,
    inputs: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[Finding]:
    """A watched training, and its warnings and alarms."""
    made = optimizer(model)
    with pl.watch(model, made, run=path, every=every, quiet=True, **settings):
        for _ in range(12):
            x = inputs * torch.randn(32, 8)
            made.zero_grad()
            (size * F.cross_entropy(of(model(x.to(dtype))), x[:, :4].argmax(dim=1))).backward()
            before(model)
            made.step()
    return [f for f in diagnose(path) if f.severity != "info"]


AT_ZERO, NO_SLOPE = "weights of zero without a gradient", "a weight without a slope"
WRONG: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "both factors zero": ({"model": layers(lambda i, o: Adapted(i, o, drawn=False))}, ("dead-layer", AT_ZERO)),
    "both factors zero, as parameters": (
        {"model": layers(lambda i, o: Factors(i, o, drawn=False))}, ("dead-layer", AT_ZERO),
    ),
    "both factors zero, of the root": ({"model": Factors(8, 4, drawn=False)}, ("dead-layer", AT_ZERO)),
    "padding is read alone": (
        {"model": layers(lambda i, o: Reader(i, o, reads_padding=True))},
        ("dead-layer", "inputs of zero wherever gradients come"),
    ),
    "rounded weights": ({"model": layers(Rounded)}, ("dead-layer", NO_SLOPE)),
    "first moments in E4M3": (
        {"model": layers(nn.Linear), "optimizer": lambda m: Moments(m, torch.float8_e4m3fn, 1.0), "size": 0.01},
        ("kept-narrow", "first moments rounded"),
    ),
    "no rate to speak of": (
        {"model": layers(nn.Linear), "optimizer": lambda m: in_each_group(m, 1e-12, 1e-12)}, ("updates-swallowed", ""),
    ),
    "gradients in FP16": (
        {"model": layers(nn.Linear), "before": rounded_to(torch.float16), "size": 1e-6},
        ("kept-narrow", "gradients rounded before the step"),
    ),
    "one scale for all gradients": (
        {"model": layers(nn.Linear), "before": in_steps_of_the_largest},
        ("gradients-mishandled", "zero when the optimizer steps, and not in the backward"),
    ),
    "a cast without a graph": ({"model": layers(WithoutGraph)}, ("untrained-parameters", "no gradient")),
    "one cast to FP16": (
        {"model": nn.Sequential(nn.Linear(8, 32), Halved(), nn.Linear(32, 4)), "size": 2e-5},
        ("cast-flushes", "gradients through a narrow cast"),
    ),
    "a gain past zero": (
        {"model": layers(Gained), "before": thrown("0.gain"), "optimizer": sgd},
        ("rate-too-high", "a positive number that has passed zero"),
    ),
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {
    "one factor zero": {"model": layers(lambda i, o: Adapted(i, o, drawn=True))},
    "one factor zero, as parameters": {"model": layers(lambda i, o: Factors(i, o, drawn=True))},
    "padding is left out": {"model": layers(lambda i, o: Reader(i, o, reads_padding=False))},
    "rounded weights, straight through": {"model": layers(Straight)},
    "first moments in E4M3 at a scale": {
        "model": layers(nn.Linear), "optimizer": lambda m: Moments(m, torch.float8_e4m3fn, 2.0**12), "size": 0.01,
    },
    "a part that hardly moves": {"model": layers(nn.Linear), "optimizer": lambda m: in_each_group(m, 1e-12, 0.1)},
    "gradients in FP16 that fit": {"model": layers(nn.Linear), "before": rounded_to(torch.float16)},
    "one cast to FP16 that fits": {"model": nn.Sequential(nn.Linear(8, 32), Halved(), nn.Linear(32, 4))},
    "a gain that stays": {"model": layers(Gained), "optimizer": sgd},
    "a path that is taken late": {"model": nn.Sequential(nn.Linear(8, 32), Late(6), nn.Linear(32, 4))},
}  # fmt: skip


@each("name", WRONG)
def test_the_cause_of_zeros_is_named_alone(name: str, tmp_path: Path) -> None:
    arguments, wanted = WRONG[name]
    assert [(f.rule, str(f.evidence.get("cause", ""))) for f in train(tmp_path / name, **arguments)] == [wanted]


@each("name", RIGHT)
def test_a_sound_training_is_silent(name: str, tmp_path: Path) -> None:
    assert train(tmp_path / name, **RIGHT[name]) == []


def test_a_path_that_nothing_takes_is_named_until_it_is_taken(tmp_path: Path) -> None:
    for idle, severity in ((6, "info"), (100, "warning")):
        model = nn.Sequential(nn.Linear(8, 32), Late(idle), nn.Linear(32, 4))
        train(tmp_path / severity, model)
        (finding,) = diagnose(tmp_path / severity, rules=["dead-layer"])
        assert (finding.severity, finding.where) == (severity, ("1.own.weight",))
        assert "are not any more" in finding.meaning if severity == "info" else "nothing" in finding.advice.lower()


def test_experts_without_rows_are_named_by_their_router(tmp_path: Path) -> None:
    for first, rules in ((32, ["dead-layer"]), (16, [])):
        path = tmp_path / str(first)
        found = train(path, nn.Sequential(nn.Linear(8, 32), Routed(first), nn.Linear(32, 4)))
        assert [f.rule for f in found] == rules
        for finding in found:
            assert finding.where == ("1.other.weight",) and finding.evidence["cause"] == "no rows"
            assert "nothing has been routed to 1.other since step 0" in verdict(View(Run(path)), found)


def test_what_grew_just_before_a_layer_died_is_named(tmp_path: Path) -> None:
    for name in ("pushed", "cut", "cut, beside what grows from nothing"):
        model, steps = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), itertools.count()
        if "nothing" in name:
            nn.init.constant_(model[2].bias, 1e-9)

        def kill(model: nn.Module, name: str = name, steps: Any = steps) -> None:
            step = next(steps)
            if "nothing" in name:  # ten times as large at each step
                model[2].bias.grad.copy_(-90 * model[2].bias)  # type: ignore[index, union-attr]
            if step == 5 and name == "pushed":
                model[0].bias.grad.fill_(400.0)  # type: ignore[index, union-attr]
            elif step == 5:
                model[1].register_forward_hook(lambda module, args, out: out * 0)  # type: ignore[index]

        found = train(tmp_path / name, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), before=kill)
        dead, *_ = (f for f in found if f.rule == "dead-layer")
        assert ("grew" in dead.evidence) == (name == "pushed"), name
        if name == "pushed":
            assert dead.evidence["grew"] == "0.bias" and float(dead.evidence["grew_times"]) > 100
            assert "between steps 5 and 6, 0.bias became" in dead.meaning and "clip" in dead.advice
            assert "when 0.bias had become" in verdict(View(Run(tmp_path / name)), [dead])


def test_gradients_that_have_always_been_zero_in_fp16_may_underflow(tmp_path: Path) -> None:
    model = layers(nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, shadow_every=4, quiet=True):
        for _ in range(8):
            with torch.autocast("cpu", torch.float16):
                loss = 1e-6 * F.cross_entropy(model(torch.randn(32, 8)), torch.zeros(32, dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (finding,) = [f for f in diagnose(tmp_path / "run") if f.severity != "info"]
    assert (finding.rule, finding.evidence["cause"]) == ("dead-layer", "underflow, or no gradient")
    assert "the model's output is zero already, in FP16" in finding.meaning and "shadow" not in finding.advice
    said = verdict(View(Run(tmp_path / "run")), [finding])
    assert "no underflow" not in said and said.endswith("scale the loss.")


def test_a_loss_that_is_scaled_down_is_to_be_scaled_up(tmp_path: Path) -> None:
    model = layers(nn.Linear)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**-30)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
        for _ in range(8):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(torch.randn(32, 8)), torch.zeros(32, dtype=torch.long))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    (finding,) = [f for f in diagnose(tmp_path / "run", rules=["dead-layer"]) if f.severity != "info"]
    assert verdict(View(Run(tmp_path / "run")), [finding]).endswith("raise the loss scale.")


def test_where_gradients_stop_is_named(tmp_path: Path) -> None:
    for name, model, of, stops in (
        ("in the middle", nn.Sequential(nn.Linear(8, 32), Steps(), nn.Linear(32, 4)), nothing, "1"),
        ("a product", ending_in(Product(), nn.Linear(4, 4)), nothing, "3"),
        ("a container", ending_in(nn.Sequential(Steps(), nn.Identity()), nn.Linear(4, 4)), nothing, "3.0"),
        ("the loss", ending_in(), lambda logits: logits.round() + 0 * logits, "model:output"),
    ):
        (finding,) = train(tmp_path / name, model, of=of)
        assert (finding.rule, finding.evidence["stops_in"]) == ("gradients-vanish", stops), name
        assert ("The loss" in finding.meaning) == (name == "the loss")


class Added(nn.Module):
    """Outputs near a number, computed in a format."""

    def __init__(self, near: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.near, self.dtype = near, dtype

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.near).to(self.dtype).float() if self.dtype == torch.float32 else (x + self.near).to(self.dtype)


class Factor(nn.Module):
    """A factor that is learned, for each value of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.logarithm.exp().expand(x.shape)


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = Factor()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor(x)


def test_outputs_that_rounding_makes_alike_are_named(tmp_path: Path) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for name, layer, alike in (
        ("near 1,000 in BF16", Added(1000.0, bf16), ["2:output"]),
        ("held at 1", nn.Sequential(nn.Threshold(2.0, 1.0)), ["2.0:output", "2:output"]),
        ("near 1,000 in FP32", Added(1000.0, fp32), []),
        ("near 10 in BF16", Added(10.0, bf16), []),
        ("times a factor that is learned", Times(), []),
    ):
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), layer, nn.Linear(32, 4).to(bf16 if "BF16" in name else fp32))
        train(tmp_path / name, model, of=lambda logits: logits.float())
        found = [where for f in diagnose(tmp_path / name, rules=["outputs-alike"]) for where in f.where]
        assert found == alike, name


class Pair(nn.Module):
    """A layer that returns a second tensor with its result, which comes from `aside`."""

    def __init__(self, aside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.aside = nn.Linear(8, 32), aside

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = self.layer(x)
        return result, self.aside(result)


class Turned(nn.Module):
    """A permutation of the model's input, and the logarithm of its determinant, as in a flow."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flip(1), torch.zeros_like(x)


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_a_constant_that_a_module_returns_with_its_result_is_no_dead_layer(tmp_path: Path) -> None:
    for name, aside, rules in (
        ("no bias of attention", torch.zeros_like, []),
        ("mask", torch.ones_like, []),
        ("of the input", None, []),
        ("ReLU that nothing activates", lambda x: (x - 100).relu(), ["dead-layer"]),
        ("result held at 1", lambda x: F.threshold(x, 100.0, 1.0), ["outputs-alike"]),
    ):
        for collect in ({}, {"collect": ["activations"]}):
            path = tmp_path / f"{name} {len(collect)}"
            first = [Turned(), Sum(), nn.Linear(8, 32)] if aside is None else [Pair(aside), Sum()]
            train(path, nn.Sequential(*first, nn.Tanh(), nn.Linear(32, 4)), **collect)
            found = [f for f in diagnose(path, rules=["dead-layer", "outputs-alike"]) if f.severity != "info"]
            if not collect or not rules:  # else nothing tells them from a constant
                assert [f.rule for f in found] == rules, path.name
                assert all("0:output.1" in f.where for f in found), path.name


def test_a_cast_of_gradients_is_named_by_its_format(tmp_path: Path) -> None:
    (fp16,) = train(tmp_path / "fp16", layers(nn.Linear), before=rounded_to(torch.float16), size=1e-6)
    assert fp16.evidence["format"] == "fp16" and "to FP16, and" in fp16.meaning
    (e4m3,) = train(tmp_path / "e4m3", layers(nn.Linear), before=rounded_to(torch.float8_e4m3fn), size=0.01)
    assert e4m3.evidence["format"] == "e4m3" and "to E4M3, and" in e4m3.meaning


def broken_at(step: int) -> Callable[[nn.Module], None]:
    """All gradients of a step, and so all that follows, are NaN."""
    done = itertools.count()

    def run(model: nn.Module) -> None:
        if next(done) == step:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.fill_(torch.nan)

    return run


def test_second_moments_that_something_rounds_are_named(tmp_path: Path) -> None:
    for name, codes, more in (
        ("at each step", 255, {}),
        ("broken before the second sample", 255, {"every": 4, "before": broken_at(2)}),
        ("of 24 bits", 1 << 24, {}),
        ("of 24 bits, broken", 1 << 24, {"every": 4, "before": broken_at(2)}),
        ("one step alone", 255, {"every": 100}),
    ):
        path = tmp_path / name
        found = train(path, layers(nn.Linear), lambda m, n=codes: Moments(m, torch.float32, 1.0, n), **more)
        moments = [f for f in found if f.rule == "second-moment-lost"]
        if codes > 255 or name == "one step alone":
            assert moments == [], name
            continue
        assert [f.evidence["cause"] for f in moments] == ["a state that is rounded"], name
        assert "second moments" in verdict(View(pl.Run(path)), found), name


def test_first_moments_whose_codes_have_no_zero_are_named(tmp_path: Path) -> None:
    for name, more, rule, cause in (
        ("without", {"first_codes": 255}, "kept-narrow", "first moments without a zero"),
        ("of second moments", {"codes": 255}, "second-moment-lost", "a state that is rounded"),
        ("of neither", {}, "", ""),
    ):
        model = nn.Sequential(HalfOf(), *layers(nn.Linear))  # type: ignore[arg-type]
        found = train(tmp_path / name, model, lambda m, more=more: Moments(m, torch.float32, 1.0, **more))
        moments = [f for f in found if f.rule in ("second-moment-lost", "kept-narrow")]
        assert [(f.rule, f.evidence["cause"]) for f in moments] == [(rule, cause)] * bool(rule), name
        assert ("without a zero" in verdict(View(pl.Run(tmp_path / name)), found)) == (rule == "kept-narrow")


def test_second_moments_in_fp16_are_lost_by_their_format(tmp_path: Path) -> None:
    def kept(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.half().parameters(), lr=1e-3, eps=1e-4)

    found = train(tmp_path, layers(nn.Linear), kept, size=0.1, of=lambda x: x.float(), dtype=torch.float16)
    (moments,) = (f for f in found if f.rule == "second-moment-lost")
    assert "cause" not in moments.evidence and "FP32" in moments.advice


def test_outputs_of_zero_where_inputs_are_small_are_named_by_the_inputs(tmp_path: Path) -> None:
    for name, inputs, rule in (("divided twice", 1e-3, "inputs-small"), ("of size 1", 1.0, "dead-layer")):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        nn.init.constant_(model[0].bias, -9.0)
        found = [f for f in train(tmp_path / name, model, inputs=inputs) if f.collection == "activations"]
        assert [f.rule for f in found if f.rule in ("inputs-small", "dead-layer")] == [rule]
        assert ("The model's inputs are at most" in found[0].meaning) == (rule == "inputs-small")

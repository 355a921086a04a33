"""`plimsoll run --precision`: scripts that know nothing of it train at a level, and see true gradients.

Long, as each of the ways in which a script could see a scale, or keep one of its own, has its case.
"""

import copy
import gc
import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.cli.commands import run as _run
from plimsoll.errors import ArgumentError
from plimsoll.precision.levels.catalogue import ALIASES, LEVELS
from plimsoll.precision.scripts.script_precision import UNCHANGED, ScriptPrecision, level_for_scripts
from plimsoll.runs import Run
from tests.cli.test_run import ENVIRONMENT, SCRIPTS, said, watched
from tests.support import processes
from tests.support.cases import each

Start = Callable[..., ScriptPrecision]


@pytest.fixture
def said_here() -> list[str]:
    return []


@pytest.fixture
def start(said_here: list[str]) -> Iterator[Start]:
    """Puts a model and its optimizers at a level, as the command does at the model's first call."""
    made: list[ScriptPrecision] = []
    gc.collect()  # scalers of other tests are none of a script's, also those that something there still holds
    others = [x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler) and x.is_enabled()]
    for scaler in others:
        scaler._enabled = False
    before = torch.autograd.backward, torch.autocast.__enter__, torch.amp.GradScaler.__init__

    def at(level: str, model: nn.Module, *optimizers: torch.optim.Optimizer) -> ScriptPrecision:
        made.append(ScriptPrecision(level, said_here.append))
        for optimizer in optimizers:
            made[-1].note(optimizer)
        made[-1].begin(model, model, optimizers)
        return made[-1]

    yield at
    for unmodified in made:
        unmodified.end()
    for scaler in others:
        scaler._enabled = True
    assert before == (torch.autograd.backward, torch.autocast.__enter__, torch.amp.GradScaler.__init__)


class Net(nn.Module):
    """A tied weight, a checkpoint of either kind, and an output in a dictionary."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(self.first(x), self.first.weight))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.last(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


# -- amp-fp16


@pytest.mark.parametrize("reentrant", [False, True])
def test_fp16_is_a_hand_written_grad_scaler_loop_to_the_bit(reentrant: bool, start: Start) -> None:
    """With accumulation, clipping, a penalty on the weights, a parameter outside of the model, and an input's own."""
    torch.manual_seed(0)
    plain = Net(reentrant=reentrant)
    results: list[list[Tensor]] = []
    norms: list[list[float]] = []
    for by_hand in (True, False):
        model, warmth = copy.deepcopy(plain), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*model.parameters(), warmth], lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=by_hand)
        if not by_hand:
            start("amp-fp16", model, optimizer)
        moved, norms = torch.zeros(8, requires_grad=True), [*norms, []]
        for step, (x, y) in enumerate(batches(12)):
            with pl.emulate("fp16") if by_hand else torch.enable_grad():
                logits = model(x + moved)["logits"]
            loss = functional.cross_entropy(logits.float() * warmth, y) * (1e7 if step == 4 else 1.0)
            scaler.scale(loss + 1e-3 * model.last.weight.square().sum()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                norms[-1].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                assert moved.grad is not None
                if by_hand:  # its gradient carries each step's scale
                    moved.grad /= 2.0 ** (16 if step <= 5 else 15)
                norms[-1].append(float(moved.grad.abs().sum()))
                moved.grad = None
        state = optimizer.state[model.first.weight]["momentum_buffer"]
        results.append([*model.parameters(), warmth, state])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    assert str(norms[0]) == str(norms[1])
    assert torch.tensor(norms[0]).isfinite().sum() == 10  # the third of six steps overflowed


def test_an_overflow_is_skipped_though_clipping_by_value_has_hidden_it(start: Start) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unmodified = start("amp-fp16", model, optimizer)
    before = model.weight.detach().clone()
    for factor in (0.1, 1e9, 0.1):
        optimizer.zero_grad()
        (model(torch.ones(1, 4)).sum() * factor).backward()
        seen = model.weight.grad.isfinite().all().item()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        assert model.weight.grad.isfinite().all() and seen == (factor == 0.1)
        optimizer.step()
    assert torch.allclose(model.weight, before - 0.02, rtol=1e-3)  # two steps of three
    assert unmodified._unseen.scaler.get_scale() == 2.0**15


def test_small_gradients_survive_that_fp16_alone_would_lose(start: Start) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    start("amp-fp16", model, torch.optim.SGD(model.parameters(), lr=0.1))
    true = copy.deepcopy(model)
    for network in (model, true):
        (network(torch.ones(1, 4)).sum() * 2.0**-28).backward()
    assert torch.allclose(model[0].weight.grad, true[0].weight.grad, rtol=1e-2, atol=0)
    model.zero_grad()
    inputs = torch.ones(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs)
    assert torch.allclose(gradient, true[1].weight @ true[0].weight, rtol=1e-2)


def test_optimizers_with_closures_schedulers_and_hooks_of_the_script(start: Start) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    one, two = torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)
    unmodified = start("amp-fp16", model, one, two)
    schedule = torch.optim.lr_scheduler.StepLR(one, 1)
    hooked: list[float] = []
    model[0].bias.register_hook(lambda g: hooked.append(g.abs().max().item()))
    for step, (x, y) in enumerate(batches(4)):

        def closure(x: Tensor = x, y: Tensor = y, factor: float = 1e8 if step == 0 else 1.0) -> Tensor:
            model.zero_grad()
            loss = functional.cross_entropy(model(x), y) * factor
            loss.backward()
            return loss

        assert one.step(closure).item() > 0
        two.step()
        schedule.step()  # a first step that was skipped is not one that never came: no warning
    assert len(hooked) == 4 and all(value < 10 for value in hooked[1:]), hooked
    assert one.state[model[0].bias]["step"] == 3  # and the scale fell once, though both skipped
    assert unmodified._unseen.scaler.get_scale() == 2.0**15


# -- the arithmetic, and taking it back


@pytest.mark.parametrize(("level", "inside"), [("amp-bf16", torch.bfloat16), ("O1", torch.float16)])
def test_layers_run_in_16_bits_in_training_and_evaluation_and_outputs_are_fp32(
    level: str, inside: torch.dtype, start: Start
) -> None:
    model = Net()
    start(level, model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[torch.dtype] = []
    model.last.register_forward_hook(lambda _m, _a, output: seen.append(output.dtype))
    outputs = model(torch.randn(2, 8))
    model.eval()
    with torch.no_grad():
        evaluated = model(torch.randn(2, 8))
    assert seen == [inside] * 2
    assert [each["logits"].dtype for each in (outputs, evaluated)] == [torch.float32] * 2
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32  # and nothing outside


def test_copies_and_pickles_are_plain_and_an_interrupt_leaves_nothing(start: Start) -> None:
    model = Net()
    keys = set(vars(model))
    unmodified = start("amp-bf16", model, torch.optim.SGD(model.parameters(), lr=0.1))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), loaded, pickle.loads(pickle.dumps(model))):
        assert other.forward.__self__ is other
        with torch.no_grad():
            model.first.weight.add_(1.0)
            assert not other(torch.ones(1, 8))["logits"].equal(model(torch.ones(1, 8))["logits"])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.last.register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 8))
    handle.remove()
    assert functional.linear(torch.ones(1, 8), torch.ones(8, 8)).dtype == torch.float32
    unmodified.end()
    assert set(vars(model)) == keys and not model._forward_hooks


# -- FP8


def test_a_script_s_linear_layers_run_in_fp8_until_the_end(start: Start, said_here: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, parameters = [type(module) for module in model.modules()], list(model.parameters())
    level = start("fp8-tensor", model, optimizer)
    assert [type(model[0]), type(model[2])] == [pl.fp8.Linear] * 2 and not said_here
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(16, 8)
    inside: list[torch.dtype] = []
    model[0].register_forward_hook(lambda *a: inside.append(a[2].dtype))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    assert inside == [torch.bfloat16] and loss.dtype == torch.float32 and model[0].weight.grad.dtype == torch.float32
    level.end()
    assert [type(module) for module in model.modules()] == before
    assert model(x).dtype == torch.float32 and inside[1] == torch.float32


def test_a_model_that_is_not_unit_scaled_is_refused_at_fp8_unit(start: Start, said_here: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 1))
    start("fp8-unit", model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "expected a unit-scaled model at fp8-unit" in said_here[0] and "continues unchanged" in said_here[0]
    assert type(model[0]) is nn.Linear and not model._forward_hooks and "forward" not in vars(model)
    scaled = nn.Sequential(pl.unit.nn.Linear(8, 32), pl.unit.nn.LinearReadout(32, 1))
    start("fp8-unit", scaled, torch.optim.SGD(scaled.parameters(), lr=0.1))
    assert type(scaled[0]) is pl.fp8.Linear and type(scaled[1]) is pl.unit.nn.LinearReadout and len(said_here) == 1


# -- refusals


def test_the_names_it_takes_are_the_levels_that_leave_the_loop() -> None:
    assert UNCHANGED == ("fp32", "tf32", "amp-fp16", "amp-bf16", "fp8-unit", "fp8-tensor")
    aliases = tuple(alias for alias, name in ALIASES.items() if name in UNCHANGED)
    assert (*UNCHANGED, *aliases) == _run.PRECISIONS
    assert level_for_scripts("O1") is LEVELS["amp-fp16"]


@each(
    ("name", "why"),
    [
        ("O2", "which casts weights and wraps the optimizer.* Use plimsoll.prepare"),
        ("bf16-kahan", "which casts weights and wraps the optimizer.* Use plimsoll.prepare"),
        ("plan.toml", "which is not a level. A plan or a schedule needs plimsoll.prepare"),
    ],
)
def test_other_levels_are_refused(name: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=f"expected --precision to be .*fp32, tf32.*; got '{name}', .*{why}"):
        level_for_scripts(name)


def test_a_script_s_own_precision_is_kept(start: Start, said_here: list[str]) -> None:
    model, compiled, x = Net(), Net(), torch.ones(1, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled.compile()
    cases: dict[str, Callable[[], object]] = {
        "torch.autocast itself": lambda: start("amp-bf16", model, optimizer),
        "GradScaler itself": lambda: start("amp-fp16", model, optimizer),
        "weights in torch.float64": lambda: start("amp-bf16", Net().double()),
        "its own method compile": lambda: start("amp-bf16", compiled),
        "LBFGS": lambda: start("amp-fp16", model, torch.optim.LBFGS(model.parameters())),
        "parts of it are called": lambda: ScriptPrecision("tf32", said_here.append).begin(model, model.last, []),
        "never called as a module": lambda: ScriptPrecision("tf32", said_here.append).begin(model, None, []),
        "expected a unit-scaled model at fp8-unit": lambda: start("fp8-unit", model, optimizer),
    }
    for number, (why, case) in enumerate(cases.items()):
        scaler = torch.amp.GradScaler("cpu", enabled="Scaler" in why)
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in why):
            case()
        del scaler
        assert re.match(
            f"--precision .* is refused for Net: .*{why}.*; the script continues unchanged$", said_here[number]
        )
        assert ".;" not in said_here[number]
        assert "forward" not in vars(model) and not model._forward_hooks and "step" not in vars(optimizer)
        assert model.last(x).dtype == torch.float32


def test_autocast_that_begins_inside_a_forward_is_refused_at_that_moment(start: Start, said_here: list[str]) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.one(x)

    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start("amp-fp16", model, optimizer)
    for _ in range(2):
        output = model(torch.ones(1, 8))
        assert output.dtype == torch.bfloat16  # the script's own, as without
        output.float().sum().backward()
        optimizer.step()
    assert len(said_here) == 1 and "uses torch.autocast itself, from here on" in said_here[0]


# -- the command


def test_a_script_at_amp_fp16_is_recorded_with_its_scale_and_skips(tmp_path: Path) -> None:
    source = (SCRIPTS / "mnist.py").read_text("utf-8").replace("model(data), target)", "model(data), target) * scale()")
    source = source.replace("import argparse", "import argparse, itertools")
    head, main = source.rsplit("\n\nif __name__", 1)
    head += "\n\nsteps = itertools.count()\ndef scale():\n    return 1e9 if next(steps) == 2 else 1.0\n"
    (tmp_path / "train.py").write_text(f"{head}\n\nif __name__{main}")
    options = ["--precision", "amp-fp16", "--every", "1", "--output", "run"]
    result = watched(*options, "train.py", "--workers", "0", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert said(result) == ["plimsoll: watching Net (1,050 parameters, SGD) in amp-fp16, every step, into run"]
    run = Run(tmp_path / "run")
    assert run.manifest["precision"] == "amp-fp16" and run.steps == list(range(6))
    assert run.scalars("scale")[1].tolist() == [2.0**16] * 3 + [2.0**15] * 3
    assert [event.step for event in run.events() if event.kind == "skip"] == [2]
    losses = [float.fromhex(line.split()[-1]) for line in result.stdout.splitlines() if "loss" in line]
    assert run.scalars("loss")[1].tolist() == losses and max(losses[3:]) < 10  # never scaled ones
    assert "from fp16" in repr(run.spectrum("activations", "conv:output", 0))
    assert run.spectrum("gradients", "fc.weight", 0).absmean < 1  # true ones


def test_a_module_that_makes_a_scaler_of_its_own_is_refused_late(tmp_path: Path) -> None:
    source = (
        "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n    loss = model(torch.ones(2, 4)).mean() * 0.1\n"
        "    if step == 1:\n        scaler = torch.amp.GradScaler('cpu')\n"
        "    if step:\n        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()\n"
        "    else:\n        loss.backward(); optimizer.step()\n"
        "    optimizer.zero_grad()\nprint('end', scaler.get_scale())\n"
    )
    (tmp_path / "train.py").write_text(source)
    result = watched("--precision", "amp-fp16", "--output", "run", "-m", "train", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "end 65536.0\n"), result.stderr
    _, line = said(result)
    assert line.endswith("amp-fp16 is refused: the script makes a GradScaler itself; the script continues unchanged")
    run = Run(tmp_path / "run")
    assert run.manifest["precision"] == "the script's own precision"
    assert [event.kind for event in run.events()] == ["precision"]


def test_ranks_train_and_skip_together(tmp_path: Path) -> None:
    source = (
        (SCRIPTS / "ddp.py")
        .read_text("utf-8")
        .replace("    loss = ", "    loss = (1e9 if _ == dist.get_rank() else 1) * ")
    )
    source = source.replace(
        "dist.destroy", "torch.save(model.module.state_dict(), f'rank{dist.get_rank()}.pt')\ndist.destroy"
    )
    (tmp_path / "ddp.py").write_text(source)
    command = ("-m", "plimsoll", "run", "--precision", "amp-fp16", "--output", "run", "ddp.py")
    (line,) = [line for rank in processes.as_ranks([command] * 2, tmp_path, ENVIRONMENT) for line in said(rank)]
    assert "(195 parameters, SGD) in amp-fp16, every 10 steps, into run" in line
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert all(first[name].equal(second[name]) and first[name].isfinite().all() for name in first)
    run = Run(tmp_path / "run")
    assert run.manifest["precision"] == "amp-fp16" and "from fp16" in repr(run.spectrum("activations", "0:output", 0))
    # Each rank overflowed once, and both have skipped.
    assert sorted({event.step for event in run.events() if event.kind == "skip"}) == [0, 1]
    assert run.scalars("scale")[1].tolist() == [2.0**16, 2.0**15, 2.0**14]

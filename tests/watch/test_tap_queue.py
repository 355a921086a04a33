"""Taps that queue, as on a GPU: the records are those of taps that measure at once, or there is none.

The CPU's backend measures here, and is made to queue. What only a device has (streams, captures, its memory) is played
by the functions that ask for it.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll import kernels
from plimsoll.kernels import backend
from plimsoll.runs import Run
from plimsoll.watch import session, tap_queue
from plimsoll.watch.sample import BANK_ROWS, Pool, Rows
from plimsoll.watch.session import WatchSession
from plimsoll.watch.tap_queue import TapQueue
from tests.support.cases import each
from tests.support.spectra import same_tables
from tests.support.watch.recording import batches, only_run

CPU = backend.choose(torch.empty(0))
STEPS = 4  # the first is the trial
Change = Callable[[Tensor], object]


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "QUEUES", True)


class Changed(nn.Module):
    """A layer, after whose tap something happens to its output, from some step on."""

    def __init__(self, change: Change, since: int = 0) -> None:
        super().__init__()
        self.change, self.since, self.step = change, since, 0
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        z = y.clone()
        if self.step >= self.since:
            self.change(y)
        return self.third(z)


def loop(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None, steps: int = STEPS) -> None:
    """Plain steps, with the watch's next step known to the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, x in enumerate(batches(steps, 4, 8)):
        model.step = step
        optimizer.zero_grad()
        (call or model)(x).square().mean().backward()
        optimizer.step()


def record(
    folder: Path, make: Callable[[], nn.Module], train: Callable[[nn.Module], None] = loop, **settings: Any
) -> Run:
    torch.manual_seed(0)
    model = make()
    with pl.watch(model, run=folder, every=1, **settings):
        train(model)
    return only_run(folder)


def both(
    folder: Path, make: Callable[[], nn.Module], train: Callable[[nn.Module], None] = loop, **settings: Any
) -> tuple[Run, Run]:
    """The run of taps that queue, and that of taps that measure at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU, "QUEUES", True)
        queued = record(folder / "queued", make, train, **settings)
    return queued, record(folder / "at once", make, train, **settings)


def opened() -> set[WatchSession]:
    """The sessions of the watches that are open."""
    return {core for core in session._sessions if core.open}


def waiting(core: WatchSession) -> int:
    """How many tensors wait."""
    sample = core.sample
    return 0 if sample is None else sum(len(rows.queue or ()) for rows in sample._rows.values())


def kinds(run: Run, kind: str) -> list[str]:
    return [event.message for event in run.events() if event.kind == kind]


class Block(nn.Module):
    """A transformer's, with the in-place operations that people write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.Dropout(0.3, inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y += x
        return y + self.mlp(y)


class Transformer(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(0, (2, 2)))


def in_place() -> nn.Module:
    return Transformer(Block(), Block(), nn.Linear(8, 2))


@each("block", [None, 16])
def test_the_records_are_those_of_taps_that_measure_at_once(block: int | None, tmp_path: Path) -> None:
    """In-place ReLU, dropout and residual: what they write over was counted before, in each step."""
    folder = tmp_path / str(block)
    queued, at_once = both(folder, in_place, block=block)
    assert queued.steps == at_once.steps and len(queued.steps) == STEPS
    assert same_tables(queued.table(), at_once.table())
    assert kinds(queued, "not measured") == kinds(queued, "failure") == []


# What writes over a module's output. No version shows the last two.
WRITES: dict[str, Change] = {
    "in place": lambda y: y.mul_(2.0),
    "through a view": lambda y: y.view(-1)[:3].fill_(7.0),
    "freed": lambda y: y.untyped_storage().resize_(0),
    "data": lambda y: y.data.mul_(2.0),
    "memory": lambda y: y.detach().numpy().fill(3.0),
}
SHOWN = ("in place", "through a view", "freed")


@each("kind", WRITES)
def test_what_is_written_over_in_each_step_is_counted_as_the_tap_saw_it(kind: str, tmp_path: Path) -> None:
    queued, at_once = both(tmp_path / kind, lambda: Changed(WRITES[kind]))
    assert same_tables(queued.table(), at_once.table())
    assert kinds(queued, "not measured") == kinds(queued, "failure") == []


@each("kind", SHOWN)
def test_what_is_written_over_after_the_trial_is_dropped_once_and_said(kind: str, tmp_path: Path) -> None:
    queued, at_once = both(tmp_path / kind, lambda: Changed(WRITES[kind], since=2))
    (message,) = kinds(queued, "not measured")
    assert message.startswith("activations second:output: expected values that stay until"), message
    there = entries(queued)
    assert entries(at_once) - there == {(2, "second:output")}, "from then on it is measured at once"
    for step, of in there:
        assert queued.spectrum("activations", of, step) == at_once.spectrum("activations", of, step), (step, of)


def entries(run: Run) -> set[tuple[int, str]]:
    return {(step, of) for of in run.tensors["activations"] for step, *_ in run.spectra("activations", of)}


# What puts other memory in the place of a tensor's: what the tap saw is there still.
PLACES: dict[str, Change] = {
    "data": lambda y: setattr(y, "data", torch.ones_like(y)),
    "set": lambda y: y.data.set_(torch.ones(4, 8)),
}


@each("kind", PLACES)
def test_a_tensor_that_gets_other_memory_is_counted_as_it_was(kind: str, tmp_path: Path) -> None:
    queued, at_once = both(tmp_path / kind, lambda: Changed(PLACES[kind], since=2))
    assert same_tables(queued.table(), at_once.table())
    assert kinds(queued, "not measured") == []


def test_tensors_of_inference_mode_are_measured_at_once(tmp_path: Path) -> None:
    """They have no version that would show a change."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look, self.head = nn.Identity(), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                y = self.look(x + 1.0)
                y.mul_(3.0)
            return self.head(x)

    def train(model: nn.Module) -> None:
        core = next(iter(opened()))
        loop(model)
        seen.append(set(core.pool.trials.passed))

    seen: list[set[tuple[str, str]]] = []
    queued, at_once = both(tmp_path, Features, train)
    assert same_tables(queued.table(), at_once.table())
    assert ("activations", "look:output") not in seen[0] and ("activations", "head:output") in seen[0]


def test_gradients_that_a_hook_writes_over_are_counted_as_the_tap_saw_them(tmp_path: Path) -> None:
    hook = lambda g: g.mul_(2.0)  # noqa: E731  (comes after the tap's own)
    queued, at_once = both(tmp_path, lambda: Changed(lambda y: y.register_hook(hook)))
    assert same_tables(queued.table(), at_once.table())


def test_gradients_that_flow_together_are_what_they_were(tmp_path: Path) -> None:
    """The engine adds gradients in place if nobody holds them; with a queue it makes a new tensor of the same bits."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.arms, self.head = (
                nn.Linear(8, 8),
                nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
                nn.Identity(),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for arm in self.arms:
                x = x + arm(x)
            return self.head(x)

    weights: list[list[Tensor]] = []

    def train(model: nn.Module) -> None:
        loop(model)
        weights.append([p.detach().clone() for p in model.parameters()])

    queued, at_once = both(tmp_path, Forked, train)
    assert same_tables(queued.table(), at_once.table())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


# -- where forwards and backwards do not come in pairs -----------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.fails = nn.Linear(8, 8), nn.Linear(8, 2), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.fails:
            raise MemoryError("out of memory")
        return self.head(x)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError("out of memory")


def retried_forward(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(batches(STEPS, 4, 8)):
        if step == 2:
            model.fails = True
            with pytest.raises(MemoryError):
                model(x)
            model.fails = False
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def retried_backward(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(batches(STEPS, 4, 8)):
        optimizer.zero_grad()
        if step == 2:
            with pytest.raises(MemoryError):
                model.head(FailsBackward.apply(model.inner(x))).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()


def without_backward(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(STEPS, 4, 8):
        model(x)
        with torch.no_grad():
            model(x[:1])
        with torch.inference_mode():
            model(x[:1])
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_grad(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(STEPS, 4, 8):
        grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g
        optimizer.step()


def in_parts(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(STEPS, 4, 8):
        optimizer.zero_grad()
        model.head(model.inner(x)).square().mean().backward()
        optimizer.step()


def by_closure(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x in batches(STEPS, 4, 8):

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def in_backward(model: nn.Module) -> None:
    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x in batches(STEPS, 4, 8):
        model(x).square().mean().backward()


def kept_graph(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    loss: Tensor | None = None
    for x in batches(STEPS, 4, 8):
        kept, loss = loss, model(x).square().mean()
        loss.backward(retain_graph=True)
        if kept is not None:
            kept.backward()  # its hooks are of a step that is over
        optimizer.step()
        optimizer.zero_grad()


LOOPS = (
    retried_forward, retried_backward, without_backward, by_grad, in_parts, by_closure, in_backward, kept_graph,
)  # fmt: skip


@each("train", LOOPS, ids=lambda train: train.__name__)
def test_loops_of_any_kind_record_the_same(train: Callable[[nn.Module], None], tmp_path: Path) -> None:
    queued, at_once = both(tmp_path / train.__name__, Fails, train)
    assert same_tables(queued.table(), at_once.table())
    assert kinds(queued, "not measured") == kinds(queued, "failure") == []


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.head, self.reentrant = Block(), nn.Linear(8, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, 2)).requires_grad_()
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


@each("reentrant", [False, True])
def test_recomputed_activations_are_counted_once(reentrant: bool, tmp_path: Path) -> None:
    queued, at_once = both(tmp_path / str(reentrant), lambda: Recomputed(reentrant))
    assert same_tables(queued.table(), at_once.table())


def test_a_model_within_another_has_a_queue_of_its_own(tmp_path: Path) -> None:
    """Both are watched: the inner one's forward ends first, and the outer one's tensors wait on."""
    left: list[list[int]] = []

    def train(model: nn.Module) -> None:
        with pl.watch(model[0], run=tmp_path / f"inner {len(left)}", every=1):
            sessions = sorted(opened(), key=lambda core: core.name)
            model[0].register_forward_hook(lambda *_: left.append([waiting(core) for core in sessions]))
            loop(model)

    queued, at_once = both(tmp_path, in_place, train)
    assert same_tables(queued.table(), at_once.table())
    assert same_tables(*(only_run(tmp_path / f"inner {n}").table() for n in (0, STEPS)))
    assert sorted(left[STEPS - 1]) == [0, max(left[STEPS - 1])] != [0, 0] and left[-1] == [0, 0]


def test_a_thread_trains_a_model_of_its_own(tmp_path: Path) -> None:
    def train(model: nn.Module) -> None:
        other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))

        def alone() -> None:
            with pl.watch(other, run=tmp_path / f"other {CPU.QUEUES}", every=1):
                loop(other)

        thread = threading.Thread(target=alone)
        thread.start()
        loop(model)
        thread.join()

    linear = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731  (draws no random numbers)
    queued, at_once = both(tmp_path, linear, train)
    assert same_tables(queued.table(), at_once.table())


# -- what waits, and for how long --------------------------------------------------------------------------------------


class Launches:
    """The tensors of each launch of many, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.on: list[object] = []
        self.stream: object = None
        original = kernels.measure_each

        def measure_each(tensors: Any, *args: Any, **settings: Any) -> None:
            self.sizes.append(len(tensors))
            self.on.append(self.stream)
            original(tensors, *args, **settings)

        patch.setattr("plimsoll.kernels.measure_each", measure_each)


ACTIVATIONS = {"collect": ("activations", "activation_gradients")}


@pytest.mark.usefixtures("queues")
def test_a_step_after_the_trial_has_one_launch_forward_and_one_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    record(tmp_path / "run", lambda: Changed(torch.clone), **ACTIVATIONS)
    assert launches.sizes == [5, 4] * STEPS  # in the first one the trials


@pytest.mark.usefixtures("queues")
def test_nothing_waits_once_a_forward_or_backward_has_ended(tmp_path: Path) -> None:
    left: list[int] = []
    alive: list[weakref.ref[Any]] = []

    def train(model: nn.Module) -> None:
        (core,) = opened()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(STEPS, 4, 8):
            handle = model.second.register_forward_hook(
                lambda _m, _x, y: alive.append(weakref.ref(y.untyped_storage())) or left.append(waiting(core))
            )
            y = model(x)
            left.append(waiting(core))
            y.square().mean().backward()
            left.append(waiting(core))
            handle.remove()
            optimizer.step()
            optimizer.zero_grad()

    record(tmp_path / "run", lambda: Changed(torch.clone), train, **ACTIVATIONS)
    assert left == [3, 0, 0] * STEPS


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    """At most as many bytes as allowed; a larger tensor is measured at once."""
    most: list[int] = []

    def train(model: nn.Module) -> None:
        def look(*_: object) -> None:
            for core in opened():
                for rows in core.sample._rows.values() if core.sample is not None else ():
                    queue = rows.queue
                    most.append(0 if queue is None else sum(each.x.nbytes for each in queue._waiting))

        handles = [module.register_forward_hook(look) for module in model.modules()]
        loop(model)
        for handle in handles:
            handle.remove()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tap_queue, "most_bytes", lambda _: 4 * 8 * 4 * 2)
        queued, at_once = both(tmp_path, make, train)
    assert max(most) == 4 * 8 * 4 * 2
    assert same_tables(queued.table(), at_once.table())


@each(("free", "may_wait"), [(80 << 30, 5 << 30), (4 << 30, 2 << 30), (0, 0)], ids=["empty", "nearly full", "full"])
def test_what_may_wait_on_a_gpu_is_never_what_the_training_lacks(free: int, may_wait: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 << 30))
        assert tap_queue.most_bytes(torch.device("cuda", 0)) == may_wait


@pytest.mark.usefixtures("queues")
def test_modules_that_are_called_often_add_up(tmp_path: Path) -> None:
    """Rows are added up while tensors wait for some of them."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(len(x), 3)
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return self.head(state)

    torch.manual_seed(0)
    model, calls = Cell(), BANK_ROWS
    with pl.watch(model, run=tmp_path / "run", every=1, **ACTIVATIONS):
        (core,) = opened()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, calls, 2)).sum().backward()
            optimizer.step()
        assert all(core.pool.trials.passed.values())
    run = only_run(tmp_path / "run")
    for step in range(3):
        assert run.spectrum("activations", "cell:output", step).count == calls * 2 * 3
        assert run.spectrum("activations", "cell:input.0", step).sum == calls * 2 * 2
        assert run.spectrum("activation_gradients", "cell:output", step).count == calls * 2 * 3


@pytest.mark.usefixtures("queues")
def test_a_launch_that_fails_leaves_no_row_of_an_older_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernels.measure_each

    def measure_each(*args: Any, **settings: Any) -> None:
        if model.step == 2:
            raise MemoryError("no room for a table")
        original(*args, **settings)

    torch.manual_seed(0)
    model = Changed(torch.clone)
    with pl.watch(model, run=tmp_path / "run", every=1, **ACTIVATIONS):
        monkeypatch.setattr("plimsoll.kernels.measure_each", measure_each)
        with pytest.warns(RuntimeWarning, match="measure failed and was left out"):
            loop(model)
    run = only_run(tmp_path / "run")
    assert {step for step, _ in entries(run)} == {0, 1, 3}
    (message,) = kinds(run, "failure")
    assert "no room for a table" in message


@pytest.mark.usefixtures("queues")
def test_a_tensor_whose_row_was_dropped_is_measured_again_where_it_is_seen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is another tensor's by then."""
    original, fails = kernels.measure_each, [False]

    def measure_each(*args: Any, **settings: Any) -> None:
        if fails[0]:
            raise MemoryError("no room for a table")
        original(*args, **settings)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with pl.watch(model, run=tmp_path / "run", every=1, **ACTIVATIONS):
        monkeypatch.setattr("plimsoll.kernels.measure_each", measure_each)
        loop(model, steps=2)
        (x,) = batches(1, 4, 8)
        fails[0] = True
        with pytest.warns(RuntimeWarning, match="measure failed and was left out"):
            model(x)
        fails[0] = False
        loss = model(x.clone()).square().mean() + model(x).square().mean()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    run = only_run(tmp_path / "run")
    assert run.spectrum("activations", "0:input", 2) == sum((pl.measure(x), pl.measure(x)), start=pl.Spectrum.empty())


@pytest.mark.usefixtures("queues")
def test_a_watch_that_closes_lets_go_of_what_waits(tmp_path: Path) -> None:
    """Also where a hook in a graph that is kept refers to the sample."""
    torch.manual_seed(0)
    model = Changed(torch.clone)
    watching = pl.watch(model, run=tmp_path / "run", every=1, **ACTIVATIONS)
    loop(model)
    (core,) = opened()
    y = model.first(torch.ones(4, 8))
    sample = core.sample
    assert sample is not None and waiting(core) == 2
    watching.close()
    assert all(not rows.queue for rows in sample._rows.values()) and y.requires_grad


def test_a_cpu_has_no_queue() -> None:
    assert Rows(torch.device("cpu"), Pool()).queue is None


# -- what only a device has --------------------------------------------------------------------------------------------


class Stream:
    """A stream of a device, which notes whom it waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.waits_for = name, torch.device("cpu"), list[str]()

    def wait_stream(self, other: "Stream") -> None:
        self.waits_for.append(other.name)


def test_a_change_of_the_stream_ends_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is launched on its own stream, which the new one waits for; from then on all is measured at once."""
    main, side = Stream("main"), Stream("side")
    current = [main]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.step = nn.Linear(8, 8), nn.Linear(8, 2), 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with on(side if self.step >= 2 else main):
                return self.second(x)

    monkeypatch.setattr(tap_queue, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "stream", on)
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        original = kernels.measure_each
        patch.setattr(
            "plimsoll.kernels.measure_each",
            lambda *a, **s: (setattr(launches, "stream", current[0].name), original(*a, **s)),
        )
        queued, at_once = both(tmp_path, Streams, collect=("activations",))
    assert same_tables(queued.table(), at_once.table())
    assert launches.sizes == [3, 3, 2] and launches.on == ["main"] * 3
    assert side.waits_for == ["main"] and main.waits_for == []


def test_nothing_is_queued_or_launched_while_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits already is measured when the capture is over: a launch in it would run at a replay."""
    capturing = [False]
    left: list[int] = []

    class Captures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.step = nn.Linear(8, 8), nn.Linear(8, 2), 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            capturing[0] = self.step == 2
            return self.second(x)

    def train(model: nn.Module) -> None:
        core = next(iter(opened()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x in enumerate(batches(STEPS, 4, 8)):
            model.step = step
            y = model(x)
            left.append(waiting(core))
            capturing[0] = False
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for name in ("tap_queue", "sample"):
        monkeypatch.setattr(f"plimsoll.watch.{name}.is_capturing", lambda _: capturing[0])
    queued, at_once = both(tmp_path, Captures, train)
    assert left == [0, 0, 2, 0, *[0] * STEPS]
    assert same_tables(queued.table(), at_once.table())


def test_the_trials_results_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = [False]
    monkeypatch.setattr("plimsoll.kernels.device_value.DeviceValue.ready", lambda _: ready[0])
    trials, tap = tap_queue.Trials(), ("activations", "layer:output")
    trials.count([tap], torch.tensor([False]))
    trials.learn()
    assert trials.passed == {}
    ready[0] = True
    TapQueue(torch.device("cpu"), trials)  # of the next step
    assert trials.passed == {tap: True}
    trials.judge(tap, False)
    trials.judge(tap, True)
    assert trials.passed == {tap: False}, "a tap that has failed never passes"

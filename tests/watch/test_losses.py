"""A recorded loss is the one that the script prints, whatever the script is made of."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plimsoll as pl
from plimsoll.runs import Run
from plimsoll.watch.steps.losses import Losses
from tests.support.patience import HANG_SECONDS
from tests.support.watch.recording import batches, mlp, only_run, train

GAN = Callable[[nn.Module, nn.Module], tuple[list[float], list[float]]]


def losses(run: Run, name: str = "loss") -> list[float]:
    return run.scalars(name)[1].tolist()


def rounded(values: list[float]) -> list[float]:
    """Sums are added up in double precision here, and in float32 by the script."""
    return [float(torch.tensor(value, dtype=torch.float32)) for value in values]


def close(found: list[float], expected: list[float]) -> bool:
    """Whether they are equal but for the float32 rounding of a few additions."""
    bound = 8 * torch.finfo(torch.float32).eps
    return len(found) == len(expected) and all(
        abs(a - b) <= bound * max(1.0, abs(b)) for a, b in zip(found, expected, strict=True)
    )


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def dcgan(generator: nn.Module, critic: nn.Module, *, to_none: bool = True, steps: int = 4) -> dict[str, list[float]]:
    """The loop of the well-known example: two backwards of the critic, and one through it for the generator."""
    for_critic, for_generator = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (critic, generator))
    bce, printed = nn.BCEWithLogitsLoss(), {"critic": [], "generator": []}
    for z, real in zip(batches(steps, 6, 4), batches(steps, 6, 8), strict=True):
        critic.zero_grad(set_to_none=to_none)
        on_real = bce(critic(real), torch.ones(6, 1))
        on_real.backward()
        fake = generator(z)
        on_fake = bce(critic(fake.detach()), torch.zeros(6, 1))
        on_fake.backward()
        for_critic.step()
        generator.zero_grad(set_to_none=to_none)
        through = bce(critic(fake), torch.ones(6, 1))
        through.backward()
        for_generator.step()
        printed["critic"].append((on_real + on_fake).item())
        printed["generator"].append(through.item())
    return printed


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loss_that_passes_through_a_model_is_not_its_own(to_none: bool, tmp_path: Path) -> None:
    bare, (generator, critic) = networks(), networks()
    with pl.watch(generator, run=tmp_path / "g", every=2), pl.watch(critic, run=tmp_path / "c", every=2):
        printed = dcgan(generator, critic, to_none=to_none)
    assert printed == dcgan(*bare, to_none=to_none)
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), bare[1].parameters(), strict=True))
    assert losses(only_run(tmp_path / "g")) == printed["generator"]
    assert close(losses(only_run(tmp_path / "c")), printed["critic"])


def test_one_of_two_models_is_watched(tmp_path: Path) -> None:
    for name, which in (("generator", 0), ("critic", 1)):
        models = networks()
        with pl.watch(models[which], run=tmp_path / name, every=2):
            printed = dcgan(*models)
        assert close(losses(only_run(tmp_path / name)), printed[name])


def test_a_critic_that_rises_and_steps_more_often(tmp_path: Path) -> None:
    """As the first Wasserstein GANs were written: `backward(-one)`, and several steps of the critic to one."""
    generator, critic = networks()
    for_critic, for_generator = (torch.optim.RMSprop(m.parameters(), lr=0.01) for m in (critic, generator))
    one, printed = torch.tensor(1.0), {"c": [], "g": []}
    with (
        pl.watch(generator, for_generator, run=tmp_path / "g", every=2),
        pl.watch(critic, for_critic, run=tmp_path / "c", every=2),
    ):
        for step, (z, real) in enumerate(zip(batches(9, 6, 4), batches(9, 6, 8), strict=True)):
            critic.requires_grad_(True)
            critic.zero_grad()
            on_real, on_fake = critic(real).mean(), critic(generator(z).detach()).mean()
            on_real.backward(one)
            on_fake.backward(-one)
            for_critic.step()
            printed["c"].append((on_real - on_fake).item())
            if step % 3 == 2:
                critic.requires_grad_(False)
                generator.zero_grad()
                loss = critic(generator(z)).mean()
                loss.backward(one)
                for_generator.step()
                printed["g"].append(loss.item())
    assert losses(only_run(tmp_path / "g")) == printed["g"]
    assert close(losses(only_run(tmp_path / "c")), printed["c"])


class ActorCritic(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8) if shared else nn.Identity()
        width = 8 if shared else 4
        self.actor, self.critic = nn.Sequential(nn.Linear(width, 3)), nn.Sequential(nn.Linear(width, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return functional.log_softmax(self.actor(h), dim=-1), self.critic(h)


@pytest.mark.parametrize("order", ["both backwards first", "one after the other", "one loss"])
def test_two_optimizers_of_one_model_have_a_loss_each(order: str, tmp_path: Path) -> None:
    model = ActorCritic(shared=False)
    actor, critic = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model.actor, model.critic))
    printed: tuple[list[float], list[float]] = ([], [])
    with pl.watch(model, [actor, critic], run=tmp_path / "run", every=2):
        for x in batches(4, 6, 4):
            actor.zero_grad()
            critic.zero_grad()
            logs, values = model(x)
            advantage = 1 - values
            both = -(logs[:, 0] * advantage.detach().squeeze()).mean(), advantage.square().mean()
            if order == "both backwards first":
                for loss in both:
                    loss.backward()
                actor.step()
                critic.step()
            elif order == "one after the other":
                for loss, optimizer in zip(both, (actor, critic), strict=True):
                    loss.backward()
                    optimizer.step()
            else:
                (both[0] + both[1]).backward()
                actor.step()
                critic.step()
            for values_of, loss in zip(printed, both, strict=True):
                values_of.append(loss.item())
    run = only_run(tmp_path / "run")
    if order == "one loss":
        assert close(losses(run), [a + b for a, b in zip(*printed, strict=True)])
        assert "loss:critic" not in run.scalar_names
    else:
        assert losses(run) == printed[0] and losses(run, "loss:critic") == printed[1]
        (event,) = [event for event in run.events() if event.kind == "loss"]
        assert "loss is that of actor; loss:critic" in event.message


def test_optimizers_found_by_themselves_have_their_losses_from_the_first_step(tmp_path: Path) -> None:
    model = ActorCritic(shared=True)
    with pl.watch(model, run=tmp_path / "run", every=2):
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.body, model.actor, model.critic)]
        printed = []
        for x in batches(3, 6, 4):
            model.zero_grad()
            logs, values = model(x)
            both = -logs[:, 0].mean(), (1 - values).square().mean()
            both[0].backward(retain_graph=True)
            both[1].backward()
            for optimizer in optimizers:
                optimizer.step()
            printed.append([loss.item() for loss in both])
    run = only_run(tmp_path / "run")
    assert losses(run, "loss:actor") == [a for a, _ in printed]
    assert losses(run, "loss:critic") == [b for _, b in printed]
    assert close(losses(run), [a + b for a, b in printed])


def test_a_closure_that_is_evaluated_often_has_the_loss_that_step_returns(tmp_path: Path) -> None:
    def fit(run: Path | None) -> tuple[list[float], nn.Module, int]:
        torch.manual_seed(0)
        model, evaluations = mlp(), 0
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        w = None if run is None else pl.watch(model, optimizer, run=run, every=1, max_tensors=300)
        x, y = batches(1, 64, 8)[0], batches(1, 64, 2)[0]

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        printed = [optimizer.step(closure).item() for _ in range(3)]
        if w is not None:
            w.close()
        return printed, model, evaluations

    bare, watched = fit(None), fit(tmp_path / "run")
    assert bare[0] == watched[0] and bare[2] == watched[2]
    assert all(torch.equal(a, b) for a, b in zip(bare[1].parameters(), watched[1].parameters(), strict=True))
    run = only_run(tmp_path / "run")
    assert losses(run) == bare[0]
    (event,) = [event for event in run.events() if event.kind == "closure"]
    assert event.details["evaluations"] > 10 and "the loss is that of the first" in event.message
    counted = sum(run.spectrum("activations", "0:output", step).count for step in run.steps)
    assert counted == watched[2] * 64 * 16
    assert run.spectrum("gradients", "0.weight", 2).count == 8 * 16 and not run.dropped


@pytest.mark.parametrize("way", ["divided before", "divided after", "added up", "scaled twice"])
def test_the_loss_scale_is_undone(way: str, tmp_path: Path) -> None:
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    printed = []
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for x in batches(3, 4, 8):
            optimizer.zero_grad()
            halves = [model(part).square().mean() / 2 for part in x.split(2)]
            if way == "divided before":
                for half in halves:
                    scaler.scale(half).backward()
            elif way == "divided after":
                for half in halves:
                    (scaler.scale(2 * half) / 2).backward()
            elif way == "added up":
                (scaler.scale(halves[0]) + scaler.scale(halves[1])).backward()
            else:
                for scaled in [scaler.scale(half) for half in halves]:
                    scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            printed.append(sum(half.item() for half in halves))
    assert close(losses(only_run(tmp_path / "run")), printed)


def test_losses_whose_gradients_are_dropped_are_of_no_step(tmp_path: Path) -> None:
    """A first evaluation that is thrown away, a batch that is left out, and a backward that fails."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.zero_grad()
        printed = train(model, optimizer, batches(2, 4, 8))
        loss = model(torch.ones(2, 8)).square().mean()
        loss.register_hook(lambda g: g.reshape(7))
        with pytest.raises(RuntimeError, match="shape"):
            loss.backward()
        printed += train(model, optimizer, batches(2, 4, 8))
    assert losses(only_run(tmp_path / "run")) == printed


def test_an_optimizer_that_steps_within_the_backward(tmp_path: Path) -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    printed = []
    with pl.watch(model, list(optimizers.values()), run=tmp_path / "run", every=2):
        for x in batches(3, 4, 8):
            loss = model(x).square().mean()
            loss.backward()
            printed.append(loss.item())
    run = only_run(tmp_path / "run")
    assert losses(run) == printed and [name for name in run.scalar_names if name.startswith("loss")] == ["loss"]


def test_gradients_that_no_backward_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one model there is one loss that it can be; with two, none is recorded, and that is said once."""
    model, other = mlp(), mlp()
    optimizer, others = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    weight = torch.nn.Parameter(torch.ones(()))
    with pl.watch(model, optimizer, run=tmp_path / "a", every=2), pl.watch(other, others, run=tmp_path / "b", every=2):
        for x in batches(3, 4, 8):
            loss = model(x).square().mean()
            (weight * 2).backward()
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
            optimizer.step()
            train(other, others, [x])
    assert "loss" not in only_run(tmp_path / "a").scalar_names
    assert caplog.text.count("its loss is not recorded") == 1
    assert len(losses(only_run(tmp_path / "b"))) == 3


def test_two_models_and_one_scaler_have_a_step_a_step(tmp_path: Path) -> None:
    generator, critic = networks()
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pl.watch(generator, two, run=tmp_path / "g", every=2), pl.watch(critic, one, run=tmp_path / "c", every=2):
        for z, real in zip(batches(4, 6, 4), batches(4, 6, 8), strict=True):
            one.zero_grad()
            scaler.scale(critic(real).mean()).backward()
            scaler.step(one)
            two.zero_grad()
            scaler.scale(critic(generator(z)).mean()).backward()
            scaler.step(two)
            scaler.update()
    for name in "gc":
        run = only_run(tmp_path / name)
        assert run.scalars("loss")[0].tolist() == run.scalars("scale")[0].tolist() == [0, 1, 2, 3]
        assert set(run.scalars("scale")[1].tolist()) == {64.0}
        assert run.manifest["scaler"] == "GradScaler"


def test_a_scaler_that_is_off_says_nothing_of_a_step(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        printed = train(model, optimizer, batches(3, 4, 8), torch.amp.GradScaler("cpu", enabled=False))
    run = only_run(tmp_path / "run")
    assert losses(run) == printed and "scale" not in run.scalar_names and "scaler" not in run.manifest
    assert not [event for event in run.events() if event.kind == "skip"]


def test_a_backward_of_the_main_thread_that_was_asked_for_before_the_first_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, other, printed = mlp(), mlp(), list[float]()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    asked, begun, ended = threading.Event(), threading.Event(), threading.Event()
    begins = Losses.backward_begins

    def late(self: Losses, value: Any, roots: list[Tensor]) -> None:
        """Hold the main thread between the question whose backward it is and the note that it has begun."""
        if threading.current_thread() is threading.main_thread():
            asked.set()
            assert begun.wait(HANG_SECONDS)
        begins(self, value, roots)

    def meet(_: Tensor) -> None:
        begun.set()
        assert ended.wait(HANG_SECONDS)

    def fit() -> None:
        assert asked.wait(HANG_SECONDS)
        loss = watched(torch.ones(2, 8)).square().mean()
        loss.register_hook(meet)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())

    monkeypatch.setattr(Losses, "backward_begins", late)
    with pl.watch(watched, run=tmp_path / "run", every=1):
        thread = threading.Thread(target=fit)
        thread.start()
        other(torch.ones(2, 8)).square().mean().backward()
        ended.set()
        thread.join()
    assert losses(only_run(tmp_path / "run")) == printed


def test_a_backward_of_another_thread_that_outlasts_the_first(tmp_path: Path) -> None:
    watched, other = mlp(), mlp()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    begun, done = threading.Event(), threading.Event()

    def meet(_: Tensor) -> None:
        begun.set()
        assert done.wait(HANG_SECONDS)

    def train_other() -> None:
        loss = other(torch.ones(2, 8)).square().mean()
        loss.register_hook(meet)
        loss.backward()

    with pl.watch(watched, run=tmp_path / "run", every=1):
        thread = threading.Thread(target=train_other)
        thread.start()
        assert begun.wait(HANG_SECONDS)
        loss = watched(torch.ones(2, 8)).square().mean()
        loss.backward()
        done.set()
        thread.join()
        optimizer.step()
    assert losses(only_run(tmp_path / "run")) == [loss.item()]


def test_a_model_that_another_thread_trains(tmp_path: Path) -> None:
    models = [mlp(), mlp()]
    printed: list[list[float]] = [[], []]
    together = threading.Barrier(2)

    def meet(_: Tensor) -> None:
        """Both are in their backwards at once."""
        together.wait()

    def fit(index: int) -> None:
        optimizer = torch.optim.SGD(models[index].parameters(), lr=0.1)
        for x in batches(6, 4, 8):
            optimizer.zero_grad()
            loss = models[index](x * (index + 1)).square().mean()
            loss.register_hook(meet)
            loss.backward()
            together.wait()
            optimizer.step()
            printed[index].append(loss.item())

    with pl.watch(models[0], run=tmp_path / "0", every=2), pl.watch(models[1], run=tmp_path / "1", every=2):
        threads = [threading.Thread(target=fit, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in (0, 1):
        assert losses(only_run(tmp_path / str(index))) == printed[index]

"""Models that are put together so that they cannot learn, and sound ones that look like them, watched for real."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Run
from tests.support.cases import each

Loss = Callable[[Tensor, Tensor], Tensor]


def mlp(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), *last)


def found(path: Path, model: nn.Module, rule: str, loss: Loss = F.cross_entropy, steps: int = 16) -> list[Finding]:
    """What a rule says of a watched training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=path, every=2):
        for _ in range(steps):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            loss(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
    return diagnose(path, rules=[rule])


# -- a softmax or sigmoid before a loss that has one


def in_bf16(y: Tensor, target: Tensor) -> Tensor:
    """A loss that is scaled, of values that were cast and reordered after the softmax."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(y.t().contiguous().t().reshape(16, 4), target, label_smoothing=0.1) / 4 * 1024


def one_hot(target: Tensor) -> Tensor:
    return F.one_hot(target, 4).float()


TWICE: dict[str, tuple[nn.Module, Loss, str]] = {
    "cross entropy": (nn.Softmax(dim=-1), F.cross_entropy, "softmax"),
    "cast and smoothed": (nn.Softmax(dim=-1), in_bf16, "softmax"),
    "binary": (nn.Sigmoid(), lambda y, t: F.binary_cross_entropy_with_logits(y, one_hot(t)), "sigmoid"),
    "of soft labels": (
        nn.Softmax(dim=-1), lambda y, t: -(one_hot(t) * F.log_softmax(y, dim=-1)).sum(dim=1).mean(), "softmax",
    ),
}  # fmt: skip
ONCE: dict[str, tuple[nn.Module, Loss]] = {
    "logits": (nn.Identity(), F.cross_entropy),
    "logarithm of a softmax": (nn.Softmax(dim=-1), lambda y, t: F.nll_loss(y.log(), t)),
    "log softmax": (nn.LogSoftmax(dim=-1), F.nll_loss),
    "log softmax twice, which changes nothing": (nn.LogSoftmax(dim=-1), F.cross_entropy),
    "sigmoid and its own loss": (nn.Sigmoid(), lambda y, t: F.binary_cross_entropy(y, one_hot(t))),
    "a sigmoid as a gate": (
        nn.Identity(), lambda y, t: F.binary_cross_entropy_with_logits(torch.sigmoid(y) * y, one_hot(t)),
    ),
    "soft labels of a teacher": (nn.Identity(), lambda y, t: F.cross_entropy(y, torch.randn(16, 4).softmax(dim=-1))),
    "sharpened probabilities": (nn.Softmax(dim=-1), lambda y, t: F.cross_entropy(y * 20, t)),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_a_function_that_is_applied_twice_is_named(name: str, tmp_path: Path) -> None:
    last, loss, function = TWICE[name]
    (finding,) = found(tmp_path / "run", mlp(last), "probabilities-as-logits", loss)
    assert (finding.severity, finding.evidence) == ("warning", {"function": function})


@each("name", ONCE)
def test_a_function_that_is_applied_once_is_not(name: str, tmp_path: Path) -> None:
    last, loss = ONCE[name]
    path = tmp_path / name.replace(" ", "-")
    assert found(path, mlp(last), "probabilities-as-logits", loss, steps=4) == []


# -- norms that see one value


class Signal(nn.Module):
    """A layer norm over the last dimension of signals; `width` is its length. A second norm is never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.unused, self.net = nn.LayerNorm(width), nn.LayerNorm(1), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x.unflatten(1, (-1, self.norm.normalized_shape[0]))).flatten(1))


def test_a_norm_of_one_value_is_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path / "one", Signal(1), "norm-of-few-values")
    assert (finding.severity, finding.where, finding.evidence["values"]) == ("warning", ("norm:output",), 1)
    assert found(tmp_path / "two", Signal(2), "norm-of-few-values") == []


class Rows(nn.Module):
    """A batch norm that sees so many of the 16 rows; pictures of one pixel, or of several."""

    def __init__(self, rows: int, pixels: int = 1, *, frozen: bool = False) -> None:
        super().__init__()
        self.net, self.rows, self.pixels, self.frozen = mlp(), rows, pixels, frozen
        self.norm = nn.BatchNorm2d(8 // pixels)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(not self.frozen)
        few = self.norm(x[: self.rows].unflatten(1, (-1, 1, self.pixels))).flatten(1)
        return self.net(torch.cat([few, x[self.rows :]]))


def test_a_batch_norm_of_two_values_is_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path / "two rows", Rows(2), "norm-of-few-values")
    assert (finding.severity, finding.where, finding.evidence["values"]) == ("warning", ("norm:output",), 2)
    assert "1 and -1" in finding.meaning


@each("name", ["three rows", "two pixels of two rows", "statistics of before"])
def test_a_batch_norm_of_more_is_not(name: str, tmp_path: Path) -> None:
    sound = {"three rows": Rows(3), "two pixels of two rows": Rows(2, 2), "statistics of before": Rows(2, frozen=True)}
    assert found(tmp_path / name, sound[name], "norm-of-few-values") == []


class Volts(nn.Module):
    """A norm of signals of this size, which grows to 1 during the run if `rises`."""

    def __init__(self, norm: nn.Module, size: float, *, rises: bool = False) -> None:
        super().__init__()
        self.norm, self.net, self.size, self.rises = norm, mlp(), size, rises

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(self.norm(self.size * x))
        self.size = min(self.size * 4, 1.0) if self.rises else self.size
        return y


@each("norm", [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=str)
def test_a_norm_of_values_below_its_epsilon_is_named(norm: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / type(norm).__name__
    (finding,) = found(path / "small", Volts(norm, 1e-5), "norm-of-few-values")
    assert (finding.severity, finding.where, finding.evidence["epsilon"]) == ("warning", ("norm:output",), 1e-5)
    assert 1e-11 < float(finding.evidence["mean_square"]) < 1e-9 and "epsilon" in finding.advice
    assert found(path / "usual", Volts(norm, 0.1), "norm-of-few-values") == []
    assert found(path / "at first", Volts(norm, 1e-5, rises=True), "norm-of-few-values") == []
    norm.eps = 1e-14
    assert found(path / "fits", Volts(norm, 1e-5), "norm-of-few-values") == []


def test_one_small_batch_among_others_is_not(tmp_path: Path) -> None:
    model = Rows(2)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        model.rows = 16 if model.rows == 2 else 2  # of the next batch
        return F.cross_entropy(y, target)

    assert found(tmp_path / "run", model, "norm-of-few-values", loss) == []


# -- units that are copies of each other


def constant(*layers: int, value: float = 0.05) -> nn.Sequential:
    """A network in which the weights of these layers begin at one value."""
    model = mlp()
    for layer in layers:
        nn.init.constant_(model[layer].weight, value)
        nn.init.zeros_(model[layer].bias)
    return model


class Adapted(nn.Module):
    """A network with a residual branch whose last layer begins at zero, scaled by a factor that begins at 1e-4."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.down, self.up, self.head = mlp(), nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1e-4))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x) + self.scale * self.up(self.down(x)))


def frozen() -> nn.Sequential:
    model = constant(0)
    model[0].requires_grad_(False)
    return model


class Halved(nn.Module):
    """A parametrization that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.computed += 1
        return x / 2


def test_a_parametrized_weight_is_not_computed_for_the_watch(tmp_path: Path) -> None:
    """A spectral norm's power iteration would go on each time."""
    model, half = mlp(), Halved()
    nn.utils.parametrize.register_parametrization(model[0], "weight", half)
    half.computed = 0
    assert found(tmp_path / "run", model, "symmetric-weights", steps=12) == [] and half.computed == 12


def normed(*gains: Callable[[int], Tensor], norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Sequential:
    """A network with norms whose gains begin so."""
    model = nn.Sequential(nn.Linear(8, 32))
    with torch.no_grad():
        for gain in gains:
            model.extend([norm(32), nn.ReLU(), nn.Linear(32, 32)])
            model[-3].weight.copy_(gain(32))
    return model.append(nn.Linear(32, 4))


class OnePlus(nn.LayerNorm):
    """A norm whose gain is 1 more than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


def small(size: int) -> Tensor:
    return 0.02 * torch.randn(size)


def wide(change: Callable[[Tensor], object], first: Callable[[int, int], Tensor] = torch.randn) -> nn.Sequential:
    """A network with a layer of 128 inputs and outputs, whose weights are changed after they are drawn."""
    model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    with torch.no_grad():
        model[2].weight.copy_(0.02 * first(128, 128))
        change(model[2].weight)
    return model


def scattered(weight: Tensor, share: float = 1 / 400) -> Tensor:
    return weight.masked_fill_(torch.rand(weight.shape) < share, -2.0)


def inverse_error_function(weight: Tensor) -> Tensor:
    drawn = torch.empty(weight.shape, dtype=torch.bfloat16).uniform_(-1, 1).erfinv_()
    return weight.copy_(drawn.mul_(0.02 * 2**0.5).clamp_(-2, 2))


def heavy(rows: int, columns: int) -> Tensor:
    return torch.distributions.StudentT(1.5).sample((rows, columns))


class Trunk(nn.Sequential):
    """A trunk that is frozen from the start until a step, on which it may be changed, and a head behind it."""

    def __init__(self, change: Callable[["Trunk"], object] = lambda _: None, at: int = 0, layers: int = 2) -> None:
        torch.manual_seed(0)
        parts = [part for _ in range(layers - 1) for part in (nn.Linear(16, 16), nn.ReLU())]
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *parts).requires_grad_(False), nn.Linear(16, 4))
        self.change, self.at, self.calls = change, at, 0
        if not at:
            change(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            self.change(self)
        return super().forward(x)

    @torch.no_grad()
    def move(self, by: float) -> None:
        for p in self[0].parameters():
            p.data.add_(by * p.abs().amax() * torch.randn(p.shape))


class Beside(nn.Module):
    """A frozen network that is computed before a trained one, on the same inputs."""

    def __init__(self, width: int, copied: bool = False, out: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.target = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, out)).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8 if out == 8 else 4))
        if copied:
            self.target.load_state_dict(self.trained.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        target = self.target(x)
        return (self.trained(x) - target)[:, :4] if target.shape[1] == 8 else self.trained(x) + target.mean()


NORMS = ("1.weight", "4.weight")
WRONG: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str]] = {
    "units": (lambda: constant(0, 2, value=0.05), ("0.weight",), "the units of layer 0 are copies"),
    "gains": (lambda: normed(small, small), NORMS, "gains of the norms were initialised around zero"),
    "of batch norms": (lambda: normed(torch.randn, torch.randn, norm=nn.BatchNorm1d), NORMS, "with a deviation of "),
    "outliers": (lambda: wide(scattered), ("2.weight",), "layer 2 began with outliers of 2, "),
    "a draw in BF16": (lambda: wide(inverse_error_function), ("2.weight",), "layer 2 began with outliers of 2, "),
    "frozen as drawn": (Trunk, ("0.0.weight", "0.2.weight"), "2 parameters are frozen as they were drawn at random"),
}
DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "gains around one": lambda: normed(*2 * [lambda size: 1 + small(size)]),
    "gains of branches, trained from zero": lambda: normed(lambda size: 1 + small(size), small, small),
    "gains around zero that are no draw of one size": lambda: normed(small, lambda size: 4 * small(size)),
    "gains that have moved away from zero": lambda: normed(*2 * [lambda size: 0.02 + small(size)]),
    "gains of zero": lambda: normed(torch.zeros, torch.zeros),
    "one more than the weight": lambda: normed(small, small, norm=OnePlus),
    "one norm": lambda: normed(small),
    "an identity and noise": lambda: wide(lambda weight: weight.fill_diagonal_(1.0)),
    "a filled row": lambda: wide(lambda weight: weight[3].fill_(1.0)),
    "a filled column": lambda: wide(lambda weight: weight[:, 3].fill_(1.0)),
    "four identities": lambda: wide(lambda weight: weight.add_(torch.eye(64).repeat(2, 2)).clamp_(max=1.0)),
    "outliers of trained weights": lambda: wide(lambda weight: weight, heavy),
    "outliers in BF16": lambda: wide(lambda weight: weight.copy_(weight.bfloat16()), heavy),
    "outliers that were clipped": lambda: wide(lambda weight: weight.clamp_(-0.5, 0.5), heavy),
    "sparse weights": lambda: wide(lambda weight: scattered(weight.zero_(), 0.02)),
    "few outliers": lambda: wide(lambda weight: weight[1, :3].fill_(2.0)),
    "frozen after a training": lambda: Trunk(lambda trunk: trunk.move(0.1)),
    "frozen, and loaded later": lambda: Trunk(lambda trunk: trunk.move(0.1), at=30),
    "frozen, then trained": lambda: Trunk(lambda trunk: trunk.requires_grad_(True), at=30),
    "frozen, one layer": lambda: Trunk(layers=1),
    "frozen, all from another draw": lambda: Trunk(lambda t: [nn.init.kaiming_normal_(t[0][i].weight) for i in (0, 2)]),
    "frozen, of which one was loaded": lambda: Trunk(lambda trunk: trunk[0][0].weight.mul_(2)),
    "frozen, and nothing else": lambda: Trunk(lambda trunk: trunk[1].weight.requires_grad_(False)),
    "frozen target": lambda: Beside(16, copied=True),
    "frozen random target": lambda: Beside(16),
    "frozen network of other features": lambda: Beside(16, out=12),
    "random": mlp,
    "a head at zero": lambda: constant(2, value=0.0),
    "a head at a constant": lambda: constant(2, value=0.1),
    "all layers at zero, which do not move": lambda: constant(0, 2, value=0.0),
    "a branch that begins at zero": Adapted,
    "constant and not trained": frozen,
}


def judged(name: str) -> tuple[str, Loss, int]:
    """The rule that judges a case, the loss, and the steps that it needs."""
    return (
        ("untrained-parameters", F.cross_entropy, 60)
        if "frozen" in name
        else ("symmetric-weights", F.cross_entropy, 16)
    )


@each("name", WRONG)
def test_units_that_move_as_one_and_wrong_draws_are_named(name: str, tmp_path: Path) -> None:
    path, (model, where, words) = tmp_path / name.replace(" ", "-"), WRONG[name]
    (finding,) = found(path, model(), *judged(name))
    assert (finding.severity, finding.where) == ("warning", where)
    assert words in verdict(View(Run(path)), [finding])


@each("name", DIFFERENT)
def test_layers_that_begin_at_a_constant_may_be_sound(name: str, tmp_path: Path) -> None:
    path = tmp_path / name.replace(" ", "-")
    assert [str(f) for f in found(path, DIFFERENT[name](), *judged(name))] == []


# -- layers that are saturated from the start


class Straight(torch.autograd.Function):
    """Signs, whose gradient is passed on as it is."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(x)


def deep(act: Callable[[], nn.Module], std: float, layers: int = 3) -> nn.Sequential:
    """A network whose hidden layers' weights have this size; the last one is as usual."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(layers):
        model += nn.Sequential(nn.Linear(8, 8), act())
        nn.init.normal_(model[-2].weight, std=std)
    model.append(nn.Linear(8, 4))
    return model


OPEN: dict[str, Callable[[], nn.Module]] = {
    "usual weights": lambda: deep(nn.Tanh, 8**-0.5),
    "large weights before a ReLU": lambda: deep(nn.ReLU, 10.0),
    "a single layer": lambda: deep(nn.Tanh, 40.0, layers=1),
    "signs with a straight gradient": lambda: deep(Signs, 1.0),
    "a softmax": lambda: deep(lambda: nn.Softmax(dim=-1), 10.0),
    "clamped at a sixth of the values": lambda: deep(nn.Hardtanh, 0.25),
}


def test_layers_that_are_saturated_from_the_start_are_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path / "run", deep(nn.Tanh, 40.0), "gradients-vanish")
    assert (finding.severity, finding.where) == ("warning", ("1:output", "3:output", "5:output"))
    words = verdict(View(Run(tmp_path / "run")), [finding])
    assert "have been saturated since step 0" in words and "of their outputs are at 1 or -1" in words


@each("name", OPEN)
def test_layers_that_pass_gradients_are_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / name.replace(" ", "-")
    assert [str(f) for f in found(path, OPEN[name](), "gradients-vanish")] == []

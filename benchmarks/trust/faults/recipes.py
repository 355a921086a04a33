"""Faults of recipes: rates, starts, layers, labels; all held back, their author had not read the rules."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.breaks import SIDE
from benchmarks.trust.faults.optimizers import NO_GRADIENT, RATE, TOO_HIGH
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp, surface, token_loss
from benchmarks.trust.training import Training

NOT_LEARNING = (
    r"(does|did|do|has|is|are) (not|hardly) (fall|fell|fallen|learn|improv|decrease|better)"
    r"|never (fell|falls|learn|improv)|loss [^.]*stays?\b|\bchance\b|plateau|no better|\bflat\b"
)
MANY = r"(units|neurons|columns|rows|channels|weights|outputs|values)"
EQUAL = rf"identical|symmetr|{MANY}[^.]*(\bequal\b|the same|distinct|copies|duplicate|constant)|few distinct|same value"


def _classify(
    run: Training, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 200, **more: object
) -> None:
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, steps, **more)


@fault("warm-up-missing", named=rf"{TOO_HIGH}|warm.?up|{RATE}.*{NOT_LEARNING}", misleading="dead-layer", held_back=True)
def no_warm_up(run: Training) -> None:
    """Eight blocks with norms after the sums begin at the full rate: with a warm-up they learn, so they never do."""
    model = Transformer(depth=8, post=True)
    batch = batches(*counting(), size=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 120)


@fault(
    "unfreezing-forgotten",
    named=rf"({NO_GRADIENT}|frozen|requires_grad).*trunk|trunk.*({NO_GRADIENT}|frozen)",
)
def still_frozen(run: Training) -> None:
    """The trunk was frozen while the head was warmed up, and stays so: the optimizer holds it, it gets no gradient."""
    model = nn.ModuleDict({"trunk": mlp(16, 8, 8), "head": nn.Linear(8, 10)})
    model["trunk"].requires_grad_(False)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model["head"](torch.relu(model["trunk"](x))), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 200)


@fault(
    "padding-index-in-use",
    named=r"\b(row|rows|token 0|index 0|padding)\b.*(never|no gradient|zero|not mov|not train)"
    r"|(never|no gradient|zero).*\b(rows?|padding)\b",
    held_back=True,
)
def padding_in_use(run: Training) -> None:
    """The most frequent token is the padding index of the table: its row is zero and never trained."""
    tokens = nn.Embedding(32, 16, padding_idx=0)
    model = nn.ModuleDict({"tokens": tokens, "head": mlp(32, 64, 1)})
    worth = 3 * torch.randn(32)
    worth[0] = 9.0

    def loss(step: int) -> Tensor:
        pair = torch.randint(32, (64, 2)) * (torch.rand(64, 2) < 0.6)
        y = worth[pair[:, :1]] * (1 + worth[pair[:, 1:]])
        return F.mse_loss(model["head"](tokens(pair).flatten(1)), y / 10)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 240)


@fault("labels-shuffled", named=rf"{NOT_LEARNING}|\blabels?\b", misleading="dead-layer")
def shuffled(run: Training) -> None:
    """Labels were sorted and pictures were not: nothing that is learned helps, the loss stays at chance."""
    x, y = clusters(count=65536)
    model, batch = mlp(16, 64, 64, 10), batches(x, y.sort().values, size=64)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 240)


@fault(
    "softmax-before-cross-entropy",
    named=rf"softmax|vanish|saturat|gradients? [^.]*(tiny|too small|shrink)|{NOT_LEARNING}",
)
def two_softmaxes(run: Training) -> None:
    """The model ends with a softmax, and the cross entropy has one: the loss cannot fall below 1.46."""
    model = nn.Sequential(mlp(16, 64, 64, 10), nn.Softmax(dim=-1))
    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 240)


@fault(
    "norm-of-one-value",
    named=r"\bnorm\b.*(zero|constant|dead-layer|erase|same|one value|collapse)"
    r"|(dead-layer|zero|constant|collapse).*\bnorm\b",
)
def one_value(run: Training) -> None:
    """A layer norm over the last dimension, which has one entry: its output is its bias, whatever comes in."""

    class Signal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.net = nn.LayerNorm(1), mlp(16, 64, 64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.norm(x[..., None]).squeeze(-1))

    model = Signal()
    _classify(run, model, torch.optim.AdamW(model.parameters(), lr=2e-3))


@fault(
    "saturated-from-the-start",
    named=r"saturat|vanish|initiali[sz]|gradients? [^.]*(tiny|too small|shrink|zero)"
    r"|(activation|output)s? [^.]*(too large|at (its|their) limit)",
)
def saturated(run: Training) -> None:
    """Weights of size 5 in six layers: every tanh is at 1 or -1, hardly a gradient comes through, learning crawls."""
    model = mlp(16, *[64] * 6, 10, act=nn.Tanh)
    for layer in model[:-1]:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=5.0)
    _classify(run, model, torch.optim.Adam(model.parameters(), lr=1e-3))


@fault("symmetric-weights", named=EQUAL)
def symmetric(run: Training) -> None:
    """All weights of a layer begin at one constant: its units stay copies of each other, and one number passes."""
    model = mlp(16, 64, 64, 10)
    for layer in model[:4]:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.05)
            nn.init.zeros_(layer.bias)
    _classify(run, model, torch.optim.AdamW(model.parameters(), lr=2e-3))


@fault(
    "critic-without-a-bound",
    named=r"diverge|without (a )?bound|activation-growth"
    r"|(loss|weight|output|activation|value)s? [^.]*(grow|drift|rise|explod|falls)",
    held_back=True,
)
def unbounded_critic(run: Training) -> None:
    """A Wasserstein critic whose slope nothing limits: its scores and its loss grow for ever."""
    maker, critic = mlp(8, 64, 2), mlp(2, 64, 64, 1)
    makes = torch.optim.RMSprop(maker.parameters(), lr=1e-4)
    criticises = torch.optim.RMSprop(critic.parameters(), lr=3e-3)
    run.watch(maker, makes, "maker")
    run.watch(critic, criticises, "critic")
    for _ in range(240):
        true = torch.randn(64, 2) + 3
        loss = critic(maker(torch.randn(64, 8)).detach()).mean() - critic(true).mean()
        run.step(loss, criticises)
        run.step(-critic(maker(torch.randn(64, 8))).mean(), makes, log=False)


@fault("outlier-in-the-data", named=r"\binput\b|outlier|check the (data|batch)", misleading=SIDE)
def outlier(run: Training) -> None:
    """A missing value is coded as 1e30 in one row of step 82: finite, but its square is not."""
    model, batch = mlp(8, 64, 64, 1), batches(*surface())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step == 82:
            x[5, 2] = 1e30
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 160)


@fault(
    "schedule-steps-too-often",
    named=rf"{RATE}[^.]*(too (small|low)|tiny|zero|\b0\b(?!\.)|\bfell|\bfall|decays|decayed|shr[aiu]nk)"
    r"|updates-swallowed|smaller than (the )?rounding|moves? nothing",
    misleading="dead-layer",
)
def too_often(run: Training) -> None:
    """A schedule that is meant to step once an epoch steps once a batch: the rate is 10^-10 before half is done."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 280, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 12, 0.2))


@fault(
    "average-written-back",
    named=r"overwrit|undone|restored|written over|(moves?|moved|change[sd]?) (nothing|hardly|less)"
    r"|\bema\b|averaged? (weights|copy|model)",
)
def written_back(run: Training) -> None:
    """The averaged weights of evaluation are left in the model after each step: 0.999 of every update is undone."""
    model = mlp(16, 64, 64, 10)
    average = copy.deepcopy(model).requires_grad_(False)

    def follow(step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.001)
                fast.copy_(slow)

    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.1), after=follow)


class Angle(nn.Module):
    """Angles between predicted and true directions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 64, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """One angle a row; a row of zeros predicts the truth, as a shortcut for still objects."""
        still = (x == 0).all(dim=-1, keepdim=True)
        said = F.normalize(torch.where(still, y + 0 * self.net(x), self.net(x)), dim=-1)
        return torch.acos((said * y).sum(dim=-1).clamp(-1, 1))


@fault("arccosine-at-one", named=r"nonfinite[^>]*gradient", misleading=SIDE, held_back=True)
def arccosine(run: Training) -> None:
    """A loss of angles, and one prediction at step 74 that is exactly right: the slope of acos there is infinite."""
    model = Angle()

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 6)
        y = F.normalize(x[:, :3], dim=-1)
        if step == 74:
            x[3], y[3] = 0.0, torch.tensor([1.0, 0.0, 0.0])
        return model(x, y).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 140)

"""Faults of optimizers: what they hold, how far they move it, when they step."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp, surface, token_loss
from benchmarks.trust.training import Training

OUTSIDE = r"(in no optimizer|not in (any|an|the) optimizer|no optimizer (holds|has|updates|contains|covers)|outside)"
NO_GRADIENT = r"(never (get|got|receive|receives|has|have|had)s? (a |any )?gradient|no gradient|without (a )?gradient)"
NEVER_STEPS = (
    r"(never (steps|stepped|steps)|no (optimizer )?steps?|does not step|did not step|has not stepped|never called)"
)
MOVED = r"(moves?|moved|changes?|changed)"
MOVES_NOTHING = rf"{MOVED} nothing|(no|none of the) (weights?|parameters?) {MOVED}|nothing {MOVED}|not (move|change)"
RATE = r"(learning[ -]rate|\blr\b|\brate\b)"
TOO_HIGH = rf"(diverge|loss-spike|rose|has risen|stays? (high|above)).*({RATE})|{RATE}.*too (high|large)"


def _classify(
    run: Training, model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 200, **arguments: object
) -> None:
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, steps, **arguments)


@fault("head-in-no-optimizer", named=rf"{OUTSIDE}.*\b4\b|\b4\.weight.*{OUTSIDE}", misleading="dead-layer")
def head_forgotten(run: Training) -> None:
    """The last layer requires gradients and no optimizer holds it."""
    model = mlp(16, 64, 64, 10)
    _classify(run, model, torch.optim.AdamW(model[:4].parameters(), lr=3e-3))


@fault("branch-never-used", named=rf"{NO_GRADIENT}.*spare|spare.*{NO_GRADIENT}|spare.*never used", held_back=True)
def never_used(run: Training) -> None:
    """A branch that the optimizer holds is never called: its weights never get a gradient."""
    model = nn.ModuleDict({"used": mlp(16, 64, 10), "spare": mlp(16, 64, 10)})
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model["used"](x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 200)


@fault("detached-trunk", named=rf"{NO_GRADIENT}.*trunk|trunk.*{NO_GRADIENT}")
def detached(run: Training) -> None:
    """The trunk's output is detached: the trunk never gets a gradient, only the head learns."""
    model = nn.ModuleDict({"trunk": mlp(16, 64, 64), "head": nn.Linear(64, 10)})
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model["head"](model["trunk"](x).detach().relu()), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 200)


@fault("step-forgotten", named=NEVER_STEPS)
def step_forgotten(run: Training) -> None:
    """Backward runs, `optimizer.step()` is never called."""
    model = mlp(16, 64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = batches(*clusters())
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.losses.append(float(loss.detach()))


@fault("optimizer-of-a-copy", named=rf"{MOVES_NOTHING}|{OUTSIDE}", misleading="dead-layer", held_back=True)
def of_a_copy(run: Training) -> None:
    """The optimizer holds the parameters of a copy of the model, which get gradients from nobody."""
    model = mlp(16, 64, 10)
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=3e-3)
    _classify(run, model, optimizer)


@fault(
    "rate-of-zero",
    named=rf"{RATE}( is| was| of|=|: )*( exactly)? ?0\b|{RATE}.*(is|was) (0|zero)",
    misleading="swallowed",
)
def rate_zero(run: Training) -> None:
    """A schedule that is 0 from the start."""
    model = mlp(16, 64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
    _classify(run, model, optimizer, scheduler=scheduler)


@fault("rate-of-nan", named=rf"{RATE}.*\bnan\b|\bnan\b.*{RATE}", misleading="check the batch|dead-layer")
def rate_nan(run: Training) -> None:
    """A schedule divides 0 by 0 at step 53: the rate is NaN."""
    model = mlp(16, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float("nan") if step == 53 else 1.0)
    _classify(run, model, optimizer, scheduler=scheduler)


@fault("rate-of-inf", named=rf"{RATE}.*\binf|\binf.*{RATE}", misleading="check the batch|dead-layer", held_back=True)
def rate_inf(run: Training) -> None:
    """A warm-up divides by a number of steps that is 0: the rate is infinite from the start."""
    model = mlp(16, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float("inf"))
    _classify(run, model, optimizer, scheduler=scheduler)


@fault("rate-of-300", named=TOO_HIGH, misleading="dead-layer", every=5)
def stuck(run: Training) -> None:
    """A rate of 300 throws the loss away at the first steps and leaves it at chance."""
    model = mlp(16, 64, 64, 10)
    _classify(run, model, torch.optim.AdamW(model.parameters(), lr=300.0), 300)


@fault("diverges-within-twenty-steps", named=TOO_HIGH)
def early(run: Training) -> None:
    """The loss goes from 8 to thousands within twenty steps and stays there."""
    x, y = surface()
    model, batch = mlp(8, 64, 1, act=nn.Tanh), batches(x, 4 * y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.9, momentum=0.9)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, optimizer, loss, 200)


@fault("rate-ten-times-too-high", named=TOO_HIGH)
def language_rate(run: Training) -> None:
    """A language model at a rate of 0.3 from the start: it never learns."""
    model = Transformer()
    batch = batches(*counting(), size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 160)


@fault(
    "sign-of-the-loss",
    named=r"diverge|loss[^.]*(falls|fell|negative|without (a )?bound)|maximi[sz]",
)
def wrong_sign(run: Training) -> None:
    """The loss is maximised: it falls without bound as what it measures grows."""
    model, batch = mlp(8, 64, 1), batches(*surface())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return -F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 300)


@fault("gradients-never-zeroed", named=r"(never|not) (zeroed|cleared)|zero_grad|accumulat|add up|pile")
def never_zeroed(run: Training) -> None:
    """`zero_grad` is never called: every step moves by the sum of all gradients so far."""
    model = mlp(16, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    batch = batches(*clusters(spread=1.0))
    run.watch(model, optimizer)
    for step in range(250):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "accumulated-undivided",
    named=r"accumulat|micro-batch|not divided|undivided|divide the loss|summed over",
)
def undivided(run: Training) -> None:
    """Sixteen micro-batches are added up and not divided: sixteen times the rate, and it diverges."""
    model = mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = surface()
    batch = batches(x, 4 * y)
    run.watch(model, optimizer)
    for step in range(150):
        optimizer.zero_grad()
        for micro in range(16):
            x, y = batch(step * 16 + micro)
            loss = F.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "decay-to-nothing",
    named=r"decay.*(shrink|zero|vanish|drift|settle|lower)|(shrink|shrunk|vanish|drift).*decay",
    every=5,
)
def decay(run: Training) -> None:
    """A decay so strong that the weights shrink to nothing."""
    model = mlp(16, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=2.0)
    _classify(run, model, optimizer, 300)


@fault("updates-swallowed-bf16", named=r"updates-swallowed|smaller than (the )?rounding", precision="bf16", tested=True)
def swallowed(run: Training) -> None:
    """Weights kept in BF16 whose updates are smaller than their rounding."""
    model = mlp(16, 64, 64, 10).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)
    batch = batches(*clusters())
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault("updates-swallowed-fp16", named=r"updates-swallowed|smaller than (the )?rounding", precision="fp16")
def swallowed_fp16(run: Training) -> None:
    """A transformer's weights kept in FP16 with a rate too small for their rounding."""
    model = Transformer().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = batches(*counting(), size=8)
    run.watch(model, optimizer)
    for step in range(120):
        x, y = batch(step)
        with pl.emulate("fp16", lists=None):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        optimizer.zero_grad()
        (loss * 64).backward()
        for p in model.parameters():
            p.grad.div_(64)
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "decay-lost-to-rounding",
    named=r"decay[^.]*(lost|round|swallow|no effect|nothing)|(lost|round|swallow)[^.]*decay",
    precision="bf16",
    held_back=True,
)
def decay_swallowed(run: Training) -> None:
    """Weights in BF16 that AdamW would shrink by less than half of their last digit each step: no decay at all."""
    model = mlp(16, 64, 10).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    batch = batches(torch.randn(1024, 16), torch.randint(10, (1024,)))
    run.watch(model, optimizer)
    for step in range(300):
        x, y = batch(step)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "adam-epsilon-in-fp16",
    named=r"second-moment-lost|\bepsilon\b",
    misleading="dead-layer|check the batch",
    precision="fp16",
)
def epsilon_fp16(run: Training) -> None:
    """Adam whose weights and state are FP16: its epsilon of 1e-8 is zero there, and the first step divides by zero."""
    model = mlp(16, 64, 64, 10).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = batches(*clusters())
    run.watch(model, optimizer)
    for step in range(60):
        x, y = batch(step)
        with pl.emulate("fp16", lists=None):
            loss = F.cross_entropy(model(x.half()).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault("second-moments-lost", named=r"second-moment-lost", precision="fp16")
def second_moments(run: Training) -> None:
    """Adam with FP16 state and an epsilon that FP16 holds: small squares are zero in its second moments."""
    model = mlp(16, 64, 64, 10).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    batch = batches(*clusters())
    run.watch(model, optimizer)
    for step in range(120):
        x, y = batch(step)
        with pl.emulate("fp16", lists=None):
            loss = F.cross_entropy(model(x.half()).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault("epsilon-dominates", named=r"epsilon", tested=True)
def epsilon(run: Training) -> None:
    """A loss divided by a million: Adam's epsilon is larger than the roots of its second moments."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y) / 1e7

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 200)


@fault(
    "average-cannot-move",
    named=r"(average|ema|shadow|target|copy).*(move|rounding|swallow|stay|change)|(move|rounding|swallow|change).*(average|ema\b|shadow|copy)",
    precision="bf16",
)
def average(run: Training) -> None:
    """A moving average kept in BF16 that moves by a thousandth of the difference: rounding keeps it where it began."""
    model = nn.ModuleDict({"net": mlp(16, 64, 64, 10)})
    model["average"] = copy.deepcopy(model["net"]).bfloat16().requires_grad_(False)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model["net"](x), y)

    def follow(step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(model["average"].parameters(), model["net"].parameters(), strict=True):
                slow.mul_(0.999).add_(fast.bfloat16(), alpha=0.001)

    run.train(model, torch.optim.AdamW(model["net"].parameters(), lr=1e-3), loss, 300, after=follow)

"""Is the cheap recipe as good? The losses of three recipes against those of FP32, within a declared tolerance."""

import torch
from torch import nn

import plimsoll as pl

TOLERANCE = "2 %"  # of the loss; declared before anything was looked at
STEPS = 600


def losses(
    seed: int, weights: torch.dtype = torch.float32, *, autocast: bool = False, stochastic: bool = False
) -> list[float]:
    """The losses of one training; a seed is initialization and batches, so that recipes are paired."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)).to(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, STEPS)
    noise = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x.to(weights)).float()
        loss = nn.functional.mse_loss(output[:, 0], x[:, :4].sin().sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter in model.parameters() if stochastic else ():  # BF16 weights, stochastically rounded
                parameter.copy_(pl.cast(parameter, "bf16", rounding="stochastic", generator=noise))
        found.append(loss.item())
    return found


# 1. One run each. The noise between runs is estimated then.
base = losses(0)
recipes = {
    "autocast": losses(0, autocast=True),
    "BF16, stochastic": losses(0, stochastic=True),
    "BF16": losses(0, torch.bfloat16),
}
verdicts = {name: pl.parity(base, candidate, tolerance=TOLERANCE) for name, candidate in recipes.items()}
for name, found in verdicts.items():
    print(f"{name:<18}{found.sentence}")
assert verdicts["autocast"].verdict == "equivalent"
assert verdicts["BF16"].verdict == "worse"

# 2. It was known earlier: every reading of the history was valid when it was made.
worse = verdicts["BF16"]
print(f"\nBF16 is worse since step {worse.since_step}; it needs {float(worse.speed.steps):.2f} times the steps.")
assert worse.since_step < STEPS - 1

# 3. A run that breaks down is worse, whatever its losses were before.
broken = pl.parity(base, [*recipes["autocast"][:500], *[float("nan")] * 100], tolerance=TOLERANCE)
print(f"\n{broken}")
assert (broken.verdict, broken.diverged) == ("worse", (0, 1))

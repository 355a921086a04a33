"""Where a network's gradients lie, what FP16 would lose of them, and the shift that rescues them.

One pass over the gradients counts the values in each power of two. All that follows is arithmetic on these counts.
"""

import torch
from torch import nn

import plimsoll as pl

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Sigmoid())], nn.Linear(128, 10))
x, y = torch.randn(256, 128), torch.randint(10, (256,))
nn.functional.cross_entropy(model(x), y).backward()

spectra = pl.measure({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
whole = sum(spectra.values(), start=pl.Spectrum.empty())  # spectra merge by addition
fp16 = pl.formats.get("fp16")

print("All gradients, by power of two")
lowest, highest = (i - 149 for i in (whole.binades.nonzero()[0][0], whole.binades.nonzero()[0][-1]))
for exponent in range(highest, lowest - 1, -1):
    share = whole.binades[exponent + 149] / whole.count
    zone = "" if exponent >= fp16.min_exponent else "subnormal" if exponent >= fp16.quantum_exponent else "lost"
    print(f"  2^{exponent:<4}{'#' * round(300 * share):<40} {zone}")

print("\nparameter      lost in fp16  subnormal  best shift")
for name, spectrum in spectra.items():
    if name.endswith("weight"):
        fit = spectrum.fit("fp16")
        print(f"{name:<14}{fit.lost.estimate:>13.1%}{fit.subnormal.estimate:>11.1%}{spectrum.best_shift('fp16'):>12}")

fit, window = whole.fit("fp16"), whole.window("fp16", tolerance=0.001)
assert window is not None
shift = window[0]
rescued = whole.fit("fp16", shift=shift)
print(f"\nAs it is, FP16 loses {fit.lost.estimate:.1%} of the gradients.")
print(f"Times 2^{shift}, it loses {rescued.lost.estimate:.3%}; up to 2^{window[1]} nothing overflows.")

# The proof: cast the gradients themselves, and count.
gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
lost = (pl.cast(gradients, "fp16") == 0).double().mean().item()
kept = (pl.cast(gradients, "fp16", scale=2.0**shift) == 0).double().mean().item()
assert fit.lost.low <= lost <= fit.lost.high
assert rescued.lost.low <= kept <= rescued.lost.high <= 0.001
assert lost > 0.1

"""A tensor as another format would hold it: nearest and stochastic rounding, block scales, real codes, gradients."""

import torch

import plimsoll as pl

torch.manual_seed(0)
# Rows of very different size, as the layers of a network have them.
x = torch.randn(128, 64) * 2.0 ** torch.linspace(-16, 6, 128)[:, None]

print("format       zeros   error")
zeros, errors = {}, {}
for name in ("bf16", "fp16", "e4m3", "e5m2", "mxfp8_e4m3", "mxfp4", "nvfp4"):
    y = pl.cast(x, name)
    zeros[name] = (y == 0).double().mean().item()
    errors[name] = ((y - x) / x).abs().mean().item()  # relative, whatever the row's size
    print(f"{name:<12}{zeros[name]:>6.1%}{errors[name]:>8.2%}")
# Mantissa bits are precision, exponent bits are range; a scale for each block gives range back.
assert errors["fp16"] < errors["bf16"] < errors["e5m2"]
assert zeros["e4m3"] > 0.3 > zeros["mxfp8_e4m3"]
assert errors["mxfp8_e4m3"] < errors["e5m2"] < errors["mxfp4"]

# A scale: values are multiplied by it before, and divided by it after.
tiny = torch.full((8,), 2.0**-27)
assert pl.cast(tiny, "fp16").eq(0).all()
assert pl.cast(tiny, "fp16", scale=2.0**10).equal(tiny)

# Stochastic rounding is right on average: many small steps are not swallowed.
third = torch.full((100_000,), 1 / 3)
rounded = pl.cast(third, "e4m3", rounding="stochastic", generator=0)
values = sorted(set(rounded.tolist()))
print(f"\n1/3 in e4m3, at random to {values}: mean {rounded.mean().item():.4f}")
assert values == [0.3125, 0.34375]
assert abs(rounded.mean().item() - 1 / 3) < 0.0005

# Real codes and scales, as hardware stores them.
packed = pl.pack(x, "mxfp4")
assert packed.scales is not None
assert pl.unpack(packed).equal(pl.cast(x, "mxfp4"))
size = packed.codes.nbytes + packed.scales.nbytes
print(f"mxfp4: {x.nbytes} bytes become {size}, {8 * size / x.numel():.2f} bits a value")

# In training: e4m3 in the forward pass, e5m2 for the gradients.
w = torch.randn(64, 64, requires_grad=True)
pl.fake_quantize(w, forward="e4m3", backward="e5m2").square().sum().backward()
assert w.grad is not None
assert w.grad.equal(pl.cast(2 * pl.cast(w.detach(), "e4m3"), "e5m2"))
print("fake_quantize: the forward pass saw e4m3 values, the gradient came back in e5m2")

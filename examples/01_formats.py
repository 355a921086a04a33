"""What a format does to a number: rounding, a swallowed update, overflow, underflow.

Every format is a record: its numbers follow from its fields, and codes are encoded and decoded exactly.
"""

import plimsoll as pl


def as_stored(value: float, name: str) -> float:
    """The value that a format keeps of a number."""
    fmt = pl.formats.get(name)
    return float(fmt.decode(fmt.encode([value]))[0])


print("format   6.666666e-5    1 + 0.001        70000         3e-8")
for name in ("bf16", "fp16", "e5m2", "e4m3"):
    kept = [as_stored(value, name) for value in (6.666666e-5, 1.001, 70000.0, 3e-8)]
    print(f"{name:<6}" + "".join(f"{value:>13.6g}" for value in kept))

# FP16 has ten mantissa bits: it keeps three to four digits.
assert f"{as_stored(6.666666e-5, 'fp16'):.4e}" == "6.6638e-05"
# BF16 swallows an update of a thousandth: its neighbour of 1 is 1.0078.
assert as_stored(1.001, "bf16") == 1.0
# Above 65504 FP16 holds only infinity; E4M3 has none and saturates.
assert as_stored(70000.0, "fp16") == float("inf")
assert as_stored(70000.0, "e4m3") == 448.0
# Half of FP16's smallest number is 2.98e-8: what lies below is zero.
assert as_stored(2.9e-8, "fp16") == 0.0

print()
fmt = pl.formats.get("e3m4")  # any exponent and mantissa width is a format
print(f"e3m4: {fmt.bits} bits, {fmt.smallest_subnormal:g} to {fmt.max:g}, {fmt.binades} binades")
assert (fmt.bits, fmt.max) == (8, 15.5)

try:
    pl.formats.get("e4m3fnz")
except pl.FormatError as error:
    print(f"A wrong name is answered with the nearest:\n  {error}")

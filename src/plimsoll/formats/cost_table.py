"""Cost of a module's three products in a pair of formats: bytes, and device time."""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats.catalogue import get


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Speed of a device."""

    name: str
    bandwidth: float = 1.0  # bytes a second from its memory
    # Operations a second of products, by format. A format that is not listed has the rate of the narrowest listed one
    # that is at least as wide. None listed: only bytes count.
    rates: Mapping[str, float] = field(default_factory=dict[str, float])

    def cost(self, weights: float, inputs: float, outputs: float, forward: str, backward: str) -> float:
        """Return the cost of a module at a step, in seconds, or in bytes without a device.

        Each operand of the three products is read twice: weights and inputs in the forward's format, the gradient of
        the output in the backward's. A product takes as long as its wider operand, and the module as long as its
        reading or its arithmetic, the longer of the two. The first three arguments are numbers of values.
        """
        narrow, other = float(get(forward).bits), float(get(backward).bits)
        moved = 2 * ((weights + inputs) * narrow + outputs * other) / 8 / self.bandwidth
        if not self.rates:
            return moved
        operations = 2 * math.sqrt(weights * inputs * outputs)  # exact for a linear layer
        return max(moved, operations * (1 / self._rate(narrow) + 2 / self._rate(max(narrow, other))))

    def _rate(self, bits: float) -> float:
        able = [(get(name).bits, rate) for name, rate in self.rates.items() if get(name).bits >= bits]
        return min(able, key=lambda pair: (pair[0], -pair[1]))[1] if able else min(self.rates.values())


_HOPPER = {"fp32": 67e12, "tf32": 495e12, "bf16": 989e12, "fp16": 989e12, "e4m3": 1979e12, "e5m2": 1979e12}
_BLACKWELL = {
    "fp32": 75e12, "tf32": 1.1e15, "bf16": 2.25e15, "fp16": 2.25e15, "e4m3": 4.5e15, "mxfp8_e4m3": 4.5e15,
    "mxfp6_e2m3": 4.5e15, "mxfp4": 9e15, "nvfp4": 9e15,
}  # fmt: skip
# Peak rates without sparsity and bandwidths, from the makers' data sheets.
TABLES = {
    table.name: table
    for table in (
        CostTable(name="bytes"),
        CostTable(
            name="a100", bandwidth=2.04e12, rates={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
        ),
        CostTable(name="h100", bandwidth=3.35e12, rates=_HOPPER),
        CostTable(name="h200", bandwidth=4.8e12, rates=_HOPPER),
        CostTable(name="b200", bandwidth=8e12, rates=_BLACKWELL),
        CostTable(
            name="mi300x",
            bandwidth=5.3e12,
            rates={"fp32": 163e12, "tf32": 654e12, "bf16": 1307e12, "fp16": 1307e12, "e4m3fnuz": 2615e12},
        ),
    )
}


def cost_table(given: object) -> CostTable:
    """Return a device's table by name, or one from a mapping or a TOML file.

    A mapping or file has `bandwidth` and `rates`.
    """
    if isinstance(given, Mapping):
        return _made("a mapping", cast("Mapping[str, Any]", given))
    name = os.fspath(cast("os.PathLike[str]", given)) if isinstance(given, str | os.PathLike) else given
    if isinstance(name, str) and name.lower() in TABLES:
        return TABLES[name.lower()]
    if not isinstance(name, str) or not Path(name).is_file():
        raise ArgumentError(
            f"plan: expected costs to be one of {', '.join(TABLES)}, a TOML file or a mapping; got costs={name!r}. "
            "Choose one, or give bandwidth and rates."
        )
    try:
        content = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"plan: expected costs in a TOML file; got {name}. {error}.") from error
    return _made(Path(name).stem, content)


def _made(name: str, content: Mapping[str, Any]) -> CostTable:
    given: Any = content.get("rates", {})
    known = isinstance(given, Mapping) and not set(content) - {"bandwidth", "rates"}
    rates: dict[str, Any] = dict(cast("Mapping[str, Any]", given)) if known else {}
    bandwidth: Any = content.get("bandwidth", 1.0)
    if not known or not all(map(_is_positive, [bandwidth, *rates.values()])) or (rates and "bandwidth" not in content):
        raise ArgumentError(
            "plan: expected costs with bandwidth in bytes a second, and rates in operations a second by format; got "
            f"costs={dict(content)!r:.200}. Write bandwidth = 3.35e12 and a table [rates] with bf16 = 9.9e14."
        )
    for each in rates:
        try:
            get(each)
        except FormatError as error:
            raise FormatError(f"plan: expected rates by format. {error}") from None
    return CostTable(name=name, bandwidth=float(bandwidth), rates={each: float(rate) for each, rate in rates.items()})


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < math.inf

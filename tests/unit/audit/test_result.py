"""What an audit says of its rows: rankings, totals, tables, data, and the comparison with another."""

import json
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.errors import ArgumentError
from plimsoll.unit import Audit, Row, audit, functional
from tests.support.cases import each

UNIT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def made(*scales: tuple[float, float | None], kind: str = "operation") -> Audit:
    """An audit of operations with these log2 of the standard deviation, forward and backward."""

    def spectrum(scale: float) -> pl.Spectrum:
        return pl.measure(UNIT / UNIT.std(correction=0) * 2.0**scale)

    rows = [
        Row(position=i, kind=kind, operation="linear", module=f"layers.{i}", shape=(64, 64), dtype="float32",  # pyright: ignore[reportArgumentType]
            forward=spectrum(forward), backward=None if backward is None else spectrum(backward),
            absence="frozen" if backward is None else None)
        for i, (forward, backward) in enumerate(scales)
    ]  # fmt: skip
    return Audit(model="Made", rows=tuple(rows))


def test_the_worst_are_those_farthest_from_unit_scale_above_or_below() -> None:
    found = made((0.5, -3.0), (2.0, 0.1), (-7.0, None), (-1.0, 4.0))
    order = [(r.row.position, r.direction) for r in found.worst]
    assert order == [(2, "forward"), (3, "backward"), (0, "backward"), (1, "forward"), (3, "forward"), (0, "forward"),
                     (1, "backward")]  # fmt: skip
    assert [round(r.distance, 3) for r in found.worst] == [7.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.1]
    assert [r.row.position for r in found.ranked(direction="backward")] == [3, 0, 1]
    assert [(r.row.position, r.direction) for r in found.beyond(2.5)] == order[:3]
    assert found.ranked(kind="parameter") == ()


def test_by_a_format_the_worst_are_those_that_lose_most_at_either_end() -> None:
    found = made((-12.0, -12.0), (9.0, 0.0), (-9.0, -9.0))
    ranked = found.ranked("e4m3", direction="forward")
    wanted = sorted(range(3), key=lambda i: -sum(share(found.rows[i].forward, "e4m3")))
    assert [r.row.position for r in ranked] == wanted and wanted != [1, 0, 2]
    for reading in ranked:
        lost, overflow = share(reading.spectrum, "e4m3")
        assert (reading.lost("e4m3"), reading.overflow("e4m3")) == (lost, overflow)
        assert reading.outside("e4m3") == lost + overflow
    assert found.rows[1].reading("forward").overflow("e4m3") > 0.3  # pyright: ignore[reportOptionalMemberAccess]
    assert {r.outside("fp16") for r in found.ranked("fp16")} == {0.0}


def share(spectrum: pl.Spectrum, fmt: str) -> tuple[float, float]:
    fit = spectrum.fit(fmt)
    return fit.lost.estimate, fit.overflow.estimate


def test_all_zero_is_worst_and_one_value_is_no_scale() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x * 2.0**-149 * 2.0**-10) + x.mean()).mean()

    found = audit(Parts(), torch.randn(8, 8).requires_grad_())
    assert found.worst[0].row.name == "model mul #2" and found.worst[0].scale == -math.inf
    assert found.worst[0].distance == math.inf
    mean = next(r for r in found.rows if r.name == "model mean")
    reading = mean.reading("forward")
    assert reading is not None and math.isnan(reading.scale) and reading not in found.worst
    assert "zero" in str(found) and "1 all zero" in repr(found)


def test_totals_are_all_values_together() -> None:
    found = made((0.0, 1.0), (3.0, None))
    assert found.total("forward").count == 2 * 64 * 64 and found.total("backward") == found.rows[0].backward
    assert found.total("forward").binades.tolist() == sum(r.forward.binades for r in found.rows).tolist()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_table_has_eighty_columns_and_says_what_is_left_out() -> None:
    long = Row(position=9, kind="operation", operation="scaled_dot_product_attention", module="encoder." * 12 + "x",
               shape=(1,), dtype="float32", forward=pl.measure(UNIT), absence="never came")  # fmt: skip
    bad = Row(position=10, kind="operation", operation="log", module="model", shape=(1,), dtype="float32",
              forward=pl.measure(torch.tensor([1.0, math.nan, 2.0])), absence="no_grad")  # fmt: skip
    base = made(*[(0.1 * i, -0.3 * i) for i in range(30)])
    found = Audit(model="Made", rows=(*base.rows, long, bad), unmeasured=("nested",))
    text = str(found)
    assert max(len(line) for line in text.splitlines()) <= 80 and "and 20 more" in text
    assert "Not measured: nested." in text
    worst = next(line for line in text.splitlines() if "log" in line and "NaN" in line)
    assert worst.split() == ["model", "log", "NaN", "0", "0", "no", "grad"]
    assert found.table().row_count == 32 and found.table(most=5).row_count == 6
    assert found.table("worst", most=40).row_count == 32
    with pytest.raises(
        ArgumentError, match="Audit.table: expected order to be 'program' or 'worst'; got order='up'. Use"
    ):
        found.table("up")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ArgumentError, match="Audit.table: expected most to be an integer of at least 1; got most=0. Leave it out"
    ):
        found.table(most=0)


@each(
    ("arguments", "message"),
    [({"by": "fp4"}, "Audit.ranked: expected by to be 'scale', 'fp16', 'e4m3' or 'e5m2'; got by='fp4'. Did you mean"),
     ({"kind": "view"}, "Audit.ranked: expected kind to be 'operation', 'parameter' or 'input'; got kind='view'"),
     ({"direction": "up"}, "Audit.readings: expected direction to be 'forward' or 'backward'; got direction='up'")],
)  # fmt: skip
def test_what_does_not_exist_is_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made((0.0, 0.0)).ranked(**arguments)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="Audit.readings: expected kind to be .* got kind='view'"):
        made((0.0, 0.0)).total("forward", "view")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="Audit.beyond: expected binades to be a number that is finite; got"):
        made((0.0, 0.0)).beyond("2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="Row.reading: expected direction to be 'forward' or 'backward'; got"):
        made((0.0, 0.0)).rows[0].reading("up")  # pyright: ignore[reportArgumentType]


def test_data_is_json_and_an_audit_pickles() -> None:
    torch.manual_seed(0)
    found = audit(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), lambda y: y.mean())
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [row["name"] for row in data["rows"]] == [r.name for r in found.rows]
    linear = data["rows"][1]
    assert linear["forward"]["std"] == found.rows[1].forward_std and linear["source"] is None
    assert pl.Spectrum.from_dict(linear["backward"]["spectrum"]) == found.rows[1].backward
    assert linear["forward"]["lost"]["e4m3"] == found.rows[1].forward.fit("e4m3").lost.estimate
    assert data["rows"][-1]["operation"] == "bias" and data["rows"][0]["backward"] is None
    assert pickle.loads(pickle.dumps(found)) == found


# -- comparisons


def test_rows_are_matched_by_module_and_operation() -> None:
    class Before(nn.Module):
        def __init__(self, *, more: bool) -> None:
            super().__init__()
            self.inner, self.more = nn.Linear(16, 16), more

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(self.inner(x))
            return y.sigmoid() if self.more else y.tanh()

    x = torch.randn(8, 16)
    comparison = audit(Before(more=False), x).compare(audit(Before(more=True), x))
    matched = [pair.name for pair in comparison.pairs]
    assert matched == ["model input", "inner linear", "inner linear #2", "inner.weight", "inner.bias"]
    assert all(pair.before.key == pair.after.key for pair in comparison.pairs)
    assert [r.name for r in comparison.only_before] == ["model tanh"]
    assert [r.name for r in comparison.only_after] == ["model sigmoid"]
    text = str(comparison)
    assert "2 operations matched; rows only before: 1, only after: 1." in text and "inner linear #2" in text
    data = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert data["only_after"] == ["model sigmoid"] and len(data["pairs"]) == 5
    with pytest.raises(ArgumentError, match="Audit.compare: expected another Audit; got int. Write before.compare"):
        comparison.before.compare(3)  # pyright: ignore[reportArgumentType]


def test_a_comparison_says_how_far_both_lie() -> None:
    comparison = made((-5.0, -8.0), (1.0, None)).compare(made((0.5, 0.0), (0.0, 2.0)))
    first, second = comparison.pairs
    assert first.distances("forward") == pytest.approx((5.0, 0.5), abs=1e-4)
    assert first.distances("backward") == pytest.approx((8.0, 0.0), abs=1e-4)
    assert math.isnan(second.distances("backward")[0])
    lines = [line.split() for line in str(comparison).splitlines()]
    assert ["layers.0", "linear", "-5.0", "+0.5", "-8.0", "0.0"] in lines
    assert ["layers.1", "linear", "+1.0", "0.0", "frozen", "+2.0"] in lines
    assert comparison.table(most=1).row_count == 2
    with pytest.raises(ArgumentError, match="Comparison.table: expected most to be an integer of at least 1; got .*-1"):
        comparison.table(most=-1)


# -- functions of unit scaling


def test_a_function_of_unit_scaling_is_one_operation_its_factors_included() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(256, 256))

        def forward(self, x: Tensor) -> Tensor:
            branch, skip = functional.residual_split(x + 0.0, 0.25)
            branch = functional.gelu(functional.linear(branch, self.w, constraint=None), constraint=None)
            return functional.residual_add(branch, skip, 0.25)

    torch.manual_seed(0)
    found = audit(Residual(), torch.randn(512, 256))
    assert [r.name for r in found.operations] == ["model add", "model linear", "model gelu", "model add #2"]
    linear, gelu, add = found.operations[1:]
    for reading in (linear.reading("forward"), gelu.reading("forward"), add.reading("forward")):
        assert reading is not None and reading.distance < 0.1
    # The gradient that leaves a function is that of its output, after the factor of what follows.
    assert add.backward_std == pytest.approx(1.0, abs=0.02) and gelu.backward_std == pytest.approx(add.backward_std)
    assert linear.backward_std == pytest.approx(1.0, abs=0.05)

"""The parts' names, which of them count, and how few there are after any number of flushes."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, strategies as st

from plimsoll.runs.storage import parts as _parts
from plimsoll.runs.storage.location import Folder
from plimsoll.runs.storage.parts import FAN_IN, Part
from tests.support.cases import each


def part(first: int, last: int, generation: int = 0, **fields: object) -> Part:
    whole = {"kind": "spectra", "rank": 0, "min_step": first, "max_step": last, **fields}
    return Part(first=first, last=last, generation=generation, **whole)


def merged(parts: Sequence[Part]) -> Part:
    return part(parts[0].first, parts[-1].last)


@given(
    st.sampled_from(["spectra", "scalars", "events"]),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 2**62), min_size=2, max_size=2),
    st.integers(0, 9),
    st.lists(st.integers(-(2**62), 2**62), min_size=2, max_size=2),
)
def test_a_name_says_all(kind: str, rank: int, flushes: list[int], generation: int, steps: list[int]) -> None:
    (first, last), (low, high) = sorted(flushes), sorted(steps)
    made = part(first, last, generation, kind=kind, rank=rank, min_step=low, max_step=high)
    folder, name = made.name.split("/")
    assert folder == kind
    assert _parts.parse(kind, name) == made


@each("name", ["a.parquet", "r0-1-2-g0-s0_1.parquet.damaged", ".writing-1-r0-1-2-g0-s0_1.parquet"])
def test_other_names_are_no_parts(name: str) -> None:
    assert _parts.parse("spectra", name) is None


def test_a_part_covers_those_whose_flushes_it_holds() -> None:
    big = part(3, 9)
    assert big.covers(part(3, 3)) and big.covers(part(9, 9)) and big.covers(part(4, 8)) and big.covers(part(3, 8))
    assert not big.covers(part(2, 3)) and not big.covers(part(10, 10)) and not big.covers(big)
    assert part(3, 9, 1).covers(big) and not big.covers(part(3, 9, 1))
    assert not part(3, 8, 5).covers(big)


def test_only_parts_that_no_other_covers_count() -> None:
    others = [part(1, 2, rank=1), part(1, 1, kind="events")]
    listed = [part(1, 1), part(2, 2), part(1, 4), part(3, 3), part(4, 4), part(5, 5), part(5, 5, 1), *others]
    counting, covered = _parts.split(listed)
    assert [p for p in counting if p.kind == "spectra" and not p.rank] == [part(1, 4), part(5, 5, 1)]
    assert set(others) < set(counting)
    assert len(covered) == 5


def test_listing_leaves_hidden_files_alone_and_names_foreign_ones(tmp_path: Path) -> None:
    (tmp_path / "spectra").mkdir()
    for name in (part(1, 1).name, part(2, 2, rank=1).name, "spectra/.writing-1-x.tmp", "spectra/notes.txt"):
        (tmp_path / name).touch()
    parts, foreign, _ = _parts.listed(Folder(tmp_path))
    assert parts == [part(1, 1), part(2, 2, rank=1)] and foreign == ["spectra/notes.txt"]
    assert _parts.listed(Folder(tmp_path), rank=1)[0] == [part(2, 2, rank=1)]


def flushed(flushes: int, above: int) -> tuple[list[Part], int, int]:
    """The parts after so many flushes, the most there ever were, and how many flushes' rows were rewritten."""
    parts: list[Part] = []
    most = rewritten = 0
    for flush in range(1, flushes + 1):
        parts.append(part(flush, flush))
        while due := _parts.due(parts, above):
            at = parts.index(due[0])
            assert list(due) == parts[at : at + len(due)]  # neighbours, or flushes would be covered that are not in it
            parts[at : at + len(due)] = [merged(due)]
            rewritten += sum(p.flushes for p in due)
        most = max(most, len(parts))
    return parts, most, rewritten


def test_ten_days_of_flushes_leave_few_parts_and_rewrite_each_row_a_few_times() -> None:
    parts, most, rewritten = flushed(170_000, 64)
    assert most <= 80  # of one kind and rank
    assert [p.first for p in parts[1:]] == [p.last + 1 for p in parts[:-1]] and parts[-1].last == 170_000
    tiers = 5  # ceil(log16(170,000))
    assert FAN_IN**tiers >= 170_000
    assert rewritten <= tiers * 170_000


@each("above", [2, 3, 8, 17])
def test_other_bounds_are_kept_too(above: int) -> None:
    fan_in = max(2, above // 4)
    parts, most, _ = flushed(3000, above)
    tiers = next(t for t in range(20) if fan_in**t >= 3000)
    assert most <= max(above + 1, fan_in * (tiers + 1))
    assert sum(p.flushes for p in parts) == 3000


def test_nothing_is_due_up_to_the_bound() -> None:
    assert _parts.due([part(i, i) for i in range(64)], 64) == ()
    assert len(_parts.due([part(i, i) for i in range(65)], 64)) == FAN_IN

"""The benchmark of scale: its run is what it says, and its calculation is right where growth is a power exactly."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from plimsoll.runs import Run


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("scale")


def test_the_run_has_so_many_tensors_samples_and_ranks(scale: ModuleType, tmp_path: Path) -> None:
    size = scale.Size(tensors=24, samples=3, ranks=2)
    written = scale.write(tmp_path / "run", size)
    run = Run(tmp_path / "run")
    assert sum(len(names) for names in run.tensors.values()) == 24
    assert run.steps == [0, 10, 20] and run.ranks == [0, 1] and run.closed and run.problems == []
    assert run.table().num_rows == 24 * 3
    disk = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert written["bytes a tensor, sample and rank"] == pytest.approx(disk / (24 * 3 * 2))
    merged = run.manifest["ranks_merged"]
    assert {name for names in merged["counted_once"].values() for name in names} == {
        "blocks.0.part.weight",
        "blocks.3.part:output",
    }
    for ask in scale.questions(tmp_path / "run", size).values():
        assert ask() is not None


def test_growth_is_found_and_carried_on(scale: ModuleType) -> None:
    def answer(size: object) -> object:
        seconds = 1e-6 * size.tensors * size.samples**0.5 * size.ranks**2
        return scale.Answer(seconds=9.0, processor_seconds=seconds, peak_bytes=0)

    size = scale.Size(tensors=400, samples=64, ranks=8)
    below = scale.smaller(size)
    assert {way: (getattr(each, way), factor) for way, (each, factor) in below.items()} == {
        "tensors": (100, 4),
        "samples": (16, 4),
        "ranks": (4, 2),
    }
    whole = {"q": answer(size)}
    less, factors = (
        {way: {"q": answer(each)} for way, (each, _) in below.items()},
        {w: f for w, (_, f) in below.items()},
    )
    growth = scale.exponents(whole, less, factors)
    assert growth["q"] == pytest.approx({"tensors": 1.0, "samples": 0.5, "ranks": 2.0})
    for way, number in {"tensors": 4000, "ranks": 1000}.items():  # a straight line, and more than one
        target = dataclasses.replace(size, **{way: number})
        (row,) = scale.taken_to(size, way, [number], whole, (below[way][0], less[way]))
        assert row[f"s at {target}"] == pytest.approx(answer(target).processor_seconds)
    (row,) = scale.taken_to(size, "samples", [640], whole, (below["samples"][0], less["samples"]))
    assert row["s at 400 x 640 x 8"] > answer(dataclasses.replace(size, samples=640)).processor_seconds  # the safe side

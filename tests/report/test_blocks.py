"""Block formats on the page and in the report: offered where the run has their records, and nowhere else."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.diagnosis import View, whatif
from plimsoll.errors import NotRecordedError
from plimsoll.report.live.server.answers import Api
from plimsoll.report.single_file.embedded_answers import SHIFTS, offline
from plimsoll.runs import Batch, Run, RunWriter
from tests.runs.test_blocks import wide_rows


def written(path: Path, block: int) -> Path:
    """A run of gradients, with block records if a length is given."""
    torch.manual_seed(0)
    with RunWriter(path) as writer:
        ids = np.array([writer.series("gradients", name, format="fp32") for name in ("a.weight", "b.weight")])
        for step in range(3):
            measured = [torch.randn(8, 64), torch.randn(8, 64) * torch.exp2(torch.randint(-9, 1, (8, 64)).float())]
            rows, blocks = wide_rows(measured, block or 32), np.full(2, block)
            if not block:
                rows, blocks = rows[:, :289].copy(), None
            writer.write(Batch(step=step, rows=rows, index=np.arange(2), series=ids, blocks=blocks))
    return path


@pytest.mark.parametrize(
    ("block", "offered"),
    [(0, []), (16, ["nvfp4", "nvfp4_single"]), (32, ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])],
)
def test_the_page_offers_what_the_run_can_answer(tmp_path: Path, block: int, offered: list[str]) -> None:
    written(tmp_path / "runs" / "run", block)
    answers = Api(tmp_path / "runs")
    formats = json.loads(answers.run("run"))["formats"]
    assert [name for name in formats if name.startswith(("mx", "nv"))] == offered
    assert "e4m3" in formats
    for name in offered:
        parsed = json.loads(answers.whatif("run", {"format": name}))
        expected = whatif(tmp_path / "runs" / "run", name)
        assert parsed["overall"] == expected.overall.to_dict() and parsed["block"] == block
        assert (parsed["shift"], parsed["best_shift"]) == (0, 0)
        assert json.loads(answers.whatif("run", {"format": name, "shift": "3"}))["best_shift"] == 0
    if not block:
        with pytest.raises(NotRecordedError, match="whatif: expected block records of gradients for mxfp4"):
            answers.whatif("run", {"format": "mxfp4"})


@pytest.mark.parametrize(("block", "offered"), [(0, []), (16, ["nvfp4"]), (32, ["mxfp8_e4m3", "mxfp4"])])
def test_the_report_answers_without_python(tmp_path: Path, block: int, offered: list[str]) -> None:
    view = View(Run(written(tmp_path / "run", block)))
    found = {each.answer.format: each for each in offline(view, "gradients")}
    assert list(found) == ["fp16", "bf16", "e4m3", "e5m2", *offered]
    for name in offered:
        expected, parsed = whatif(view, name), found[name]
        assert parsed.sentence == expected.sentence and parsed.best == 0
        assert parsed.overall["lost"] == pytest.approx([expected.overall.fit.lost.estimate] * len(SHIFTS))
        assert parsed.overall["lost_high"] == pytest.approx([expected.overall.fit.lost.high] * len(SHIFTS))
        rows = {row.name: row for row in expected.rows}
        for i, layer in enumerate(parsed.names):
            assert parsed.lost[i] == pytest.approx([rows[layer].fit.lost.estimate] * len(SHIFTS))
            assert (parsed.windows[i] is None) == (rows[layer].window is None)
        json.dumps(parsed.to_dict(), allow_nan=False)

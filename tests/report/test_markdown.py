"""The report as Markdown: what a comment says, that it fits, and that names are names in it."""

import re
from pathlib import Path

import pytest

from plimsoll.diagnosis import Finding, Spot, diagnose
from plimsoll.report import markdown, summary
from plimsoll.report.single_file.markdown_report import LONGEST_BYTES, code, escaped
from plimsoll.runs import RunWriter
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS
from tests.support.diagnosis.stories import SOUND
from tests.support.report import hostile_run as hostile

FALLEN = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FALLEN.write(tmp_path_factory.mktemp("markdown") / "exp1")


def cells(row: str) -> list[str]:
    """The cells of a row of a table, as GitHub splits them: at each | that no backslash precedes."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_the_verdict_the_findings_and_the_rest_folded_away(run: Path) -> None:
    text, found = markdown(run), diagnose(run)
    lines = text.splitlines()
    assert lines[0].startswith("### ⛔ Problem: the loss scale fell from 2^10 to 2^-4 at steps 60 to 199")
    assert lines[2] == "**Alarm** (4 alarms, 1 warning) · run `exp1` · steps 0 to 199"
    table = [cells(line) for line in lines[6:] if line.startswith("|")][: len(found)]
    assert [row[1] for row in table] == [f"`{f.rule}`" for f in found]
    assert table[0][2:] == ["steps 60 to 199", "the run"]
    assert table[1][3] == "`parameter gradients of all 12 layers: blocks.{0-5}.attn, blocks.{0-5}.mlp`"
    assert text.count("<details>") == text.count("</details>") == 2
    assert text.count("*What to do:*") == len(found) and ": 27 % lost" in text
    assert "| Loss scale at step 199 | 2^-4 |" in text


def test_a_sound_and_an_empty_run(tmp_path: Path) -> None:
    text = markdown(SOUND.write(tmp_path / "sound", until=50))
    assert text.startswith("### ✅ Healthy through step 50: no parameter gradients lost to underflow.")
    assert "| rule |" not in text and text.count("<details>") == 1
    RunWriter(tmp_path / "empty").close()
    assert markdown(tmp_path / "empty").startswith("### ◌ Nothing was recorded.")


def test_an_earlier_step_and_other_findings(run: Path) -> None:
    assert markdown(run, until=50).startswith("### ✅ Healthy through step 50")
    only = [f for f in diagnose(run) if f.rule == "underflow-rising"]
    assert markdown(run, findings=only).startswith("### ⛔ Problem: the underflow of parameter gradients")


def many(number: int, name: str) -> list[Finding]:
    return [
        Finding(
            rule=f"rule-{i}", severity="alarm", since_step=i, until_step=i, where=tuple(f"{j}{name}" for j in range(9)),
            collection="gradients", spots=(Spot(name=name, since_step=i, value=1.0),), advice=name, meaning=name,
            figure="record", evidence={f"{name}{j}": name for j in range(30)},
        )
        for i in range(number)
    ]  # fmt: skip


@each("name", ["x" * 10_000, "|`" * 5_000, "\U0001f600" * 3_000, "<" * 9_000])
def test_it_fits_into_a_comment_and_says_what_it_leaves_out(run: Path, name: str) -> None:
    text = markdown(run, findings=many(300, name))
    assert len(text.encode()) <= LONGEST_BYTES
    reported = int(re.search(r"And (\d+) more: `plimsoll check` lists them\.", text)[1])
    assert text.count("| ⛔ alarm |") == 300 - reported and text.count("<details>") == text.count("</details>")


def test_few_findings_are_all_told(run: Path) -> None:
    text = markdown(run, findings=many(5, "layer"))
    assert "more: `plimsoll" not in text and text.count("| ⛔ alarm |") == 5


@each("name", [*hostile.NAMES, "``", "`", "a``b`", "|", "\\|", " ", ""])
def test_a_name_is_one_code_span_in_one_cell(name: str) -> None:
    span = code(name, in_table=True)
    assert len(cells(f"| {span} | b |")) == 2 and "\n" not in span
    fence = re.match("`+", span)[0]
    inside = code(name)[len(fence) : -len(fence)]
    assert code(name).endswith(fence) and not re.search(rf"(?<!`){fence}(?!`)", inside)


@each(
    ("text", "there"),
    [
        ("<img src=x onerror=alert(1)>", "\\<img src=x onerror=alert(1)\\>"),
        ("[a](b) *c* `d`", "\\[a\\](b) \\*c\\* \\`d\\`"),
        (
            "@team see https://evil.example and www.evil.example",
            "@\u200bteam see https://\u200bevil.example and www\u200b",
        ),
        ("&lt; a|b #1", "\\&lt; a\\|b \\#1"),
        ("a\nb\u202ec\udc80", "a?b?c"),
    ],
)
def test_text_is_no_markup_no_link_and_no_mention(text: str, there: str) -> None:
    assert escaped(text).startswith(there)


def test_hostile_names_leave_the_page_as_it_is(tmp_path: Path) -> None:
    path = hostile.write(tmp_path / "run")
    text = markdown(path)
    text.encode("utf-8")
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", outside)
    assert text.count("<details>") == 2 and len(summary(path).findings) == text.count("*What to do:*")

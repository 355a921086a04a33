"""A receipt as text, JSON, Markdown, page and notebook output; and the documentation of its kinds."""

import contextlib
import html.parser
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from IPython.lib.pretty import pretty

from plimsoll.errors import ArgumentError
from plimsoll.receipts import KINDS, Deviation, MemoryUse, Receipt, Row, TensorRow
from plimsoll.receipts.recording.operations import KINDS as OPERATIONS
from plimsoll.receipts.rendering import markdown
from tests.support.cases import each
from tests.support.receipts.planted import PLANTED

DOCS = Path(__file__).parents[2] / "docs"


def row(**more: object) -> Row:
    facts = {"operation": "aten.mm", "kind": "product", "phase": "forward", "module": "a"}
    facts |= {"source_line": "train.py:3", "operands": ("bf16", "bf16"), "values": ("bf16", "bf16")}
    facts |= {"output": "bf16", "accumulate": "fp32"}
    return Row(**(facts | more))


def deviation(**more: object) -> Deviation:
    facts = {"kind": "softmax", "module": "blocks.0.attn", "source_line": "train.py:7", "operation": "aten._softmax",
             "expected": "fp32", "actual": "fp16", "advice": "Cast its input.", "phases": ("forward",)}  # fmt: skip
    return Deviation(**(facts | more))


FULL = Receipt(
    subject="GPT", did=("forward", "backward", "AdamW"), declared="amp-bf16",
    rows=(
        row(calls=3, bytes=2048), row(module="b", phase="backward"), row(accumulate=None, partial=None, module="c"),
        row(kind="cast", operation="aten._to_copy", cause="script", operands=("fp32",), values=("fp32",),
            accumulate=None, rounded=False, where="compiled"),
        row(kind="exact", operation="aten.cat"),
    ),
    deviations=(
        *(deviation(module=f"blocks.{i}.attn") for i in range(3)),
        deviation(kind="optimizer-state", module="a:exp_avg", source_line=None, operation="", phases=()),
    ),
    tensors=(TensorRow(name="a", role="weights", format="fp32", bytes=1 << 20, module="model"),),
    memory=MemoryUse(weights=1 << 20, peak=3 << 20, moved=9 << 20), settings={"devices": "cpu", "torch": "2.13.0"},
    notes=("A note.",), parameters=1234, cache_hits=2, cache_misses=5,
)  # fmt: skip


def test_text_has_the_verdict_first_and_what_is_alike_once():
    lines = str(FULL).splitlines()
    assert lines[0] == "Declared amp-bf16. 2 deviations in 4 places."
    assert lines[1] == "GPT, 1,234 parameters: forward, backward, AdamW on cpu."
    text = str(FULL)
    assert text.count("A softmax runs in 16 bits  train.py:7 in blocks.{0-2}.attn") == 1
    assert "expected fp32; got fp16 (forward, 3 calls)" in text
    assert "An optimizer's state has another format  a:exp_avg" in text
    table = [line.split() for line in lines if line.startswith("product")]
    assert table == [
        ["product", "bf16", "x", "bf16", "->", "bf16", "fp32", "3", "1", "a,", "b"],
        ["product", "bf16", "x", "bf16", "->", "bf16", "unknown", "1", "c"],
    ]
    assert "cast by the script, compiled" in text and "(not rounded)" in text
    assert "aten.cat" not in text
    assert "Memory: 1 MiB weights; at most 3 MiB at once. 9 MiB read and written." in text
    assert "autocast cast weights 5 times and used kept casts 2 times." in text
    assert max(map(len, lines)) <= 120
    assert "aten.cat" in _printed(FULL, full=True)


def _printed(receipt: Receipt, *, full: bool) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=200).print(receipt.table(full=full))
    return out.getvalue()


def test_a_terminal_of_eighty_columns_keeps_everything():
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80).print(FULL.table())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "fp16" in out.getvalue()


@each(
    "receipt, said",
    [
        (replace(FULL, declared=None, deviations=()), "Nothing declared."),
        (replace(FULL, deviations=()), "Declared amp-bf16. No deviations."),
        (replace(FULL, deviations=FULL.deviations[:1]), "Declared amp-bf16. 1 deviation."),
        (FULL, "Declared amp-bf16. 2 deviations in 4 places."),
    ],
)
def test_verdicts(receipt: Receipt, said: str):
    assert receipt.verdict == said


def test_json_has_every_field():
    data = json.loads(json.dumps(FULL.to_dict()))
    assert set(data["rows"][0]) == set(Row.__slots__)
    assert set(data["deviations"][0]) == set(Deviation.__slots__)
    assert set(data["tensors"][0]) == set(TensorRow.__slots__)
    assert set(data["memory"]) == set(MemoryUse.__slots__)
    assert data["verdict"] == FULL.verdict
    assert data["cache"] == {"hits": 2, "misses": 5}
    assert [tuple(r["operands"]) for r in data["rows"]] == [r.operands for r in FULL.rows]


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.sources, self.open = "", [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = replace(
    FULL, subject="<script>alert(1)</script>", notes=("a | b \x1b[31m `c`",),
    deviations=(deviation(module="<b>", advice="x & y"),), rows=(row(module="a|b\n", source_line="<i>.py:1"),),
)  # fmt: skip


def test_a_page_loads_nothing_and_shows_names_as_they_are(tmp_path: Path):
    HOSTILE.save(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text("utf-8")
    reader = _Reader()
    reader.feed(page)
    assert reader.open == [] and reader.sources == []
    assert "<script" not in page and "\x1b" not in page
    for name in ("<script>alert(1)</script>", "<b>", "x & y", "<i>.py:1", "All 1 rows"):
        assert name in reader.text
    assert FULL.verdict in str(FULL._repr_html_())


def test_markdown_keeps_its_tables_whole():
    lines = markdown(HOSTILE).splitlines()
    for table in ("deviation", "operation", "tensors"):
        first = next(i for i, line in enumerate(lines) if line.startswith(f"| {table}"))
        columns = len(re.findall(r"(?<!\\)\|", lines[first]))
        rest = lines[first : lines.index("", first)]
        assert len(rest) > 2 and all(len(re.findall(r"(?<!\\)\|", line)) == columns for line in rest)
    assert "\x1b" not in "".join(lines)


def test_files_by_their_endings(tmp_path: Path):
    for name in ("r.txt", "r.json", "r.md", "r.html"):
        FULL.save(tmp_path / name)
    assert (tmp_path / "r.txt").read_text("utf-8").strip() == str(FULL)
    assert json.loads((tmp_path / "r.json").read_text("utf-8")) == FULL.to_dict()
    assert (tmp_path / "r.md").read_text("utf-8") == markdown(FULL)
    for path, said in ((tmp_path / "r.pdf", "ends in .html, .json, .md, .txt"), (tmp_path / "no/r.md", "folder")):
        with pytest.raises(ArgumentError, match="^receipt: expected") as raised:
            FULL.save(path)
        assert said in str(raised.value)
    for nothing in (None, 3, b"r.md", "r\0.md"):
        with pytest.raises(ArgumentError, match=r"receipt: expected the path of a file, .*; got .*\. Name a file\."):
            FULL.save(nothing)  # type: ignore[arg-type]


def test_a_notebook_shows_the_text():
    assert pretty(FULL) == str(FULL)
    assert FULL.of_module("a") == (FULL.rows[0], FULL.rows[3], FULL.rows[4])
    assert FULL.of_module("[bc]") == FULL.rows[1:3]
    for glob in (None, 3, ["a"]):
        with pytest.raises(ArgumentError, match="Receipt.of_module: expected glob to be a name or a glob; got "):
            FULL.of_module(glob)  # type: ignore[arg-type]


def test_every_kind_is_documented_and_planted():
    page = (DOCS / "reference" / "receipts.md").read_text("utf-8")
    assert re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.MULTILINE) == [
        (kind.name, kind.meaning) for kind in KINDS.values()
    ]
    assert len(PLANTED) >= 25
    planted = {make().kind for make in PLANTED.values()}
    elsewhere = {
        "compiled-cast", "fallback",  # test_compiled
        "gradient-reduction",  # test_distributed
        "level",  # test_recorded
    }  # fmt: skip
    assert planted | elsewhere == {*KINDS}
    assert set(OPERATIONS) >= {r.kind for r in FULL.rows}


def test_the_tutorial_shows_what_its_code_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (DOCS / "tutorial" / "receipt.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(blocks[0], encoding="utf-8")
    names: dict[str, object] = {"__name__": "__docs__"}
    exec(compile(blocks[0], "train.py", "exec"), names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(blocks[1], names)
    assert _without_bytes(printed.getvalue()) == _without_bytes(shown[1])


def _without_bytes(text: str) -> str:
    """The text without the peak of memory, which depends on when Python frees what is no longer used."""
    return re.sub(r"Memory: .*?written\.", "", text, flags=re.DOTALL)

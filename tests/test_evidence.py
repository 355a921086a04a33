"""The page of the evidence says what was recorded."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_is_what_its_script_writes() -> None:
    made = runpy.run_path(str(DOCS / "evidence.py"))["page"]()
    assert (DOCS / "evidence.md").read_text("utf-8") == made, "run: python docs/evidence.py"

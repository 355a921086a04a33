"""The registry of collections, and that no list of them is written elsewhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from plimsoll import tensor_collections
from plimsoll.diagnosis.finding import collection_words
from plimsoll.tensor_collections import COLLECTIONS, NAMES
from plimsoll.watch.session import StepSchedule

SOURCE = Path(tensor_collections.__file__).parent
# Roles of a matrix product's operands have the names of collections: layers below the registry, and what feeds them. So
# have the roles of memory in a receipt, of which some are no collections, and the two formats that name a precision.
_ROLES = (
    "formats",
    "fp8",
    "emulate",
    "precision/levels/fp8_layers.py",
    "receipts",
    "watch/taps/cast_counts.py",
    "cli/commands/ls.py",
    "probing/forward.py",
    "diagnosis/planning/loss_forecast.py",
)


def test_no_list_of_collections_is_written_elsewhere() -> None:
    modules = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    found = {
        name: lines
        for name, path in modules.items()
        if not name.startswith(("tensor_collections.py", *_ROLES)) and (lines := list(_lists(path.read_text("utf-8"))))
    }
    assert not found, "derive them from plimsoll.tensor_collections"


def test_no_script_of_the_live_page_lists_collections() -> None:
    scripts = list((SOURCE / "report" / "page" / "files" / "js").rglob("*.js"))
    assert scripts
    quoted = re.compile(rf"""\b({"|".join(NAMES)})\b["']?\s*[],:]""")
    found = [
        (path.name, line.strip())
        for path in scripts
        for line in path.read_text("utf-8").splitlines()
        if len(set(quoted.findall(line))) > 1
    ]
    assert not found, "take the collections from the server's answer"


def test_the_search_for_lists_finds_them() -> None:
    for text in (
        "A = ('weights', 'updates')",
        "B = {'gradients': 1, 'optimizer': 2}",
        "f(['x', 'weights', 'updates'])",
    ):
        assert list(_lists(text)) == [1], text
    for text in ("A = ('weights', 'weights')", "B = {'gradients': 'weights'}", "f('weights', 'gradients')"):
        assert not list(_lists(text)), text


def test_every_fact_is_sound() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for orders in ("step_order", "display_order", "underflow_order", "overflow_order"):
        places = [getattr(c, orders) for c in COLLECTIONS if getattr(c, orders) is not None]
        assert sorted(places) == list(range(1, len(places) + 1)), orders
    phases = [c.phase for c in tensor_collections.IN_STEP_ORDER]
    assert phases == sorted(phases, key=("forward", "backward", "update").index)
    roles = [c.role for c in COLLECTIONS if c.role is not None]
    assert len(set(roles)) == len(roles)


def test_each_collection_has_a_label_and_a_flag_of_the_step() -> None:
    for collection in COLLECTIONS:
        assert collection_words(collection.name) == collection.label
        assert getattr(StepSchedule(), collection.name) is False


def _lists(source: str) -> Iterator[int]:
    """The lines where two collections or more stand in one list, tuple, set or in the keys of a dictionary."""
    for node in ast.walk(ast.parse(source)):
        members = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else ()
        members = node.keys if isinstance(node, ast.Dict) else members
        texts = {member.value for member in members if isinstance(member, ast.Constant)}
        if len(texts.intersection(NAMES)) > 1:
            yield node.lineno

"""Every tick of the comparison names tests, and these exist; every column of another tool has a reference."""

import ast
import re
from pathlib import Path

from tests.support.cases import each

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
PEERS = {
    "wandb.watch": "docs.wandb.ai",
    "DebugUnderflowOverflow": "huggingface.co/docs/transformers",
    "msprobe": "gitcode.com/Ascend/msprobe",
    "smdebug": "docs.aws.amazon.com",
    "DebugMode": "github.com/pytorch/pytorch/issues/170311",
    "torchtitan's debugger": "github.com/pytorch/torchtitan/pull/3323",
    "CommDebugMode": "docs.pytorch.org/docs/stable/distributed.tensor",
    "TransformerEngine": "docs.nvidia.com/deeplearning/transformer-engine",
    "TestFloat": "github.com/ucb-bar/berkeley-testfloat-3",
    "FPRev": "arxiv.org/abs/2411.00442",
    "GradScaler": "docs.pytorch.org/docs",
    "apex": "github.com/NVIDIA/apex",
    "torchao": "docs.pytorch.org/ao",
    "unit-scaling": "github.com/graphcore-research/unit-scaling",
    "qtorch": "github.com/Tiiiger/QPyTorch",
    "gfloat": "github.com/graphcore-research/gfloat",
}


def tables() -> list[tuple[list[str], list[list[str]]]]:
    """The columns and rows of each table."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append((head, rows))
    return found


FEATURES = [(head, rows) for head, rows in tables() if head[:2] == ["capability", "Plimsoll"]]
BACKING = next(rows for head, rows in tables() if head == ["capability", "tests"])


def test_every_tick_is_backed_and_nothing_else_is() -> None:
    ticked = [row[0] for head, rows in FEATURES for row in rows if row[head.index("Plimsoll")] == "✓"]
    assert len(FEATURES) >= 5 and len(ticked) == len(set(ticked)) > 30
    assert ticked == [row[0] for row in BACKING]


@each(("capability", "tests"), BACKING, ids=[row[0] for row in BACKING])
def test_the_tests_exist(capability: str, tests: str) -> None:
    named = re.findall(r"`([^`]+)`", tests)
    assert named, capability
    for name in named:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in there if function else any(each.startswith("test_") for each in there), name


def test_every_peer_has_a_reference() -> None:
    assert {column for head, _ in FEATURES for column in head[2:]} == set(PEERS)
    for peer, address in PEERS.items():
        assert re.search(rf"\(https://{re.escape(address)}", PAGE), peer


def test_rows_are_as_long_as_their_heads() -> None:
    assert all(len(row) == len(head) for head, rows in tables() for row in rows)

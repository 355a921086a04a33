"""Formats are declared in the catalogue alone: no other list of them, and the guide for a new one holds."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import plimsoll
from plimsoll.formats import ALIASES, BLOCKS, E4M3, E5M2, ELEMENTS, FP16, Format, ModulePlan, get
from plimsoll.formats.catalogue import CHEAPEST, NATIVE, TARGETS, WIDE
from plimsoll.kernels import dtypes
from tests.support import processes
from tests.support.cases import each

SOURCE = Path(plimsoll.__file__).parent
GUIDE = Path(__file__).parents[2] / "docs" / "contributing" / "add-a-format.md"
NAMES = {fmt.name for fmt in (*ELEMENTS, *BLOCKS)} | set(ALIASES)
CONSTANTS = {fmt.name.upper() for fmt in (*ELEMENTS, *BLOCKS)}

# Lists that a new entry of the catalogue must not change, each with the reason.
ALLOWED = {
    "certification": "which specification governs a format; the dtypes of inputs; the widths of accumulators",
    "cli/commands/run.py": "names of precision levels",
    "cli/commands/receipt.py": "names of precision levels",
    "cli/screens/format_page.py": "the formats that each page is compared with",
    "diagnosis/locating/tracing/operation_check.py": "the next wider dtype, which the computation is repeated in",
    "diagnosis/rules/underflow.py": "the formats whose floors are looked for in FP32 outputs of modules",
    "fp8/casting.py": "the FP8 recipe: which role is cast to which format",
    "integrations/lightning.py": "Lightning's own names of precisions",
    "kernels/numba_backend/memory.py": "the kernels' numbers of the dtypes that they decode by code of their own",
    "kernels/numba_backend/unscaling.py": "the kernel of each dtype",
    "kernels/numba_backend/updates.py": "the kernel of each dtype",
    "kernels/operators/fp8_cast.py": "the two formats that scaled products of hardware take",
    "kernels/triton_backend/input_bits.py": "the dtypes that kernels decode by code of their own",
    "microscope/entry.py": "the dtypes of a reference",
    "precision/levels": "names of widths that several levels have; what torch's batch norm takes",
    "precision/scripts": "the dtypes of leaves that are scaled",
    "precision/training": "a type annotation",
    "receipts/recording/recorder.py": "torch's functions that cast",
    "report/figures/audit.py": "the columns of an audit",
    "unit/auditing": "the columns of an audit",
    "watch/shadow/replay.py": "methods of tensors",
    "watch/steps/wiring/operations.py": "torch's functions that cast",
}


def test_no_list_of_formats_is_written_elsewhere() -> None:
    found = {
        name: lines
        for path in SOURCE.rglob("*.py")
        if not (name := path.relative_to(SOURCE).as_posix()).startswith("formats/")
        if not name.startswith(tuple(ALLOWED)) and (lines := list(_lists(path.read_text("utf-8"))))
    }
    assert not found, "derive them from plimsoll.formats.catalogue or plimsoll.kernels.dtypes"


@each("name", ALLOWED)
def test_each_exception_is_needed(name: str) -> None:
    path = SOURCE / name
    assert any(list(_lists(file.read_text("utf-8"))) for file in (path.rglob("*.py") if path.is_dir() else [path]))


def test_the_search_for_lists_finds_them() -> None:
    for text in ("A = ('fp16', 'e4m3')", "B = {torch.float16: 1, torch.bfloat16: 2}", "f([x, (E4M3, E5M2)])"):
        assert list(_lists(text)) == [1], text
    for text in ("A = ('fp16', 'fp16')", "f('fp16', 'e4m3')", "B = {'x': E4M3}"):
        assert not list(_lists(text)), text


def test_facts_of_the_catalogue_name_what_exists() -> None:
    for fmt in ELEMENTS:
        assert fmt.gradient_format is None or isinstance(get(fmt.gradient_format), Format)
        dtype = getattr(torch, fmt.torch_dtype) if fmt.torch_dtype else None
        assert dtype is None or (dtypes.FORMATS[dtype] is fmt and 8 * dtype.itemsize == fmt.bits)
    assert set(dtypes.FLOATING) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    assert dtypes.dtype_of(E4M3) is torch.float8_e4m3fn
    assert list(dtypes.TRAINING) == ["fp32", "fp16", "bf16"]
    assert (ModulePlan.of("e4m3").backward, ModulePlan.of("mxfp4").backward) == ("e5m2", "mxfp4")


def test_targets_of_plans() -> None:
    bits = [TARGETS[name][0][0].bits for name in CHEAPEST]
    assert bits == sorted(bits)
    assert TARGETS["fp8"] == ((E4M3, E5M2),)
    assert [fmt.name for fmt in WIDE] == ["bf16", "tf32", "fp32"] and (FP16, *WIDE) == NATIVE
    for target, pairs in TARGETS.items():
        digits = [getattr(forward, "element", forward).mantissa_bits for forward, _ in pairs]
        assert digits == sorted(digits, reverse=True), target


def test_a_pickle_of_version_0_1_has_the_defaults_of_later_fields() -> None:
    old = object.__new__(Format)
    old.__setstate__(["e4m3", 4, 3, 7, "fn", True])
    assert old == E4M3 and (old.torch_dtype, old.in_report, old.cpu_flags) == (None, False, ())


# The guide's format in place of E4M3FNUZ for a dtype that torch has: its codes are read by the new format's fields.
FOLLOW = """
import importlib, re, sys
from pathlib import Path
from plimsoll import formats
catalogue = importlib.import_module("plimsoll.formats.catalogue")
source = Path(catalogue.__file__).read_text("utf-8")
block = sys.argv[1].replace("float8_e4m3b11fnuz", "float8_e4m3fnuz")
source = source.replace("ELEMENTS: tuple", block + "\\nELEMENTS: tuple", 1)
source, replaced = re.subn(r"(ELEMENTS: tuple[^)]*E8M0),?\\s*\\)", r"\\1, E4M3B11FNUZ)", source, count=1)
assert replaced == 1
exec(compile(source, catalogue.__file__, "exec"), vars(catalogue))
formats.ELEMENTS = catalogue.ELEMENTS
import numpy as np, torch
from plimsoll import kernels
from plimsoll import row_layout
from plimsoll.kernels.dtypes import FORMATS
fmt = formats.get("e4m3b11fnuz")
codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fnuz)
values = fmt.decode(np.arange(256))
with kernels.use(sys.argv[2]):
    bank, counts = kernels.new_bank(1), kernels.new_counts(1)
    kernels.measure_each([codes], bank, [0])
    kernels.count_nonfinite_into([codes], counts, 0)
assert FORMATS[torch.float8_e4m3fnuz] is fmt and fmt.max == 30.0
largest = bank.view(torch.float64)[0, row_layout.POSITIVE].item()
assert (largest, bank[0, row_layout.NANS].item(), counts.item()) == (fmt.max, 1, 1), (largest, bank, counts)
total = bank.view(torch.float64)[0, row_layout.ABSSUM].item()
assert total == np.nansum(np.abs(values)), total
"""


@pytest.mark.parametrize("backend", ["numba", pytest.param("triton", marks=pytest.mark.slow)])
def test_kernels_take_the_format_of_the_guide(backend: str) -> None:
    block = re.search(r"```text\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    text = "\n".join(line[4:] for line in block[1].splitlines())
    pytest.importorskip(backend)
    done = processes.python("-c", FOLLOW, text, backend)
    assert done.returncode == 0, done.stderr


def _lists(source: str) -> Iterator[int]:
    """The lines of literal collections that name two formats or more."""
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and node not in inner:
            inner.update(ast.walk(node))
            if len(set(_named(node))) > 1:
                yield node.lineno


def _named(node: ast.AST | None) -> Iterator[str]:
    match node:
        case ast.Tuple() | ast.List() | ast.Set():
            for member in node.elts:
                yield from _named(member)
        case ast.Dict():
            for member in (*node.keys, *node.values):
                yield from _named(member)
        case ast.Constant(value=str(text)) if text in NAMES:
            yield text
        case ast.Name(id=name) if name in CONSTANTS:
            yield name
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in NAMES:
            yield name
        case _:
            return

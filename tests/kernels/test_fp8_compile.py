"""The kernel of `fp8_cast` compiles for an H200 (sm_90) with no GPU at hand, as in `test_triton_compile`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_triton_compile import only_compiling


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    triton = pytest.importorskip("triton", reason="the package triton is not installed")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for tool in ("ptxas", "cuobjdump"):
        if not (tools / tool).exists():
            pytest.skip(f"this triton comes without {tool}, so nothing can be compiled for sm_90")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in [str(Path.cwd()), *sys.path] if path)
    command = [sys.executable, __file__, str(tools / "cuobjdump")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(compiled: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [kernel for kernel in compiled if kernel["case"].startswith(case)]


def test_the_hardware_converts_and_saturates(compiled: list[dict[str, Any]]) -> None:
    for name in ("e4m3", "e5m2"):
        found = of(compiled, name)
        assert len(found) == 7
        for kernel in found:
            assert kernel["conversions"] == [f"cvt.rn.satfinite.{name}x2.f32"], kernel
            assert kernel["ftz"] == 0
    (by_integers,) = of(compiled, "integers")
    assert by_integers["conversions"] == []


def test_both_stores_and_the_load_are_vectors_without_spilling(compiled: list[dict[str, Any]]) -> None:
    for name in ("e4m3", "e5m2"):
        (both,) = of(compiled, f"{name} bfloat16 both")
        assert both["vector_loads"] >= 4 and both["vector_stores"] >= 2, both
        assert both["shared_bytes"] >= 64 * 128, "the transpose goes through shared memory"
        assert both["stack_bytes"] == 0 and both["registers"] <= 128
        (counted,) = of(compiled, f"{name} bfloat16 counted")
        assert counted["registers"] <= 128 and counted["stack_bytes"] <= 640, "constants of the loop"


def test_batches_do_not_recompile(compiled: list[dict[str, Any]]) -> None:
    assert len({kernel["hash"] for kernel in of(compiled, "batch")}) == 1
    assert len(of(compiled, "batch")) == 3


def main(cuobjdump: str) -> None:
    """Compiles everything."""
    launch(only_compiling(cuobjdump, instructions))


def instructions(kernel: Any) -> dict[str, Any]:
    """Its shared memory, and the conversions of the hardware that it uses."""
    found = re.findall(r"cvt\.rn\.[\w.]*e\dm\dx2\.f32", kernel.asm["ptx"])
    return {"shared_bytes": kernel.metadata.shared, "conversions": sorted(set(found))}


def launch(case: list[str]) -> None:
    import torch

    from plimsoll import kernels
    from plimsoll.kernels import triton_backend
    from plimsoll.kernels.operators.fp8_cast import BOTH, COLUMNS, ROWS, Cast, empty_codes
    from plimsoll.kernels.triton_backend.casting import fp8

    def cast(x: torch.Tensor, dtype: torch.dtype, layout: int = BOTH, bank: bool = False, scale: bool = False) -> None:
        codes, columns = empty_codes(x, dtype, 1.0, None, layout, None, 0)
        written = [part.view(torch.uint8) if part.dim() == 2 else None for part in (codes, columns)]
        tensor = torch.ones(()) if scale else None
        triton_backend.fp8_cast(x, Cast(*written, dtype, 1.0, tensor, kernels.new_bank(1) if bank else None, 0))

    fp8._converts = lambda _: True
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    for dtype, name in ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
        case[0] = f"{name} bfloat16 both"
        cast(x, dtype)
        case[0] = f"{name} bfloat16 rows"
        cast(x, dtype, ROWS)
        case[0] = f"{name} bfloat16 columns scaled"
        cast(x, dtype, COLUMNS, scale=True)
        case[0] = f"{name} bfloat16 counted"
        cast(x, dtype, bank=True)
        case[0] = f"{name} turned"
        cast(x.t(), dtype)
        for other in (torch.float32, torch.float16):
            case[0] = f"{name} {other}"
            cast(x.to(other), dtype)
    for rows in (48, 4096, 16 * 7):
        case[0] = "batch"
        cast(torch.zeros(rows, 128, dtype=torch.bfloat16), torch.float8_e4m3fn)
    fp8._converts = lambda _: False
    case[0] = "integers"
    cast(x, torch.float8_e4m3fn)


if __name__ == "__main__":
    main(sys.argv[1])

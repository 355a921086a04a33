"""The Triton kernels compile for an H200 (sm_90), through the same host code that launches them, with no GPU at hand.

A second process, in which kernels are not interpreted, replaces Triton's driver by one that only names the target, and
stops every launch after compiling. What the interpreter does not see shows here: types, constants that must be known
when compiling, recompilation, instructions that flush subnormals, loads that are not vectors, registers that spill.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    triton = pytest.importorskip("triton", reason="the package triton is not installed")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for tool in ("ptxas", "cuobjdump"):
        if not (tools / tool).exists():
            pytest.skip(f"this triton comes without {tool}, so nothing can be compiled for sm_90")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, __file__, str(tools / "cuobjdump")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(compiled: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [kernel for kernel in compiled if kernel["case"].startswith(case)]


def test_every_kernel_and_dtype_compiles(compiled: list[dict[str, Any]]) -> None:
    names = {kernel["name"] for kernel in compiled}
    assert names == {
        "measure_tensor", "measure_table", "cast_dense", "cast_ragged", "update_tensor", "update_table", "count_tensor",
        "count_table", "unscale_tensor", "unscale_table",
    }  # fmt: skip
    for case in ("measure", "cast", "update", "count"):
        assert len({kernel["case"] for kernel in of(compiled, case)}) == 8, "one for each dtype"
    assert len({kernel["case"] for kernel in of(compiled, "unscale")}) == 4


def test_nothing_flushes_subnormals(compiled: list[dict[str, Any]]) -> None:
    assert [kernel["case"] for kernel in compiled if kernel["ftz"]] == []


def test_fp32_measuring_loads_vectors_and_hardly_spills(compiled: list[dict[str, Any]]) -> None:
    for kernel in of(compiled, "fp32 one") + of(compiled, "fp32 table"):
        assert kernel["vector_loads"] >= 8, kernel
        assert kernel["registers"] <= 128, "four programs to an SM"
        assert kernel["stack_bytes"] <= 256, "constants of the loop, and no more"


def test_fp32_updates_and_counts_load_vectors_and_hardly_spill(compiled: list[dict[str, Any]]) -> None:
    for kernel in of(compiled, "fp32 update"):
        assert kernel["vector_loads"] >= 12, kernel
        assert kernel["registers"] <= 128, "four programs to an SM"
        assert kernel["stack_bytes"] <= 512, "constants of the loop, and no more"  # 392 by Triton 3.7.1, 16 by 3.9
    for kernel in of(compiled, "fp32 count"):
        assert kernel["vector_loads"] >= 8, kernel
        # Memory sets its pace, so three programs to an SM do: 146 registers by Triton 3.7.1, under 128 by 3.9.
        assert kernel["registers"] <= 168 and kernel["stack_bytes"] == 0


def test_fp32_unscaling_loads_and_stores_vectors_and_hardly_spills(compiled: list[dict[str, Any]]) -> None:
    for kernel in of(compiled, "fp32 unscale") + of(compiled, "fp32 bare"):
        assert kernel["vector_loads"] >= 8 and kernel["vector_stores"] >= 8, kernel
        assert kernel["registers"] <= 128, "four programs to an SM"
        assert kernel["stack_bytes"] <= 512, "constants of the loop, and no more"


def test_sizes_and_formats_do_not_recompile(compiled: list[dict[str, Any]]) -> None:
    cases = ("fp32 one", "fp32 table", "fp32 cast", "fp32 update one", "fp32 update table", "fp32 count one")
    cases += ("fp32 unscale one", "fp32 unscale table", "fp32 bare one", "fp32 bare table")
    for case in (*cases, "fp32 count table"):
        assert len({kernel["hash"] for kernel in of(compiled, case)}) == 1, case
        assert len(of(compiled, case)) > 1


def only_compiling(cuobjdump: str, more: Callable[[Any], dict[str, Any]] = lambda _: {}) -> list[str]:
    """Kernels are compiled and not launched from now on, each a line of JSON under the case that is returned here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return device

    driver.set_active(Driver())
    run, case = jit.JITFunction.run, [""]

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        line = {"case": case[0], "name": self.fn.__name__, **examine(kernel, cuobjdump), **more(kernel)}
        sys.stdout.write(json.dumps(line) + "\n")
        return kernel

    jit.JITFunction.run = compile_only
    return case


def main(cuobjdump: str) -> None:
    """Compiles everything."""
    case = only_compiling(cuobjdump)
    launch_measuring(case)
    launch_casting(case)
    launch_updates(case)
    launch_counts(case)
    launch_unscaling(case)


def shorten(launching: Any) -> None:
    """Makes tiles small from now on, one vector a thread, and with them the code, which takes less time to compile."""
    launching._TILES = {size: 2048 // min(size, 4) for size in launching._TILES}


def others(dtypes: Iterable[Any]) -> list[Any]:
    """The dtypes without FP32, whose kernels with tiles of their true size have been compiled by then."""
    import torch

    return [dtype for dtype in dtypes if dtype != torch.float32]


def launch_measuring(case: list[str]) -> None:
    import torch

    from plimsoll import row_layout
    from plimsoll.kernels import triton_backend
    from plimsoll.kernels.triton_backend import input_bits, measuring

    def measure(lengths: tuple[int, ...], dtype: torch.dtype, block: int) -> None:
        bank = torch.zeros(4, row_layout.width(block), dtype=torch.int64)
        tensors = [torch.zeros(length, dtype=dtype) for length in lengths]
        triton_backend.measure(tensors, bank, range(len(tensors)), True, block)

    for lengths in ((7,), (4096,), (1, 5), (9, 99, 3)):
        case[0] = "fp32 one" if len(lengths) == 1 else "fp32 table"
        measure(lengths, torch.float32, 0)
    case[0] = f"measure {torch.float32}"
    measure((7,), torch.float32, 0)
    for dtype in (torch.bfloat16, torch.float64):
        case[0] = f"block record {dtype}"
        measure((7,), dtype, 32)
    shorten(measuring)
    for dtype in others(input_bits.DTYPES):
        case[0] = f"measure {dtype}"
        measure((7,), dtype, 0)


def launch_updates(case: list[str]) -> None:
    import torch

    from plimsoll import kernels
    from plimsoll.kernels import triton_backend
    from plimsoll.kernels.triton_backend import input_bits, updates

    def update(lengths: tuple[int, ...], dtype: torch.dtype, push: torch.dtype | None) -> None:
        tensors = [torch.zeros(length, dtype=dtype) for length in lengths]
        pushes = [x.to(push) if push else x[:0] for x in tensors]
        bank, moves = kernels.new_bank(len(lengths)), kernels.new_moves(len(lengths))
        triton_backend.update(tensors, tensors, pushes, bank, range(len(lengths)), moves)

    for lengths in ((7,), (4096,), (1, 5), (9, 99, 3)):
        case[0] = "fp32 update one" if len(lengths) == 1 else "fp32 update table"
        update(lengths, torch.float32, torch.float32)
    case[0] = f"update {torch.float32}"
    update((7,), torch.float32, torch.float32)
    shorten(updates)
    for dtype in others(input_bits.DTYPES):
        case[0] = f"update {dtype}"
        update((7,), dtype, dtype)
    for push in (torch.float64, torch.float8_e5m2fnuz, None):
        case[0] = f"push {push}"
        update((7,), torch.bfloat16, push)


def launch_counts(case: list[str]) -> None:
    import torch

    from plimsoll import kernels
    from plimsoll.kernels import triton_backend
    from plimsoll.kernels.triton_backend import input_bits

    for lengths in ((7,), (4096,), (1, 5), (9, 99, 3)):
        case[0] = "fp32 count one" if len(lengths) == 1 else "fp32 count table"
        triton_backend.count_nonfinite([torch.zeros(length) for length in lengths], kernels.new_counts(1), 0)
    for dtype in input_bits.DTYPES:
        case[0] = f"count {dtype}"
        triton_backend.count_nonfinite([torch.zeros(7, dtype=dtype)], kernels.new_counts(1), 0)


def launch_unscaling(case: list[str]) -> None:
    import torch

    from plimsoll import kernels
    from plimsoll.kernels import triton_backend
    from plimsoll.kernels.dtypes import FLOATING
    from plimsoll.kernels.triton_backend import unscaling

    inverse, found = torch.ones(1), torch.zeros(1)
    for lengths in ((7,), (4096,), (1, 5), (9, 99, 3)):
        gradients, rows = [torch.zeros(length) for length in lengths], range(len(lengths))
        for name, bank in (("unscale", kernels.new_bank(len(lengths))), ("bare", None)):
            case[0] = f"fp32 {name} one" if len(lengths) == 1 else f"fp32 {name} table"
            triton_backend.unscale(gradients, inverse, found, bank, rows)
    case[0] = f"unscale {torch.float32}"
    triton_backend.unscale([torch.zeros(7)], inverse, found, kernels.new_bank(1), [0])
    shorten(unscaling)
    for dtype in others(FLOATING):
        case[0] = f"unscale {dtype}"
        triton_backend.unscale([torch.zeros(7, dtype=dtype)], inverse, found, kernels.new_bank(1), [0])


def launch_casting(case: list[str]) -> None:
    import torch

    from plimsoll.formats import E4M3, E5M2, E8M0, MXFP8_E4M3, NVFP4
    from plimsoll.kernels import triton_backend
    from plimsoll.kernels.operators.cast_spec import NEAREST_EVEN, STOCHASTIC, BlockSpec, CastArguments, CastSpec
    from plimsoll.kernels.triton_backend import input_bits
    from plimsoll.kernels.triton_backend.casting import launch

    launch.GROUPS = 1  # code a quarter as long
    for dtype in input_bits.DTYPES:
        case[0] = f"cast {dtype}"
        x = torch.zeros(8, dtype=dtype)
        triton_backend.cast(x, x, CastArguments(CastSpec.of(E4M3, NEAREST_EVEN, True)))
    x = torch.zeros(4, 32)
    case[0] = "fp32 cast"
    for fmt, count, seed in ((E4M3, 128, 3), (NVFP4.element, 31, 16), (E5M2, 1, 1)):
        part = x.flatten()[:count]
        triton_backend.cast(part, part, CastArguments(CastSpec.of(fmt, STOCHASTIC, True), seed=seed))
    case[0] = "wide"
    spec = CastSpec.of(E8M0, STOCHASTIC, True)
    triton_backend.cast(x, x, CastArguments(spec, 1.0, x[0, 0], 3, torch.tensor(1)))
    case[0] = "pairs"
    codes = torch.zeros(4, 16, dtype=torch.uint8)
    triton_backend.pack(x, codes, CastArguments(CastSpec.of(NVFP4.element, NEAREST_EVEN, True), seed=3))
    case[0] = "blocks"
    scales = torch.zeros(4, 2, dtype=torch.uint8)
    arguments = CastArguments(BlockSpec.of(NVFP4, STOCHASTIC, 0), seed=3, tensor_scale=torch.tensor(1.0))
    triton_backend.block_pack(x, codes, scales, arguments)
    triton_backend.block_cast(x, x, CastArguments(BlockSpec.of(MXFP8_E4M3, NEAREST_EVEN, 0), seed=3))
    ragged = torch.zeros(4, 33)
    triton_backend.block_cast(ragged, ragged, CastArguments(BlockSpec.of(MXFP8_E4M3, STOCHASTIC, 0), seed=3))


def examine(kernel: Any, cuobjdump: str) -> dict[str, Any]:
    """What a compiled kernel uses; `vector_loads` and `vector_stores` are its 16-byte ones."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ptx = kernel.asm["ptx"]
    return {
        "hash": kernel.hash,
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "vector_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx)),
        "vector_stores": len(re.findall(r"st\.global[.\w:]*\.v4\.b32", ptx)),
        "ftz": len(re.findall(r"\.ftz\b", ptx)),
    }


if __name__ == "__main__":
    main(sys.argv[1])

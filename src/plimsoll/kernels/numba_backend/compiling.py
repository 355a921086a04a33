"""Compilation of kernels: serial, without the GIL, and cached."""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from plimsoll import row_layout

try:
    import fcntl
except ImportError:  # Windows: each process compiles for itself
    fcntl = None

# Numba's own threads are not used: its OpenMP layer kills forked children and its workqueue aborts when two threads
# call it at once. Kernels here are serial and release the GIL; `threads` runs several of them side by side.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
_PATIENCE_SECONDS = 60  # for another process that compiles the same kernel, which takes it a few
_uncached: list[str] = []
_locks: set[Path] = set()  # that this process holds


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a kernel on its first call."""
    return _compile(function)


def summing_kernel(function: Callable[..., Any]) -> Any:
    """Compile as `kernel`, with sums in any order. For loops over finite values only."""
    return _compile(function, fastmath={"reassoc", "contract", "nsz"})


def inlined(function: Callable[..., Any]) -> Any:
    """A part of kernels: compiled into each that calls it, and cached with them."""
    return njit(**_OPTIONS)(function)


def pasted(function: Callable[..., Any]) -> Any:
    """Compile as `inlined`, but never alone, which is faster; for a single caller."""
    return njit(inline="always", **_OPTIONS)(function)


def is_cached() -> bool:
    """Return whether compiled kernels are kept on disk."""
    return not _uncached


# Compiled code is cached in the source's folder, or in the user's cache folder if that is read-only (Numba's own rule;
# NUMBA_CACHE_DIR overrides it). Where neither can be written, the kernels compile again in each process, and a warning
# says so once. Compiled code is used only while all files of the kernels are as they were when it was compiled.
def _compile(function: Callable[..., Any], **options: Any) -> Any:
    try:
        compiled = njit(cache=True, **_OPTIONS, **options)(function)
    except RuntimeError as error:  # Numba found no folder to keep the compiled code in
        if not _uncached:
            warnings.warn(
                "plimsoll: expected a writable cache folder for compiled kernels; found none, so they are compiled "
                f"again in each process (seconds). Set NUMBA_CACHE_DIR to a writable folder. ({error})",
                RuntimeWarning,
                stacklevel=3,
            )
        _uncached.append(str(error))
        return njit(**_OPTIONS, **options)(function)
    # Numba looks at the file of the kernel alone. Machine code holds constants and parts of other files too: with
    # another row layout it would write counts into the wrong places.
    saved = compiled._cache._cache_file  # noqa: SLF001  (Numba 0.61 to 0.68)
    saved._source_stamp = _stamp()  # noqa: SLF001
    compiled.compile = functools.partial(_compile_once, compiled.compile, Path(f"{saved._index_path}.lock"))  # noqa: SLF001
    return compiled


# Ranks, workers and `plimsoll run` begin with the same kernels. The second to come would compile what is there when it
# has waited. Numba's own lock goes first, as where one kernel compiles another: threads would wait for each other.
def _compile_once(compile_it: Callable[[Any], Any], lock: Path, signature: Any) -> Any:
    """Compile a kernel, or load it where another process compiles it now."""
    with global_compiler_lock, _alone(lock):
        return compile_it(signature)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock that one process can hold at a time. Where that cannot be, nothing is held."""
    if fcntl is None or lock in _locks:
        yield
        return
    _locks.add(lock)
    try:
        with contextlib.ExitStack() as left:
            with contextlib.suppress(OSError):  # a folder that cannot be written, or a file system without locks
                file, until = left.enter_context(lock.open("w")), time.monotonic() + _PATIENCE_SECONDS
                while not _is_taken(file) and time.monotonic() < until:
                    time.sleep(0.02)
                left.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing does not, if a forked child has the file too
            yield
    finally:
        _locks.discard(lock)


def _is_taken(file: Any) -> bool:
    """Take a file's lock; return False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@functools.cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of change of the files that kernels are made from."""
    kernels, layout = Path(__file__).parents[1], Path(row_layout.__file__)
    states = ((file.name, file.stat()) for file in [layout, *sorted(kernels.rglob("*.py"))])
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def _bitcast(to: Any) -> Any:
    """Return an intrinsic that reads a number's bits as `to`.

    Integers are cut to its width: Numba widens them.
    """

    @intrinsic
    def reinterpret(_: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
            bits = arguments[0]
            if isinstance(bits.type, ir.IntType) and bits.type.width > to.bitwidth:
                bits = builder.trunc(bits, ir.IntType(to.bitwidth))
            return builder.bitcast(bits, context.get_value_type(to))

        return to(value), generate

    return reinterpret


as_uint32: Any = _bitcast(types.uint32)
as_float32: Any = _bitcast(types.float32)
as_uint64: Any = _bitcast(types.uint64)
as_float64: Any = _bitcast(types.float64)
as_int64: Any = _bitcast(types.int64)


def _shift(operation: str) -> Any:
    """Return an intrinsic that shifts an integer within its own width.

    Numba's operators would widen it to 64 bits first.
    """

    @intrinsic
    def shift(_: Any, value: Any, amount: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            places = context.cast(builder, arguments[1], signature.args[1], signature.return_type)
            return getattr(builder, operation)(arguments[0], places)

        return value(value, amount), generate

    return shift


shift_left: Any = _shift("shl")
shift_right: Any = _shift("lshr")


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """The memory at an address, for `carray`."""

    def generate(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


@intrinsic
def count_four(_: Any, buffer: Any, chunks: Any, top: Any) -> Any:
    """Count bytes of ``buffer[: 32 * chunks]``: top to top - 3, in 16 bits each."""

    # Written in LLVM's vectors because a loop that adds up comparisons is compiled into wider lanes, and far slower. A
    # lane counts to 255, so chunks <= 255; the count of `top` is in the lowest 16 bits. Thirty-two lanes, since on 64 a
    # comparison goes through a mask register (measured: 130 against 92 ns for 4,096 bytes).
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, half, word = ir.IntType(8), ir.IntType(16), ir.IntType(64)
        lanes = ir.VectorType(byte, 32)
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        base = builder.bitcast(array.data, lanes.as_pointer())
        first = builder.trunc(arguments[2], byte)
        keys = [_splat(builder, builder.sub(first, ir.Constant(byte, i)), lanes) for i in range(4)]
        totals = [cgutils.alloca_once_value(builder, ir.Constant(lanes, [0] * 32)) for _ in keys]
        with cgutils.for_range(builder, arguments[1]) as loop:
            values = builder.load(builder.gep(base, [loop.index]), align=1)
            for key, total in zip(keys, totals, strict=True):
                equal = builder.sext(builder.icmp_unsigned("==", values, key), lanes)  # -1 where equal
                builder.store(builder.sub(builder.load(total), equal), total)
        wide = ir.VectorType(half, 32)
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(half, [wide]), "llvm.vector.reduce.add.v32i16"
        )
        packed = ir.Constant(word, 0)
        for i, total in enumerate(totals):
            count = builder.zext(builder.call(add, [builder.zext(builder.load(total), wide)]), word)
            packed = builder.or_(packed, builder.shl(count, ir.Constant(word, 16 * i)))
        return packed

    return types.int64(buffer, chunks, top), generate


def stack(size: int) -> Any:
    """Return an intrinsic that gives the address of so many bytes on the stack."""

    @intrinsic
    def address(_: Any) -> Any:
        def generate(__: Any, builder: Any, ___: Any, ____: Any) -> Any:
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(ir.IntType(8), size))
                memory.align = 64
            return builder.ptrtoint(memory, ir.IntType(64))

        return types.int64(), generate

    return address


def _splat(builder: Any, value: Any, lanes: Any) -> Any:
    empty = ir.Constant(lanes, ir.Undefined)
    single = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        single, empty, ir.Constant(ir.VectorType(ir.IntType(32), lanes.count), [0] * lanes.count)
    )


@inlined
def widen_half(bits):
    """Return the float32 bits of a float16, without reading a float32 subnormal."""
    magnitude = np.uint32(bits & np.uint32(0x7FFF))
    sign = np.uint32(np.uint32(bits & np.uint32(0x8000)) << np.uint32(16))
    normal = np.uint32((magnitude << np.uint32(13)) + np.uint32(112 << 23))
    special = np.uint32(normal + np.uint32(112 << 23))
    small = as_uint32(np.float32(magnitude) * np.float32(2.0**-24))
    wide = small if magnitude < np.uint32(0x0400) else (normal if magnitude < np.uint32(0x7C00) else special)
    return wide | sign

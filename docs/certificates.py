"""Writes reference/certificates.md, certificates of functions of several libraries, and the table of requirements.

python docs/certificates.py            with the packages of the extra `bench`
python docs/certificates.py --table    the table in reference/certification.md alone
"""

import datetime as dt
import importlib.metadata
import logging
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import plimsoll as pl
from plimsoll.certification.registry import cited
from plimsoll.certification.requirements import REQUIREMENTS
from plimsoll.certification.sheet import inferred_lines

PAGE = Path(__file__).parent / "reference" / "certificates.md"
REFERENCE = PAGE.with_name("certification.md")
_BEGIN, _END = "<!-- requirements -->\n", "<!-- end -->\n"
_HEAD = """# Certificates

*Written by `python docs/certificates.py`.*

Certificates of functions of PyTorch, torchao, transformers, ml_dtypes, gfloat, NumPy, QPyTorch and Plimsoll, by
`plimsoll certify`. A row that deviates is no judgement: it names the difference from a text, and the smallest input
that shows it. [The reference](certification.md#requirements) explains the rows.
"""
_TAIL = """
To repeat one of them, write the call into a file, say `kernels.py`, and run `plimsoll certify kernels.py:NAME --format
FORMAT`. Functions on a GPU are not measured yet: `--device cuda` gives the tensors there.
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A function whose certificate is on the page.

    `make` imports the library and returns the function. `call` is what it stands for, as a reader would write it.
    """

    library: str
    call: str
    make: Callable[[], Any]
    fmt: str
    kind: str = "cast"
    arguments: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------- adapters


def _torchao_mx(fmt: str, mode: str) -> Callable[[Tensor], Any]:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2, "mxfp6_e3m2": "fp6_e3m2"}[fmt]
    return lambda x: to_mx(x, element, 32, ScaleCalculationMode[mode])


def _torchao_unpack(element: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    return lambda scales, codes: to_dtype(codes, scales, element, 32, torch.float32)


def _torchao_nvfp4() -> Callable[[Tensor], Any]:
    from torchao.prototype.mx_formats import nvfp4_tensor

    def quantize(x: Tensor) -> Any:
        scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
        return *nvfp4_tensor.nvfp4_quantize(x, 16, scale), scale

    return quantize


def _torchao_stochastic() -> Callable[[Tensor], Tensor]:
    from torchao.optim.quant_utils import _fp32_to_bf16_sr  # what its optimizers round with

    return _fp32_to_bf16_sr


def _transformers_mxfp4() -> Callable[[Tensor, Tensor], Tensor]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def unpacked(codes: Tensor, scales: Tensor) -> Tensor:
        rows = codes.shape[0]  # of one expert; the function takes blocks of bytes and returns a transposed matrix
        found = convert_moe_packed_tensors(codes.reshape(1, rows, -1, 16), scales.reshape(1, rows, -1))
        return found.transpose(1, 2)[0]

    return unpacked


def _transformers_mxfp8() -> Callable[[Tensor, Tensor], Tensor]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantize = Fp8Dequantize(None)._dequantize_one  # noqa: SLF001  (what it loads checkpoints with)
    return lambda codes, scales: dequantize(codes.view(torch.float8_e4m3fn), scales, torch.float32)


def _gfloat(name: str, *, saturate: bool) -> Callable[[np.ndarray], np.ndarray]:
    import gfloat
    import gfloat.formats

    info = getattr(gfloat.formats, f"format_info_ocp_{name}")
    return lambda x: gfloat.round_ndarray(info, np.asarray(x, np.float64), sat=saturate)


def _gfloat_blocks() -> Callable[[np.ndarray], np.ndarray]:
    import gfloat
    from gfloat.formats import format_info_mxfp4_e2m1

    def quantize(x: np.ndarray) -> np.ndarray:
        blocks = np.asarray(x, np.float64).reshape(-1, 32)
        done = [gfloat.quantize_block(format_info_mxfp4_e2m1, b, gfloat.compute_scale_amax) for b in blocks]
        return np.array(done).reshape(x.shape)

    return quantize


def _ml_dtypes(name: str) -> type:
    import ml_dtypes

    return getattr(ml_dtypes, name)


def _qtorch(rounding: str) -> Callable[[Tensor], Tensor]:
    from qtorch.quant import float_quantize

    return lambda x: float_quantize(x, 5, 2, rounding)


def _scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    one = torch.tensor(1.0)
    return torch._scaled_mm(a.contiguous(), b.t().contiguous().t(), one, one, out_dtype=torch.bfloat16)  # noqa: SLF001


# ------------------------------------------------------------------------------------------------------------- subjects


def _torch_dtype(name: str, fmt: str) -> Subject:
    return Subject(library="torch", call=f"x.to(torch.{name})", make=lambda: getattr(torch, name), fmt=fmt)


def _ml_dtype(name: str, fmt: str) -> Subject:
    return Subject(library="ml_dtypes", call=f"x.astype(ml_dtypes.{name})", make=lambda: _ml_dtypes(name), fmt=fmt)


def _mx(fmt: str, mode: str) -> Subject:
    return Subject(
        library="torchao", call=f"to_mx(x, ..., 32, {mode})", make=lambda: _torchao_mx(fmt, mode), fmt=fmt, kind="pack",
        arguments={} if mode == "FLOOR" else {"scale_rule": mode.lower()},
    )  # fmt: skip


SUBJECTS = (
    *(_torch_dtype(name, fmt) for name, fmt in (
        ("float8_e4m3fn", "e4m3"), ("float8_e5m2", "e5m2"), ("float8_e4m3fnuz", "e4m3fnuz"),
        ("float8_e5m2fnuz", "e5m2fnuz"), ("float8_e8m0fnu", "e8m0"), ("float16", "fp16"), ("bfloat16", "bf16"),
    )),
    *(Subject(library="torch", call="torch.matmul", make=lambda: torch.matmul, fmt=fmt, kind="matmul")
      for fmt in ("fp32", "fp16", "bf16", "e4m3")),
    Subject(library="torch", call="torch._scaled_mm(..., out_dtype=torch.bfloat16)", make=lambda: _scaled_mm,
            fmt="e4m3", kind="matmul"),
    *(Subject(library="torch", call="torch.sum", make=lambda: torch.sum, fmt=fmt, kind="sum")
      for fmt in ("fp32", "fp16", "bf16")),
    _mx("mxfp8_e4m3", "FLOOR"),
    _mx("mxfp8_e4m3", "RCEIL"),
    _mx("mxfp8_e4m3", "EVEN"),
    _mx("mxfp4", "FLOOR"),
    Subject(library="torchao", call="to_dtype(codes, scales, torch.float8_e4m3fn, ...)",
            make=lambda: _torchao_unpack(torch.float8_e4m3fn), fmt="mxfp8_e4m3", kind="unpack"),
    Subject(library="torchao", call="to_dtype(codes, scales, torch.float4_e2m1fn_x2, ...)",
            make=lambda: _torchao_unpack(torch.float4_e2m1fn_x2), fmt="mxfp4", kind="unpack"),
    Subject(library="torchao", call="nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))",
            make=_torchao_nvfp4, fmt="nvfp4", kind="pack"),
    Subject(library="torchao", call="_fp32_to_bf16_sr", make=_torchao_stochastic, fmt="bf16"),
    Subject(library="transformers", call="convert_moe_packed_tensors", make=_transformers_mxfp4, fmt="mxfp4",
            kind="unpack"),
    Subject(library="transformers", call="Fp8Dequantize", make=_transformers_mxfp8, fmt="mxfp8_e4m3", kind="unpack"),
    *(_ml_dtype(name, fmt) for name, fmt in (
        ("float8_e4m3fn", "e4m3"), ("float8_e5m2", "e5m2"), ("float4_e2m1fn", "e2m1"), ("float8_e8m0fnu", "e8m0"),
        ("bfloat16", "bf16"),
    )),
    Subject(library="gfloat", call="round_ndarray(format_info_ocp_e4m3, x, sat=True)",
            make=lambda: _gfloat("e4m3", saturate=True), fmt="e4m3"),
    Subject(library="gfloat", call="round_ndarray(format_info_ocp_e5m2, x)",
            make=lambda: _gfloat("e5m2", saturate=False), fmt="e5m2"),
    Subject(library="gfloat", call="quantize_block(format_info_mxfp4_e2m1, x, compute_scale_amax)",
            make=_gfloat_blocks, fmt="mxfp4"),
    Subject(library="numpy", call="x.astype(np.float16)", make=lambda: np.float16, fmt="fp16"),
    Subject(library="numpy", call="np.sum(x)", make=lambda: lambda x: np.sum(np.asarray(x)), fmt="fp32", kind="sum"),
    Subject(library="qtorch", call='float_quantize(x, 5, 2, "nearest")', make=lambda: _qtorch("nearest"), fmt="e5m2"),
    Subject(library="qtorch", call='float_quantize(x, 5, 2, "stochastic")', make=lambda: _qtorch("stochastic"),
            fmt="e5m2"),
    Subject(library="plimsoll", call='pl.cast(x, "e4m3")', make=lambda: lambda x: pl.cast(x, "e4m3"), fmt="e4m3"),
    Subject(library="plimsoll", call='pl.cast(x, "e4m3", rounding="stochastic")',
            make=lambda: lambda x: pl.cast(x, "e4m3", rounding="stochastic"), fmt="e4m3"),
    Subject(library="plimsoll", call='pl.pack(x, "mxfp8_e4m3")', make=lambda: lambda x: pl.pack(x, "mxfp8_e4m3"),
            fmt="mxfp8_e4m3", kind="pack"),
    Subject(library="plimsoll", call='pl.pack(x, "nvfp4")', make=lambda: lambda x: pl.pack(x, "nvfp4"), fmt="nvfp4",
            kind="pack"),
    Subject(library="plimsoll", call="pl.unpack", make=lambda: pl.unpack, fmt="nvfp4", kind="unpack"),
)  # fmt: skip
LIBRARIES = tuple(dict.fromkeys(subject.library for subject in SUBJECTS))


# ----------------------------------------------------------------------------------------------------------------- page


def certified(subject: Subject) -> pl.Certificate:
    """The certificate of a subject, whose library must be installed."""
    return pl.certify(subject.make(), subject.fmt, kind=subject.kind, **subject.arguments)


def page() -> str:
    """The page's text."""
    logging.disable(logging.WARNING)  # torchao speaks of kernels that this machine has no use for
    found = [(subject, certified(subject)) for subject in SUBJECTS]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    machine = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    seconds = sum(certificate.seconds for _, certificate in found)
    facts = (
        f"{dt.datetime.now(dt.UTC).date().isoformat()}, {machine}; {versions}. "
        f"{len(found)} certificates took {seconds:.0f} s.\n"
    )
    rows = "\n".join(_row(subject, certificate) for subject, certificate in found)
    table = f"| function | format | kind | verdict | seconds |\n|---|---|---|---|---|\n{rows}\n"
    sections = "\n".join(_section(subject, certificate) for subject, certificate in found)
    return f"{_HEAD}\n{facts}\n{table}\n{sections}{_TAIL}"


def title(subject: Subject) -> str:
    """The heading of a subject's section."""
    return f"{subject.library}: `{subject.call}` as {subject.fmt}, {subject.kind}"


def _row(subject: Subject, certificate: pl.Certificate) -> str:
    if certificate.conforms:
        verdict = "conforms"
    else:
        verdict = f"deviates: {', '.join(f'`{row.requirement}`' for row in certificate.deviations)}"
    name = f"{subject.library}: `{subject.call}`"
    return f"| {name} | {subject.fmt} | {subject.kind} | {verdict} | {certificate.seconds:.1f} |"


def _section(subject: Subject, certificate: pl.Certificate) -> str:
    facts = "; ".join(f"{name}: {value}" for name, value in inferred_lines(certificate))
    lines = [f"## {title(subject)}", "", f"*Inferred.* {facts}.", ""]
    for status, word in (("deviates", "Deviates in"), ("refuses", "Refuses")):
        for row in certificate.rows:
            if row.status == status:
                said = str(row.counterexample) if status == "deviates" else row.detail
                lines += [f"- {word} `{row.requirement}` ({row.source}): {_plain(said).rstrip('.')}."]
    conforming = [f"`{row.requirement}`" for row in certificate.rows if row.status == "conforms"]
    lines += [f"- Conforms in {', '.join(conforming)}."]
    untried = [f"`{row.requirement}`: {row.detail}" for row in certificate.rows if row.status == "not tried"]
    lines += [f"- Not tried: {_plain(sentence).rstrip('.')}." for sentence in (*untried, *certificate.not_tried)]
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    for sign in "\\*_<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text


# ---------------------------------------------------------------------------------------------------------------- table


def reference() -> str:
    """The reference's text with the present table of requirements."""
    text = REFERENCE.read_text("utf-8")
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    return f"{before}{_BEGIN}\n{requirements_table()}\n{_END}{after}"


def requirements_table() -> str:
    """Every requirement with the kinds of function that it is for and its sources."""
    lines = ["| row | what holds | for | asked for by |", "|---|---|---|---|"]
    for found in REQUIREMENTS.values():
        says = re.sub(r"\{(\w+)\}", lambda match: f"*{match[1].replace('_', ' ')}*", found.says)
        sources = [cited(*item) for item in (*found.sections.items(), *([found.general] if found.general else []))]
        marked = f"`{found.id}`" + (" (may refuse)" if found.may_refuse else "")
        lines.append(f"| {marked} | {says} | {', '.join(found.kinds)} | {'; '.join(sources)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    REFERENCE.write_text(reference(), "utf-8")
    if sys.argv[1:] != ["--table"]:
        PAGE.write_text(page(), "utf-8")

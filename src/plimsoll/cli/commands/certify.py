"""``plimsoll certify``: the conformance certificate of a function of any library."""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import AlsoInFile, Json, NumberFormat, Quiet
from plimsoll.cli.paths import local_file, write_text
from plimsoll.errors import ArgumentError
from plimsoll.formats.codec import Rounding
from plimsoll.text import clause

if TYPE_CHECKING:
    from plimsoll.certification import Certificate

_ENDINGS = (".json", ".md", ".markdown", ".html", ".htm", ".txt")


def certify(
    function: Annotated[
        str,
        typer.Argument(metavar="FUNCTION", help="MODULE:NAME or FILE.py:NAME. NAME may have dots, and may be a dtype."),
    ],
    fmt: NumberFormat,
    kind: Annotated[
        Literal["cast", "pack", "unpack", "matmul", "sum"],
        typer.Option("--kind", metavar="KIND", help="cast, pack, unpack, matmul or sum."),
    ] = "cast",
    rounding: Annotated[
        Rounding | None,
        typer.Option(
            "--rounding", metavar="MODE", help="Rounding that it is held to. Default: to nearest even, or stochastic."
        ),
    ] = None,
    scale_rule: Annotated[
        Literal["floor", "ceil", "rceil", "even"] | None,
        typer.Option("--scale-rule", metavar="RULE", help="Rule for block scales that it is held to. Default: floor."),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Device of the tensors.")] = "cpu",
    seconds: Annotated[float, typer.Option("--seconds", metavar="N", help="Limit of the time.")] = 60.0,
    output: AlsoInFile = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Test a cast, pack, product or sum against its format.

    All 16-bit values, ties, subnormals, NaN, blocks with adversarial maxima and sums of a visible order are tried. Exit
    code 0: it conforms. 1: it deviates, and the smallest counterexamples are shown. 2: it cannot be tested.
    """
    file = local_file("certify", "-o", output, "certificate.html")
    if file is not None:
        from plimsoll.runs.storage.atomic_files import check_place

        check_place("certify", file, _ENDINGS)  # before the work
    from plimsoll.certification import certify as certified
    from plimsoll.formats import get

    get(fmt)  # before the function is imported

    certificate = certified(
        _loaded(function), fmt, kind=kind, rounding=rounding, scale_rule=scale_rule, device=device, seconds=seconds
    )
    if file is not None:
        write_text("certify", file, _text(certificate, file.suffix.lower()))
    if as_json:
        messages.write_json(certificate.to_dict())
    elif file is not None:
        messages.write_line(certificate.verdict)
    else:
        _print(certificate)
    if not certificate.conforms:
        raise typer.Exit(1)


def _text(certificate: "Certificate", ending: str) -> str:
    match ending:
        case ".json":
            return messages.json_text(certificate.to_dict())
        case ".md" | ".markdown":
            return certificate.to_markdown()
        case ".html" | ".htm":
            return certificate.to_html()
        case _:
            return str(certificate)


def _print(certificate: "Certificate") -> None:
    from plimsoll.certification.sheet import renderables
    from plimsoll.cli.terminal import console

    target = console()
    for part in renderables(certificate):
        target.print(part)


def _loaded(function: str) -> Any:
    """Import the module or file, and return what its part after the last colon names."""
    place, colon, name = function.rpartition(":")
    if not colon or not place or not name:
        raise ArgumentError(
            f"certify: expected MODULE:NAME or FILE.py:NAME; got {function!r}. For instance kernels.py:cast_to_e4m3."
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the answer
            found: Any = _module(place)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ArgumentError(
            f"certify: expected {place} to import; got {clause(reason)}. Repair it, or name another."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            from plimsoll.checks import nearest

            near = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            hint = f"Nearest: {', '.join(near)}." if near else "Check the spelling."
            raise ArgumentError(f"certify: expected a name that {place} defines; got {name!r}. {hint}")
        found = getattr(found, part)
    return found


def _module(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        return importlib.import_module(place)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {place}")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes pickle by it, and dataclasses look their module up
    spec.loader.exec_module(module)
    return module

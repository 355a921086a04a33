"""File of a precision plan: TOML with one line per module in each table.

All but the target and the table of formats may be missing, so that files of earlier versions can be read. Powers of two
are written as text ("2^-7"), and read as text or as numbers.
"""

import json
import math
import os
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from plimsoll import checks
from plimsoll.errors import ArgumentError
from plimsoll.intervals import Interval

SCHEMA = 1
_NUMBERS = ("tolerance", "cost", "budget")
_LISTS = ("remarks", "predicted_loss")
_TABLES = ("formats", "backward", "scales", "predicted", "increases", "notes")
_POWER = re.compile(r"2\^(-?\d{1,4})")
_COMMENTS = {
    "": "Formats in which the modules of a model compute, for plimsoll.prepare and plimsoll.emulate.\n"
    "# Names are modules or globs over them. A name goes before globs, and the first matching glob counts.",
    "formats": "format that a module computes in",
    "backward": "format of its gradients, if it is another one",
    "scales": "factors of values before a cast",
    "predicted": "fraction of values that is lost: at least, about, at most",
    "increases": "share that a module's formats add to the loss: by the forward, by the updates",
    "notes": "reasons",
}


def write(plan: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the fields of a plan, whole or not at all."""
    target = checked_path("Plan.save", path)
    single = {"schema": SCHEMA, **{name: plan[name] for name in ("target", "default", "source", "costs")}}
    lines = [f"# {_COMMENTS['']}", *(f"{key} = {_toml(value)}" for key, value in single.items() if value is not None)]
    lines += [] if plan["scale"] is None else [f"scale = {_power(plan['scale'])}  # of the loss, to begin with"]
    # A number of NumPy has another repr.
    lines += [f"{name} = {float(plan[name])!r}" for name in _NUMBERS if plan[name] is not None]
    rise: Interval | None = plan["predicted_loss"]
    lines += [] if rise is None else [f"predicted_loss = {[float(x) for x in (rise.low, rise.estimate, rise.high)]!r}"]
    lines += ["remarks = [", *(f"    {_toml(remark)}," for remark in plan["remarks"]), "]"] if plan["remarks"] else []
    for title in _TABLES:
        table: Mapping[str, Any] = plan[title]
        if table or title == "formats":
            lines += ["", f"[{title}]  # {_COMMENTS[title]}"]
            lines += [f"{_toml(name)} = {_value(title, value)}" for name, value in table.items()]
    # As `runs.storage.atomic_files.replacing`, which this package must not import. Nobody can guess the random name and
    # put a link there.
    temporary = target.with_name(f".writing-{secrets.token_hex(8)}-{target.name}.tmp")
    opened = temporary.open("x", encoding="utf-8")
    try:
        with opened as file:
            file.write("\n".join(lines) + "\n")
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def checked_path(operation: str, path: str | os.PathLike[str]) -> Path:
    """Return the path of a plan to write, or raise `ArgumentError`."""
    target = checks.regular_file(operation, path)
    if not target.parent.is_dir():
        raise ArgumentError(
            f"{operation}: expected a path in a folder that exists; got {target}. Make its folder first."
        )
    if target.suffix.lower() not in ("", ".toml"):
        raise ArgumentError(
            f"{operation}: expected a file name that ends in .toml, since a plan is TOML; got {target}. Write to "
            f"{target.with_suffix('.toml').name}."
        )
    return target


def read(path: str | os.PathLike[str], known: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a plan's file, all of which must be `known`."""
    place = checks.path("Plan.load", "a plan's file", path, remedy='Give for instance "plan.toml".')
    try:
        content = tomllib.loads(place.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"Plan.load: expected a TOML file; got {os.fspath(path)}. {error}.") from error
    schema = content.pop("schema", SCHEMA)
    reason = _why_damaged(content, schema, known)
    if reason is not None:
        raise ArgumentError(f"Plan.load: expected {reason}; got {os.fspath(path)}. Correct it, or save the plan again.")
    return _fields(content)


def _value(title: str, value: Any) -> str:
    if title == "scales":
        return _inline({role: _power(scale) for role, scale in value.items()})
    if title == "predicted":
        return _inline({role: f"[{', '.join(map(_fraction, loss))}]" for role, loss in value.items()})
    if title == "increases":
        return f"[{', '.join(map(_fraction, value))}]"
    return _toml(value)


def _inline(pairs: Mapping[str, str]) -> str:
    return f"{{ {', '.join(f'{key} = {value}' for key, value in pairs.items())} }}" if pairs else "{}"


def _power(scale: float) -> str:
    return f'"2^{math.frexp(scale)[1] - 1}"'


def _fraction(part: float) -> str:
    return repr(float(part)).removesuffix(".0")


def _toml(value: object) -> str:
    """Return a string or integer in TOML."""
    # JSON's form, except that TOML requires an escape for the delete character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _why_damaged(content: Mapping[str, Any], schema: object, known: Sequence[str]) -> str | None:
    if schema != SCHEMA:
        return f"schema {SCHEMA}, the one that this version reads (found {schema!r})"
    strange = sorted(content.keys() - set(known))
    if strange:
        return f"the fields {', '.join(known)} (found {', '.join(strange)})"
    missing = sorted({"target", "formats"} - content.keys())
    if missing:
        return f"the fields target and formats (missing {', '.join(missing)})"
    wrong = sorted(key for key, value in content.items() if not _is_of_its_kind(key, value))
    if not wrong:
        return None
    return (
        f"{', '.join(_TABLES[:-1])} and {_TABLES[-1]} to be tables, scale, {', '.join(_NUMBERS[:-1])} and "
        f"{_NUMBERS[-1]} numbers, {' and '.join(_LISTS)} lists, and all else text (wrong: {', '.join(wrong)})"
    )


def _is_of_its_kind(key: str, value: object) -> bool:
    if key in _TABLES:
        return isinstance(value, dict)
    return isinstance(value, list) if key in _LISTS else not isinstance(value, dict | list)


def _fields(content: dict[str, Any]) -> dict[str, Any]:
    result = dict(content)
    if "scale" in result:
        result["scale"] = _number(result["scale"])
    if "remarks" in result:
        result["remarks"] = tuple(result["remarks"])
    rise: Any = _tuple(result.get("predicted_loss"))
    if isinstance(rise, tuple) and len(cast("tuple[Any, ...]", rise)) == 3:
        result["predicted_loss"] = Interval(**dict(zip(("low", "estimate", "high"), cast("Any", rise), strict=True)))
    if "increases" in result:
        result["increases"] = _each(result["increases"], _tuple)
    if "scales" in result:
        result["scales"] = {name: _each(table, _number) for name, table in result["scales"].items()}
    if "predicted" in result:
        result["predicted"] = {name: _each(table, _tuple) for name, table in result["predicted"].items()}
    return result


def _each(table: Any, made: Any) -> Any:
    """Return a table with converted values. The record rejects all but tables."""
    return (
        {key: made(value) for key, value in cast("dict[str, Any]", table).items()} if isinstance(table, dict) else table
    )


def _number(value: Any) -> Any:
    """Return 1024.0 for "2^10", and other values unchanged, for the record to check."""
    if isinstance(value, str):
        match = _POWER.fullmatch(value.strip())
        return math.ldexp(1.0, int(match[1])) if match and abs(int(match[1])) < 1000 else value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _tuple(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(float(x) if isinstance(x, int) and not isinstance(x, bool) else x for x in cast("list[Any]", value))

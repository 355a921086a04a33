"""The record of a precision plan: which modules of a model run in which format, as a TOML file that people can edit."""

import fnmatch
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats._block import BlockFormat
from plimsoll.formats._catalogue import get
from plimsoll.formats._format import Format

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Module names, or globs over them, to format names.

    `target` is the precision that was planned for; `default` is the format of modules that nothing matches (None: left
    as they are); `source` says where the plan came from, as a run's path; `notes` say why, by the same names as
    `formats`. The mappings are kept as they are given: hand over ones that nobody changes afterwards.

    >>> plan = Plan(target="fp8", formats={"blocks.*.mlp": "e4m3", "blocks.0.mlp": "bf16"}, default="bf16")
    >>> plan.format_for("blocks.0.mlp").name, plan.format_for("blocks.1.mlp").name, plan.format_for("head").name
    ('bf16', 'e4m3', 'bf16')
    """

    target: str
    formats: Mapping[str, str] = field(hash=False)
    default: str | None = None
    source: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def __post_init__(self) -> None:
        texts = {"target": self.target, "default": self.default or "", "source": self.source or ""}
        for where, value in (*texts.items(), *self.formats.items(), *self.notes.items()):
            if not (_is_text(where) and _is_text(value)):
                raise ArgumentError(f"Plan: expected Unicode text throughout; got {where!r} = {value!r}.")
        defaults = {} if self.default is None else {"default": self.default}
        for where, name in (*defaults.items(), *self.formats.items()):
            try:
                get(name)
            except FormatError as error:
                raise FormatError(f"Plan: expected a format for {where!r}. {error}") from None

    def format_for(self, module_name: str) -> Format | BlockFormat | None:
        """The format of that module: by its exact name, else the first glob that matches, else the default."""
        name = self.formats.get(module_name)
        if name is None:
            globs = (glob for glob in self.formats if fnmatch.fnmatchcase(module_name, glob))
            first = next(globs, None)
            name = self.default if first is None else self.formats[first]
        return None if name is None else get(name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as TOML, whole or not at all."""
        single = {"schema": SCHEMA, "target": self.target, "default": self.default, "source": self.source}
        lines = [f"{key} = {_toml(value)}" for key, value in single.items() if value is not None]
        for title, table in (("formats", self.formats), ("notes", self.notes)):
            lines += ["", f"[{title}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in table.items())]
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        beside.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan that `save` or a person wrote; `ArgumentError` for a file that is no plan."""
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ArgumentError(f"Plan.load: expected a TOML file; got {os.fspath(path)}. {error}.") from error
        schema = content.pop("schema", SCHEMA)
        reason = _why_damaged(content, schema)
        if reason is not None:
            raise ArgumentError(f"Plan.load: expected {reason}; got {os.fspath(path)}. Save the plan again.")
        return cls(**content)


def _is_text(value: object) -> bool:
    """Whether it is a string that a UTF-8 file can hold (a lone surrogate cannot be written)."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")


def _toml(value: object) -> str:
    """A string or integer in TOML: JSON's own form, but for the delete character, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _why_damaged(content: dict[str, Any], schema: object) -> str | None:
    if schema != SCHEMA:
        return f"schema {SCHEMA}, the one that this version reads (found {schema!r})"
    known = {spec.name: spec for spec in fields(Plan)}
    strange = sorted(content.keys() - known.keys())
    if strange:
        return f"the fields {', '.join(known)} (found {', '.join(strange)})"
    missing = sorted({"target", "formats"} - content.keys())
    if missing:
        return f"the fields target and formats (missing {', '.join(missing)})"
    tables = {"formats", "notes"}
    wrong = sorted(key for key, value in content.items() if isinstance(value, dict) != (key in tables))
    return f"formats and notes to be tables, and all else text (wrong: {', '.join(wrong)})" if wrong else None

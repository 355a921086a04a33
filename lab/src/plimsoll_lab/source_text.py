"""Text that every machine has: Python's standard library, as characters.

Modules are named, not searched for: those that are one file of plain Python in every version since 3.10. Three of them
are held out whole, so that no line of theirs was trained on. The text is that of the interpreter at hand, and differs a
little from version to version: its SHA-256 goes into every result, and results of one digest are of one text.

A character is printable ASCII or the end of a line; all others are one symbol. A batch follows from seed and step.
"""

import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from plimsoll.errors import PlimsollError

TRAINED = (
    "argparse", "ast", "calendar", "cmd", "configparser", "copy", "csv", "dataclasses", "doctest", "enum",
    "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "inspect", "ipaddress", "locale", "mailbox",
    "optparse", "pdb", "pickle", "pickletools", "platform", "plistlib", "random", "selectors", "shutil", "smtplib",
    "socket", "socketserver", "ssl", "statistics", "subprocess", "tarfile", "tempfile", "threading", "tokenize",
    "traceback", "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "weakref",
)  # fmt: skip
HELD_OUT = ("difflib", "textwrap", "pprint")
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
OTHER = len(ALPHABET)  # every character that is not in it
SYMBOLS = OTHER + 1

# The code of each character below 127, which stands for it and for all above it.
_CODES = np.array([ALPHABET.find(chr(number)) % (OTHER + 1) for number in range(128)], np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Characters as codes (uint8, one axis): trained, held out; `sha256` of both."""

    trained: Tensor
    held_out: Tensor
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Pieces of text (pieces, length) and each character's next, both int64."""

    inputs: Tensor
    targets: Tensor


@cache
def standard_library() -> Text:
    """The text of this interpreter; read once."""
    trained, held_out = (_codes("\n".join(_source(name) for name in names)) for names in (TRAINED, HELD_OUT))
    digest = hashlib.sha256(trained + b"\xff" + held_out).hexdigest()
    return Text(trained=_tensor(trained), held_out=_tensor(held_out), sha256=digest)


def make_batch(text: Text, seed: int, step: int, *, pieces: int, length: int) -> Batch:
    """Return the step's batch: pieces of the trained text, with next characters."""
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    starts = torch.randint(len(text.trained) - length, (pieces,), generator=generator)
    return _cut(text.trained, starts, length)


def held_out_batch(text: Text, *, pieces: int, length: int) -> Batch:
    """As many pieces of what is held out, spread evenly over it: always the same ones."""
    starts = torch.arange(pieces) * (len(text.held_out) - length - 1) // max(pieces - 1, 1)
    return _cut(text.held_out, starts, length)


def spelled(codes: Tensor) -> str:
    """Return the characters of codes on one axis, with U+FFFD for unknown ones."""
    listed = cast("list[int]", codes.tolist())
    return "".join("\ufffd" if code == OTHER else ALPHABET[code] for code in listed)


def _cut(characters: Tensor, starts: Tensor, length: int) -> Batch:
    cut = characters[starts[:, None] + torch.arange(length + 1)].long()
    return Batch(inputs=cut[:, :-1].contiguous(), targets=cut[:, 1:].contiguous())


def _codes(text: str) -> bytes:
    # Two and a half million characters, which every worker of an experiment reads.
    numbers = np.frombuffer(text.replace("\r\n", "\n").encode("utf-32-le"), "<u4")
    return _CODES[np.minimum(numbers, 127)].tobytes()


def _tensor(codes: bytes) -> Tensor:
    return torch.frombuffer(bytearray(codes), dtype=torch.uint8)


def _source(name: str) -> str:
    """Return a module's source without import, also from a zipped library."""
    found = importlib.util.find_spec(name)
    read = getattr(found.loader, "get_source", None) if found is not None else None
    source = read(name) if read is not None else None
    if not isinstance(source, str):
        raise PlimsollError(
            f"lab: expected the sources of Python's standard library; got none of {name!r}, as in an interpreter that "
            "has compiled files only. Use a Python with its sources."
        )
    return source

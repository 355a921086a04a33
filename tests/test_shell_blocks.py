"""Shell commands of README and docs, checked as a user would paste them."""

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from plimsoll.cli import app, old_spellings
from plimsoll.extras import EXTRAS
from tests.support.cases import each

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SHELLS = {"bash", "sh", "shell", "console"}
_SCRIPTS = {"train.py"}  # the reader's own; other scripts are files of the repository
_PUNCTUATION = {";", ";;", "&", "&&", "|", "||", ">", ">>", "<"}


def shell_blocks(text: str) -> list[str]:
    """The blocks of a page that a user would paste into a shell."""
    return [match[2] for match in _BLOCK.finditer(text) if match[1] in _SHELLS]


def commands(text: str) -> list[list[str]]:
    """The words of every command: lines of shell blocks, and `run:` lines of CI."""
    lines = [line for block in shell_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^ *- run: (.*)$", text, re.MULTILINE)
    return [words for line in lines for words in split(line)]


def mentions(text: str) -> list[list[str]]:
    """The words of every command inside a sentence, where arguments may be left out."""
    spans = re.findall(r"`((?:plimsoll|pip install) [^`]+)`", _BLOCK.sub("", text))
    return [words for span in spans for words in split(" ".join(span.split()))]


def split(line: str) -> list[list[str]]:
    """The simple commands of a line, without what is redirected and without variables set for one command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = list(lexer)
    while words:
        word = words.pop(0)
        if word in (">", ">>", "<"):
            words.pop(0)
        elif word in _PUNCTUATION:
            found.append([])
        elif found[-1] or (not re.match(r"[A-Z_]+=", word) and word not in ("do", "while")):
            found[-1].append(word)
    return [each for each in found if each]


def problem(words: list[str]) -> str | None:
    """Why a command would fail as pasted, as far as its text shows."""
    if "plimsoll" in words and words[:2] != ["pip", "install"]:
        return _cli_problem(words[words.index("plimsoll") + 1 :])
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return next((f"no target {each}" for each in words[1:] if "=" not in each and each not in targets), None)
    if words[:2] == ["pip", "install"]:
        return next((f"pip would not find {each}" for each in words[2:] if each != "-e" and not _installs(each)), None)
    scripts = [word for word in words if word.endswith(".py")]
    return next((f"no script {each}" for each in scripts if each not in _SCRIPTS and not (ROOT / each).is_file()), None)


def _installs(requirement: str) -> bool:
    if (checkout := re.fullmatch(r"(?:\.|\./plimsoll)(?:\[([a-z,]+)\])?", requirement)) is not None:
        return set((checkout[1] or "report").split(",")) <= {*EXTRAS, "all", "dev", "bench"}
    if requirement == "./lab":
        return True
    return any(requirement in held for held in EXTRAS.values()) or requirement == "adlfs"


def _cli_problem(arguments: list[str]) -> str | None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("plimsoll", [], resilient_parsing=True)
    name, *rest = arguments
    found = command.get_command(context, name)
    if found is None:
        return None if name in ("--help", "--version", "help", "--install-completion") else f"no command {name}"
    if old_spellings.rewritten(name, rest, found.params, name != "run") != rest:
        return "a former spelling"
    try:
        found.make_context(name, rest, parent=context)
    except Exception as error:  # noqa: BLE001  (typer carries its own copy of click's errors in some versions)
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return None


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_pasted(page: Path) -> None:
    text = page.read_text("utf-8")
    assert {" ".join(words): why for words in commands(text) if (why := problem(words))} == {}
    mentioned = {" ".join(words): why for words in mentions(text) if (why := problem(words))}
    assert {words: why for words, why in mentioned.items() if not why.startswith("MissingParameter")} == {}
    for block in (match[2] for match in _BLOCK.finditer(text)):
        assert not re.search(r"^ *[$%#>] ?(plimsoll|pip|make|python|torchrun)\b", block, re.MULTILINE), block


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_checkout_is_installed_where_the_text_says_so(page: Path) -> None:
    text = page.read_text("utf-8")
    for match in _BLOCK.finditer(text):
        if re.search(r"pip install .*'\.\[", match[2]):
            assert "checkout" in text[: match.start()].rstrip().rpartition("\n\n")[2], match[0]


@each(
    "line",
    [
        "plimsoll report runs/first --out x.html",
        "plimsoll check runs/first --format yaml",
        "plimsoll check runs/first --format json",
        "plimsoll run --out runs/first train.py",
        "plimsoll diff runs/first",
        "plimsoll judge runs/first",
        "PLIMSOLL_BACKEND=torch python -m plimsoll whatif --every",
        "pip install 'plimsoll[serve]'",
        "pip install plimsoll",
        "pip install '.[server]'",
        "make demonstration",
        "python benchmarks/nothing.py",
        "pip install -e './lab[report]'",
        "pip install -e ./laboratory",
    ],
)
def test_what_would_fail_is_found(line: str) -> None:
    assert [why for words in split(line) if (why := problem(words))]


def test_messages_of_the_source_name_packages_that_pip_finds() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "extras.py":
            assert not re.search(r"pip install[\s\"']*plimsoll", path.read_text("utf-8")), path

"""Every command and every option stands in the documentation."""

from pathlib import Path

import typer.main

from plimsoll.cli import app
from tests.support.cases import each

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
GROUP = typer.main.get_command(app)
SECTIONS = PAGE.read_text("utf-8").split("\n## ")
SHARED = next(text for text in SECTIONS if text.startswith("Options of every command"))


def documented(section: str, option: str) -> bool:
    return f"\n`{option}`\n:" in section


@each("name", sorted(GROUP.commands))
def test_every_command_has_its_section_with_every_option(name: str) -> None:
    section = next((text for text in SECTIONS if text.startswith(f"`plimsoll {name}")), None)
    assert section is not None, f"docs/reference/command-line.md has no section for {name}"
    command = GROUP.commands[name]
    usage = " ".join(command.collect_usage_pieces(command.make_context(name, [], resilient_parsing=True))[1:])
    assert section.splitlines()[0] == f"`plimsoll {name} {usage}".rstrip() + "`"
    options = [
        option for parameter in command.params if parameter.param_type_name == "option" for option in parameter.opts
    ]
    assert [option for option in options if not documented(section, option) and not documented(SHARED, option)] == []


def test_the_options_of_the_command_itself_are_documented() -> None:
    options = [option for parameter in GROUP.params for option in parameter.opts]
    assert {"--version", "-V", "--quiet", "--install-completion"} <= set(options)
    assert [option for option in options if not documented(SHARED, option)] == []

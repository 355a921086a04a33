"""Every command and every option stands in the documentation."""

from pathlib import Path

import typer.main

from plimsoll.cli import app
from tests.support.cases import each

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
GROUP = typer.main.get_command(app)


@each("name", sorted(GROUP.commands))
def test_every_command_has_its_section_with_every_option(name: str) -> None:
    sections = PAGE.read_text("utf-8").split("\n## ")
    section = next((text for text in sections if text.startswith(f"`plimsoll {name}")), None)
    assert section is not None, f"docs/reference/command-line.md has no section for {name}"
    for parameter in GROUP.commands[name].params:
        if parameter.param_type_name == "argument":
            assert f"[{parameter.metavar}]" in section.splitlines()[0]
        else:
            assert all(f"\n`{option}`\n:" in section for option in parameter.opts if option != "--help")


def test_the_options_of_the_command_itself_are_documented() -> None:
    options = [option for parameter in GROUP.params for option in parameter.opts]
    assert "--version" in options
    assert all(f"\n`{option}`\n:" in PAGE.read_text("utf-8") for option in options if option != "--help")

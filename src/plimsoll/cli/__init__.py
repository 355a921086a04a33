"""The command ``plimsoll``: one module a subcommand. What a subcommand does not need it does not import."""

from plimsoll.cli.entry_point import app as app, main as main

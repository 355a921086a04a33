"""The command ``plimsoll``: each subcommand is a module with its own imports."""

from plimsoll.cli.entry_point import app as app, main as main

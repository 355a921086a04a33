"""The command ``plimsoll``: a module a subcommand, which imports what it needs."""

from plimsoll.cli.entry_point import app as app, main as main

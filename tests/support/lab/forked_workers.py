"""Workers of the laboratory that are forked from a Python that has imported torch, so that each starts in 0.1 s."""

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.patience import HANG_SECONDS
from tests.support.processes import Process

# The program reads its tasks from a socket and answers there, as otherwise from its pipes.
_CONNECTED = """
import socket, sys
joined = socket.socket(socket.AF_UNIX)
joined.connect({place!r})
sys.stdin, sys.stdout = joined.makefile("r"), joined.makefile("w")
"""


class Forked:
    """The part of `subprocess.Popen` that starts, reads and ends a worker."""

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        _, option, program = command
        assert option == "-c"
        with tempfile.TemporaryDirectory(prefix="w") as folder, socket.socket(socket.AF_UNIX) as waiting:
            place = str(Path(folder) / "s")
            waiting.bind(place)
            waiting.listen()
            waiting.settimeout(HANG_SECONDS)
            self._process = Process(["-c", _CONNECTED.format(place=place) + program], None, None)
            self._joined, _ = waiting.accept()
        self._joined.settimeout(None)
        self.stdin, self.stdout = self._joined.makefile("w"), self._joined.makefile("r")

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()

    def communicate(self) -> None:
        """Closes what it was reached by."""
        with contextlib.suppress(BrokenPipeError):  # of a task that it died before
            self.stdin.close()
        self.stdout.close()
        self._joined.close()


# In the place of the module `subprocess`.
SUBPROCESS = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)

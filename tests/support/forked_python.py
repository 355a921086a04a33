"""A `python` that is forked: it asks the process that forks for one, and passes signals on and the exit code back.

Its arguments are the socket of that process, a Python to run where it cannot be asked, and those of `python`.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path


def main(server: str, python: str, arguments: list[str]) -> None:
    """Carries out the arguments, which are as those of `python`."""
    rest = list(arguments)
    while rest and rest[0].startswith(("-W", "-u")):
        del rest[: 2 if rest[0] == "-W" else 1]
    if not rest or (rest[0][0] == "-" and rest[0] not in {"-c", "-m"}):
        os.execv(python, [python, *arguments])
    opened = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  (numbers, of which one is gone)
    request = {
        "arguments": arguments,
        "cwd": str(Path.cwd()),
        "env": dict(os.environ),
        "places": [place for place in opened if Path(f"/proc/self/fd/{place}").exists() and os.get_inheritable(place)],
        "forks": server,
    }
    long = os.memfd_create("request")
    os.write(long, json.dumps(request).encode())
    passed_on = (signal.SIGINT, signal.SIGTERM)
    with socket.socket(socket.AF_UNIX) as asked:
        signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # they wait until there is somebody to pass them on to
        asked.connect(server)
        socket.send_fds(asked, [b"+"], [long, *request["places"]])
        answers = asked.makefile("r")
        pid = int(answers.readline())

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is on the way
                os.kill(pid, number)

        for number in passed_on:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        code = int(answers.readline().split()[0])
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])

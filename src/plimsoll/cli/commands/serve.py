"""``plimsoll serve``: the live page of a folder of runs."""

import sys
from typing import Annotated

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import Json, Quiet


def serve(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder that runs are in or below, or a URI: s3://bucket/runs.")
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen at. Beyond loopback a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen at. 0: any free one.")] = 8642,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TEXT",
            envvar="PLIMSOLL_TOKEN",
            help="Access token; generated when not given and --host is not loopback.",
        ),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    allowed: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME[:PORT]", help="Another name by which browsers reach the page."),
    ] = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Serve a web page that follows runs live.

    The page has verdicts, findings, figures and what-if, and is updated as runs are written. Stop it with Ctrl-C.
    """
    from plimsoll.report.live.server.launch import serve as start

    def write_address(address: str) -> None:
        if as_json:
            messages.write_json({"address": address})
        sys.stdout.flush()

    on_ready = write_address if as_json or messages.is_quiet() else None
    start(folder, host, port, token=token, open_browser=opened, allow_hosts=allowed or (), on_ready=on_ready)

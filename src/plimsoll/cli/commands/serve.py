"""``plimsoll serve``: the live page of a folder of runs."""

from typing import Annotated

import typer


def serve(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder that runs are in, or below; or a URI: s3://bucket/runs.")
    ],
    host: Annotated[
        str, typer.Option("--host", help="The address to listen at; any but a loopback one asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port; 0 takes a free one.")] = 8642,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="PLIMSOLL_TOKEN", help="What a browser must bring; made where it is needed."),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    allowed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME[:PORT]", help="Another name that the page goes by. May be repeated."
        ),
    ] = None,
) -> None:
    """A web page that follows runs as they are written: verdicts, figures, what-if. Ends at Ctrl-C."""
    from plimsoll.report.live.server.launch import serve as served

    served(folder, host, port, token=token, open_browser=opened, allow_hosts=allowed or ())

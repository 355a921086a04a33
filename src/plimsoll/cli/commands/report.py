"""``plimsoll report``: a run as one HTML file, or as Markdown or JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import Quiet, RunArgument, Until, form_of
from plimsoll.cli.paths import OpenRun, by_model, file_for_model, local_file, open_runs, view_of
from plimsoll.errors import ArgumentError

if TYPE_CHECKING:
    from plimsoll.diagnosis import View

_Views = Sequence[tuple[OpenRun, "View"]]

_BY_ENDING = {".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown", ".json": "json"}


def report(
    run: RunArgument,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write; - is standard output. Default: report.html."
        ),
    ] = None,
    output_format: Annotated[
        Literal["html", "markdown", "json"] | None,
        typer.Option(
            "--output-format",
            metavar="FORM",
            help="html, markdown or json. Default: from the file extension, else html.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text. The file of --output is written too.")
    ] = False,
    title: Annotated[
        str | None, typer.Option("--title", metavar="TEXT", help="Title of the page. Default: the folder's name.")
    ] = None,
    until: Until = None,
    _quiet: Quiet = False,
) -> None:
    """Write a run as one HTML, Markdown or JSON file.

    The page has the verdict, the findings with their figures, and the facts of the run. It needs no network. Markdown
    and JSON go to standard output unless a file is named. Exit code 0: written. 2: the run cannot be read.
    """
    named = local_file("report", "-o", output, "report.html")
    file = None if str(named) == "-" else named
    # A file has the form of its ending, also where --json prints the run as well.
    form = form_of("report", as_json, output_format, "html") if file is None else output_format or _form_of(file)
    if title is not None and form != "html":
        raise ArgumentError(f"report: expected --title for html only; got {form} with title {title!r}. Leave it out.")
    if form == "html":
        if named is not None and file is None:
            raise ArgumentError(
                "report: expected a file for a page of HTML; got standard output. Name one with -o FILE."
            )
        from plimsoll.report.single_file.html_report import checked_path

        file = file or Path("report.html")
        checked_path(file)  # before the work
    views = [(opened, view_of(opened, until)) for opened in open_runs(run)]
    if file is not None:
        for line in _written(views, file, form, title):
            if not as_json:
                messages.write_line(line)
    elif form == "markdown":
        messages.write(_markdown(views))
    if as_json or (file is None and form == "json"):
        messages.write_json(_data(views))


def _form_of(file: Path | None) -> str:
    ending = file.suffix.lower() if file else ""
    if ending and ending not in _BY_ENDING:
        raise ArgumentError(
            f"report: expected a file that ends in {', '.join(_BY_ENDING)}; got {file}. "
            "Choose one of these, or name the form with --output-format. A browser prints the page as a PDF."
        )
    return _BY_ENDING.get(ending, "html")


def _written(views: _Views, file: Path, form: str, title: str | None) -> Iterator[str]:
    """Write the file, or the page of each model; yield lines that report it."""
    if form != "html":
        from plimsoll.runs.storage import atomic_files

        text = _markdown(views) if form == "markdown" else messages.json_text(_data(views))
        atomic_files.write_text("report", file, text)
        yield str(file)
        return
    from plimsoll.report import html
    from plimsoll.report.verdicts.run_summary import summary

    for opened, view in views:
        facts = summary(view)
        written = html(view, file_for_model(file, opened, len(views)), title=title, findings=facts.findings)
        yield f"{opened.model}: {facts.verdict}" if opened.model else facts.verdict
        yield f"{written}: {written.stat().st_size / 1e6:.1f} MB, needs no network."


def _markdown(views: _Views) -> str:
    from plimsoll.report import markdown

    return "\n".join(markdown(view) for _, view in views)


def _data(views: _Views) -> dict[str, object]:
    from plimsoll.report import summary

    return by_model([(opened, summary(view).to_dict()) for opened, view in views])

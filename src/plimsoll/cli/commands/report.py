"""``plimsoll report``: a run as one HTML file, or as Markdown or JSON."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import Json, Quiet, RunArgument, Until
from plimsoll.cli.paths import file_for_model, local_file, open_runs, view_of, write_text
from plimsoll.errors import ArgumentError

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
    as_json: Json = False,
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
    file = local_file("report", "-o", output, "report.html")
    form = "json" if as_json else output_format or _form_of(file)
    if title is not None and form != "html":
        raise ArgumentError(f"report: expected --title for html only; got {form} with title {title!r}. Leave it out.")
    if form == "html":
        _write_html(run, file or Path("report.html"), title, until)
        return
    if file is not None and str(file) != "-":
        text = _markdown(run, until) if form == "markdown" else messages.json_text(_data(run, until))
        write_text("report", file, text)
    elif form == "markdown":
        messages.write(_markdown(run, until))
    else:
        messages.write_json(_data(run, until))


def _form_of(file: Path | None) -> str:
    """Return the form that the file's ending stands for."""
    ending = file.suffix.lower() if file else ""
    if ending and ending not in _BY_ENDING:
        raise ArgumentError(
            f"report: expected a file that ends in {', '.join(_BY_ENDING)}; got {file}. "
            "Choose one of these, or name the form with --output-format. A browser prints the page as a PDF."
        )
    return _BY_ENDING.get(ending, "html")


def _write_html(run: str, file: Path, title: str | None, until: int | None) -> None:
    if str(file) == "-":
        raise ArgumentError("report: expected a file for a page of HTML; got standard output. Name one with -o FILE.")
    from plimsoll.report import html
    from plimsoll.report.single_file.html_report import checked_path
    from plimsoll.report.verdicts.run_summary import summary

    checked_path(file)  # before the work
    views = [(opened, view_of(opened, until)) for opened in open_runs(run)]
    for opened, view in views:
        facts = summary(view)
        written = html(view, file_for_model(file, opened, len(views)), title=title, findings=facts.findings)
        messages.write_line(f"{opened.model}: {facts.verdict}" if opened.model else facts.verdict)
        messages.write_line(f"{written}: {written.stat().st_size / 1e6:.1f} MB, needs no network.")


def _markdown(run: str, until: int | None) -> str:
    from plimsoll.report import markdown

    return "\n".join(markdown(view_of(opened, until)) for opened in open_runs(run))


def _data(run: str, until: int | None) -> dict[str, object]:
    from plimsoll.report import summary

    views = [(opened, view_of(opened, until)) for opened in open_runs(run)]
    data = [(opened.model, summary(view).to_dict()) for opened, view in views]
    return data[0][1] if len(data) == 1 else {"runs": [{"model": model, **facts} for model, facts in data]}

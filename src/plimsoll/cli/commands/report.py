"""``plimsoll report``: a run as one HTML file, or as Markdown or JSON for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from plimsoll.cli.paths import RunPlace, file_here, of_model, opened, view_at
from plimsoll.cli.terminal import as_json, say, say_line
from plimsoll.errors import ArgumentError, RunError

_BY_ENDING = {".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown", ".json": "json"}


def report(
    run: RunPlace,
    destination: Annotated[
        str | None, typer.Option("--output", "-o", help="The file to write; - is standard output.")
    ] = None,
    form: Annotated[
        Literal["html", "markdown", "json"] | None,
        typer.Option("--format", help="Default: by the ending of the file's name, else html."),
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", help="The page's title; the folder's name as it comes.")
    ] = None,
    until: Annotated[int | None, typer.Option("--until", help="Tell of the run as it was at this step.")] = None,
) -> None:
    """What is wrong in a run and what to do, with its figures, in one file that needs no network."""
    output = file_here("report", "-o", destination, "report.html")
    chosen = form or _form_of(output)
    if title is not None and chosen != "html":
        raise ArgumentError(f"report: expected no --title with --format {chosen}, which has none; got {title!r}.")
    if chosen == "html":
        _html(run, output or Path("report.html"), title, until)
        return
    text = _text(run, chosen, until)
    if output is None or str(output) == "-":
        say(text)
    else:
        _write(output, text)


def _form_of(output: Path | None) -> str:
    """Return the form that the file's ending stands for."""
    ending = output.suffix.lower() if output else ""
    if ending and ending not in _BY_ENDING:
        raise ArgumentError(
            f"report: expected a file that ends in {', '.join(_BY_ENDING)}; got {output}. "
            "Write one of these, or name the form with --format. A browser prints the page as a PDF."
        )
    return _BY_ENDING.get(ending, "html")


def _html(run: str, output: Path, title: str | None, until: int | None) -> None:
    if str(output) == "-":
        raise ArgumentError("report: expected a file for a page of HTML; got standard output. Name one with -o FILE.")
    from plimsoll.report import html
    from plimsoll.report.single_file.html_report import checked_path
    from plimsoll.report.verdicts.run_summary import summary

    checked_path(output)  # before the work
    found = [(one, view_at(one, until)) for one in opened(run)]
    for one, view in found:
        told = summary(view)
        file = of_model(output, one, len(found))
        written = html(view, file, title=title, findings=told.findings)
        say_line(f"{one.model}: {told.verdict}" if one.model else told.verdict)
        say_line(f"{written}: {written.stat().st_size / 1e6:.1f} MB, needs no network.")


def _text(run: str, form: str, until: int | None) -> str:
    from plimsoll.report import markdown, summary

    found = [(one, view_at(one, until)) for one in opened(run)]
    if form == "markdown":
        return "\n".join(markdown(view) for _, view in found)
    data = [{"model": one.model, **summary(view).to_dict()} for one, view in found]
    return as_json({"runs": data} if len(data) > 1 else summary(found[0][1]).to_dict())


def _write(output: Path, text: str) -> None:
    from plimsoll.runs.storage.atomic_files import replacing

    if output.is_dir():
        raise ArgumentError(f"report: expected the path of a file; got {output}, a folder. Name a file in it.")
    try:
        with replacing(output) as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(
            f"report: expected a file that can be written; got {output} ({error}). Choose another."
        ) from error
    say_line(str(output))

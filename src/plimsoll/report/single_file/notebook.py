"""Notebook output of a run: the verdict and the findings as HTML, with figures."""

import html
import json
import textwrap
from typing import Any

from plimsoll.diagnosis import View
from plimsoll.errors import MissingExtraError, PlimsollError
from plimsoll.report.drawing.plotly_parts import GREEN, SEVERITY
from plimsoll.report.figures.whole_run import loss_and_scale
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary, summary
from plimsoll.runs import Run
from plimsoll.text import number

PLOTLY = "application/vnd.plotly.v1+json"
_MOST = 12  # findings
_LINE, _LINE_PIXELS = 76, 22  # of the title: characters, and their height


# A notebook shows the richest form that it knows. Those that know Plotly's media type (JupyterLab, VS Code) show the
# figure of loss and scale, with the verdict as its title and a lane for each finding; others the HTML, which loads
# nothing. Names come from whoever wrote the run, and are escaped.
def shown(run: Run) -> dict[str, Any]:
    """The run by media type; a run that cannot be judged says why."""
    try:
        view = View(run)
        judged = summary(view)
        return {"text/html": _page(judged), **_figure(view, judged)}
    except PlimsollError as error:
        return {"text/html": f"<p>{_text(str(error))}</p>"}


def _figure(view: View, judged: Summary) -> dict[str, Any]:
    try:
        figure: Any = loss_and_scale(view, judged.findings)
    except MissingExtraError:  # the HTML says as much without it
        return {}
    title = textwrap.wrap(judged.verdict, _LINE, max_lines=3, placeholder=" …")
    figure.update_layout(
        title_text="<br>".join(_text(line) for line in title),
        margin_t=80 + _LINE_PIXELS * len(title),
        height=figure.layout.height + _LINE_PIXELS * len(title),
    )
    return {PLOTLY: json.loads(str(figure.to_json()))}


def _page(judged: Summary) -> str:
    colour = SEVERITY.get(judged.state, GREEN)
    facts = f"run <code>{_text(judged.name)}</code>"
    if judged.last_step >= 0:
        facts += f", steps {judged.first_step:,} to {judged.last_step:,}"
    if judged.loss is not None:
        facts += f", loss {number(judged.loss)} at step {judged.last_step:,}"
    parts = [
        f'<div style="border-left:4px solid {colour};padding:2px 12px">',
        f"<p><strong>{_text(judged.verdict)}</strong><br>{_text(summary_text.STATES[judged.state])}: {facts}</p>",
    ]
    if judged.findings:
        rows = "".join(
            f"<tr><td>{_text(f.severity)}</td><td>{_text(summary_text.heading(f))}</td>"
            f"<td>{_text(summary_text.when(f))}</td><td>{_text(summary_text.where(f))}</td></tr>"
            for f in judged.findings[:_MOST]
        )
        parts.append(f"<table><tr><th></th><th>finding</th><th>when</th><th>where</th></tr>{rows}</table>")
    if len(judged.findings) > _MOST:
        parts.append(f"<p>And {len(judged.findings) - _MOST} more: <code>plimsoll.diagnose</code> lists them.</p>")
    return "".join([*parts, "</div>"])


def _text(text: str) -> str:
    return html.escape(summary_text.cut(text, 300))

"""`markdown`: a run's verdict and findings for a comment, in GitHub's Markdown."""

import re
from collections.abc import Sequence

from plimsoll.diagnosis import Finding
from plimsoll.diagnosis.view import Source
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary, summary

LONGEST_BYTES = 60_000  # GitHub takes comments of 65,536 characters
_SIGNS = {"alarm": "⛔", "warning": "⚠️", "healthy": "✅", "empty": "◌", "info": "·"}
# Names come from whoever wrote the run. They stand in code spans, where nothing is markup; within sentences, where a
# verdict has them, every sign that Markdown knows is escaped, and addresses and mentions are broken up.
_MARKUP = re.compile(r"([\\`*_\[\]<>&|~#$])")
_LEADS_AWAY = re.compile(r"(@|://|\bwww(?=\.))", re.IGNORECASE)
_ZERO_WIDTH = "\u200b"


def markdown(run: Source, *, findings: Sequence[Finding] | None = None, until: int | None = None) -> str:
    """Return verdict, table of findings, and folded details, in at most 60 KB.

    - `findings`: those of `diagnose`, unless others are given. `until`: the last step that counts.

    Raises `RunError` for a folder that holds no run.
    """
    return of_summary(summary(run, findings, until=until))


def of_summary(judged: Summary) -> str:
    """The same of a summary; as many findings as there is room for."""
    for most in (50, 25, 12, 6, 3):
        text = _page(judged, most)
        if len(text.encode("utf-8")) <= LONGEST_BYTES:
            return text
    return _page(judged, 0)


def code(text: str, *, in_table: bool = False) -> str:
    r"""Text as a code span, whatever is in it.

    >>> print(code("a`b"), code("a|b", in_table=True))
    ``a`b`` `a\|b`
    """
    clean = summary_text.cut(text, 120) or " "
    clean = clean.encode("utf-8", "replace").decode("utf-8")
    fence = "`" * (max((len(run) for run in re.findall("`+", clean)), default=0) + 1)
    pad = " " if clean.startswith("`") or clean.endswith("`") else ""
    inside = clean.replace("|", "\\|") if in_table else clean
    return f"{fence}{pad}{inside}{pad}{fence}"


def escaped(text: str) -> str:
    r"""Text in which nothing is Markdown's, an address or a mention.

    >>> print(escaped("a_b <i> [x](y)"))
    a\_b \<i\> \[x\](y)
    """
    clean = summary_text.cut(text, 1000).encode("utf-8", "replace").decode("utf-8")
    return _LEADS_AWAY.sub(rf"\1{_ZERO_WIDTH}", _MARKUP.sub(r"\\\1", clean))


def _page(judged: Summary, most: int) -> str:
    counts = summary_text.counted(judged)
    lines = [f"### {_SIGNS[judged.state]} {escaped(judged.verdict)}", "", f"**{summary_text.STATES[judged.state]}**"]
    lines[-1] += f" ({counts})" if counts else ""
    lines[-1] += f" · run {code(judged.name)}"
    lines[-1] += f" · steps {judged.first_step:,} to {judged.last_step:,}" if judged.last_step >= 0 else ""
    shown = judged.findings[:most]
    if shown:
        lines += ["", "| | rule | when | where |", "|---|---|---|---|", *(_row(f) for f in shown)]
    left = len(judged.findings) - len(shown)
    if left:
        lines += ["", f"And {left} more: `plimsoll check` lists them."]
    if shown:
        lines += ["", "<details><summary>What they mean and what to do</summary>", ""]
        lines += [line for finding in shown for line in _details(finding)]
        lines += ["</details>"]
    lines += ["", "<details><summary>The run</summary>", "", *_facts(judged), "", "</details>", ""]
    return "\n".join(lines)


def _row(finding: Finding) -> str:
    where = code(summary_text.where(finding), in_table=True) if finding.where else "the run"
    sign = f"{_SIGNS[finding.severity]} {finding.severity}"
    return f"| {sign} | {code(summary_text.heading(finding), in_table=True)} | {summary_text.when(finding)} | {where} |"


def _details(finding: Finding) -> list[str]:
    numbers = ", ".join(
        f"{escaped(label.lower())}: {_value(value)}" for label, value in summary_text.evidence(finding)[:12]
    )
    lines = [f"**{code(summary_text.heading(finding))}**, {summary_text.when(finding)}", ""]
    lines += [escaped(f"{summary_text.explanation(finding)} {finding.meaning}".strip()), ""]
    lines += [f"*Evidence:* {numbers}", ""] if numbers else []
    advice = summary_text.advice(finding)
    return [*lines, f"*What to do:* {escaped(advice)}", ""] if advice else lines


def _value(value: str) -> str:
    """A number as it is, a name as code."""
    return value if re.fullmatch(r"[-+\d.,^ %einfa]+|over 99 %|under 0.01 %", value) else code(value)


def _facts(judged: Summary) -> list[str]:
    rows = [*summary_text.facts(judged), *((f"Problem {i}", p) for i, p in enumerate(judged.problems[:10], 1))]
    return ["| | |", "|---|---|", *(f"| {escaped(label)} | {escaped(value)} |" for label, value in rows)]

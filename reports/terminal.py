"""The answer of a run, for a terminal, as Markdown and as JSON.

    device, suite, badges    needed to read any number
    findings                 what each format shows, and the fastest kernels (findings.py)
    grids                    formats by levels or tokens (grids.py)
    rivals                   of a kernel from outside the package (rivals.py)
    parts                    of calls whose mask changes (parts.py)
    not measured             every reason, with its kernels
    trust                    noise floor, reliability, marks, state of the machine

A grid fits the window, and names the columns that a narrow one leaves out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.text import Text

from sparsebench.reports import grids
from sparsebench.reports.findings import findings, first_views, headlines
from sparsebench.reports.parts import parts
from sparsebench.reports.rivals import rivals
from sparsebench.reports.tables import Table, escape_markdown
from sparsebench.results.badges import Badge, badges, unfit
from sparsebench.results.formatting import (
    amount,
    are,
    kernel,
    percent,
)
from sparsebench.results.record import Status
from sparsebench.results.run.provenance import device_title
from sparsebench.results.run.store import StoredRun
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables import grid
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import empty_launch
from sparsebench.results.tables.families import OF_ACTIVATIONS, QUANTISED
from sparsebench.results.tables.noise import Reliability

VERDICT = 8  # recommended processes for a verdict; FEWEST is the minimum
REASONS, CALLS = 12, 24  # shown at most
GOOD, BAD = (Badge.VERDICT, Badge.LOOK), "bold red"


@dataclass(frozen=True)
class RunAnswer:
    """The answer that `sparsebench run` prints, for a rich console."""

    analysis: Analysis

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        cases = self.analysis.cases
        yield _title(self.analysis)
        for line in findings(self.analysis):
            yield indented(line, style="" if line.startswith(" ") else "bold")
        for table in tables(self.analysis):
            yield Text()
            yield table
        if not (cases.status == Status.OK).any():
            yield Text("Nothing was measured.", style=BAD)
        yield Text()
        for line in [*missing(cases), *trust(self.analysis)]:
            yield Text(line)


def indented(line: str, style: str = "") -> RenderableType:
    """Return a line that keeps its indentation where it wraps."""
    text = line.lstrip()
    return Padding.indent(Text(text, style), len(line) - len(text))


def tables(analysis: Analysis) -> list[Table]:
    """Return the first grid of each op, pattern and dtype, kernels from outside, and parts."""
    views = [grids.table_of(view) for view in first_views(analysis) if view.grid.rows]
    of_calls = [table.shortened(CALLS, "more in the report") for table in parts(analysis)]
    return [*views, *rivals(analysis), *of_calls]


def answer_markdown(analysis: Analysis) -> str:
    """Return the answer as Markdown."""
    cases = analysis.cases
    badge_texts = [label.text for label in badges(analysis)]
    heading = f"**{escape_markdown(_heading(analysis.run))}** ({'; '.join(badge_texts)})"
    parts = [heading, "\n".join(map(escape_markdown, findings(analysis)))]
    parts += [table.markdown() for table in tables(analysis)]
    notes = map(escape_markdown, [*missing(cases), *trust(analysis)])
    return "\n\n".join([*parts, *notes]) + "\n"


def answer_json(analysis: Analysis) -> dict[str, Any]:
    """Return the answer for a script: findings by view, and the headlines."""
    word, why = analysis.noise.reliability
    views = [
        {"choice": view.choice, "findings": [each.to_json() for each in grid.findings(view.grid)]}
        for view in first_views(analysis)
    ]
    return {
        "answer": views,
        "headlines": [finding.to_json() for finding in headlines(analysis)],
        "badges": [label.text for label in badges(analysis)],
        "noise_floor": analysis.noise.floors,
        "reliability": word,
        "reliability_why": why,
    }


def count_statuses(analysis: Analysis) -> dict[str, int]:
    """Count the cases of the suite by status; `ok` means ok in all processes and measures."""
    each_once = _once(analysis.cases)
    return {str(status): int(count) for status, count in each_once.status.value_counts().items()}


def trust(analysis: Analysis) -> list[str]:
    """Return sentences about the reliability of the numbers."""
    run, noise, cases = analysis.run, analysis.noise, analysis.cases
    busy = "; ".join(unfit(run.state))
    lines = [f"Do not trust these numbers, because the machine was busy: {busy}."] if busy else []
    lines.append(noise.sentence)
    if noise.reliability[0] is not Reliability.UNKNOWN:
        lines.append(noise.reliability[1])
    if (cases.processes < FEWEST).all():
        few = f"Fewer than {FEWEST} processes give a look. For a verdict"
        lines.append(f"{few}, use --replicates {VERDICT}.")
    above = len(_beyond(analysis.timed))
    if above:
        why = "more than zeros can save. There the baseline is slow or was disturbed by other work"
        lines.append(f"{are(above, 'speedup')} above 1 / (1 - sparsity), {why}.")
    once = analysis.timed.drop_duplicates("case_id")
    for name, why in (("mark", "{} during timing"), ("marks", "{} of the output")):
        marks = once[name][once[name].fillna("") != ""].value_counts()
        lines += [f"{are(n, 'case')} marked: {why.format(mark)}." for mark, n in marks.items()]
    if (cases.late > 0).any():
        lines.append(f"The host was late for up to {percent(cases.late.max())} of their samples.")
    return [*lines, *empty_launch(run.environment, cases)]


def _once(cases: pd.DataFrame) -> pd.DataFrame:
    """Return each case once with its worst status; a twin only if it failed alone."""
    twin, failed = cases.twin.astype(bool), ~cases.status.isin([Status.OK, Status.UNSUPPORTED])
    same = ["problem_id", "format", "kernel", "params", "options"]
    both = (~twin & failed).groupby([cases[name] for name in same]).transform("any")
    cases_of_suite = cases[~twin | (failed & ~both)]
    worst_first = cases_of_suite.sort_values("status", key=lambda status: status == Status.OK)
    return worst_first.drop_duplicates("case_id")


def _heading(run: StoredRun) -> str:
    words = [device_title(run.environment), str(run.state.get("suite", run.path.name))]
    return " · ".join([*words, str(run.suite.get("title", ""))]).rstrip(" ·")


def _title(analysis: Analysis) -> Text:
    line = Text(_heading(analysis.run))
    for label in badges(analysis):
        style = "" if label.badge in GOOD else BAD
        line.append("  ").append(f"[{label.text}]", style=style)
    return line


def _beyond(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the cases faster than dense by more than 1 / (1 - sparsity): dense was slow.

    Dense multiplies the same zeros here, because unpruned weights take longer.
    """
    dense = timed["format"].isin({"dense", *OF_ACTIVATIONS, *QUANTISED})
    sparse = timed[~dense & (timed.level > 0) & (timed.level < 1)]
    return sparse if sparse.empty else sparse[sparse.zeros_low > 1 / (1 - sparse.level)]


def missing(cases: pd.DataFrame, most: int = REASONS) -> list[str]:
    """Return why cases have no time, at most so many lines: failures first, then unsupported ones.

    Another line counts the reasons that are left out.
    """
    each_once = _once(cases)
    bad = each_once[each_once.status != Status.OK]
    groups = sorted(
        bad.groupby(["status", "detail"], sort=False),
        key=lambda entry: (entry[0][0] == Status.UNSUPPORTED, -len(entry[1]), entry[0]),
    )
    lines = []
    for (status, why), group in groups[:most]:
        kernels = ", ".join(dict.fromkeys(map(kernel, group.label)))
        word = str(status).replace("_", " ")
        lines.append(f"{amount(len(group), 'case')} {word}: {why}: {kernels}")
    left = len(groups) - most
    return lines + ([f"{amount(left, 'more reason')} in the report."] if left > 0 else [])

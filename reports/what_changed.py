"""What changed: each headline beside those of the runs that a newer one replaced.

    results/published/GPU/earlier/DAY-COMMIT/RUN ─> was   ┐ one line per question and earlier run
    results/published/GPU/RUN                    ─> is    ┘

Both speedups have today's statistics. Their ratio has an interval, which decides whether a speedup
became larger or smaller (`results.changes.difference`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sparsebench.reports.headline import (
    QUESTIONS,
    PublishedRun,
    Question,
    headline_case,
    read_run,
    speedup_text,
)
from sparsebench.reports.tables import markdown_table
from sparsebench.results.comparison.compare import difference
from sparsebench.results.formatting import between, duration
from sparsebench.results.run.provenance import commit_of
from sparsebench.results.statistics.outcome import Outcome, outcome
from sparsebench.results.tables.cases import CONTEST
from sparsebench.results.tables.contests import is_short

COLUMNS = ["question", "was", "is", "our kernel", "baseline", "is / was", "change"]
WORDS = {
    Outcome.FASTER: "larger",
    Outcome.SLOWER: "smaller",
    Outcome.EQUAL: "equal within 1 %",
    Outcome.NOT_SETTLED: "none beyond the interval",
}


def what_changed(
    runs: Mapping[str, PublishedRun], questions: Sequence[Question] = QUESTIONS
) -> str:
    """Return a Markdown table with a line for each headline and earlier run of the same name.

    Raises ResultError if an earlier run cannot be read or lacks the problem of the question.
    """
    earlier = {
        name: [*_replaced(runs[name])]
        for name in dict.fromkeys(question.run for question in questions)
    }
    lines = [
        _line(question, before, runs[question.run])
        for question in questions
        for before in earlier[question.run]
    ]
    return markdown_table(COLUMNS, lines)


def _replaced(run: PublishedRun) -> Iterator[PublishedRun]:
    """Yield the runs that this one replaced, the oldest first."""
    path, root = run.run.path, run.run.path.parents[len(Path(run.home).parts) - 1]
    for file in sorted(path.parent.glob(f"earlier/*/{path.name}/run.json")):
        yield read_run(file.parent, run.name, root)


def _line(question: Question, before: PublishedRun, now: PublishedRun) -> list[str]:
    cases = [headline_case(question, run) for run in (before, now)]
    same_scope = cases[0].line.scope == cases[1].line.scope
    old, new = (case.line if same_scope else case.isolated for case in cases)
    commit = commit_of(before.run.path, before.run.environment)[:7]
    names = [f" with `{line.label}`" if old.label != new.label else "" for line in (old, new)]
    beside = " isolated" if is_short(new.to_dict()) else ""
    gains = [(line.speedup, line.speedup_low, line.speedup_high, 0.0) for line in (old, new)]
    ratio, low, high = difference(*gains)
    return [
        question.text,
        f"{speedup_text(old)} ([{commit}](/{before.home}))",
        speedup_text(new) + beside,
        f"{duration(old.median_us)}{names[0]} > {duration(new.median_us)}{names[1]}",
        f"{_baseline_time(before, old)} > {_baseline_time(now, new)}",
        between(ratio, low, high),
        WORDS[outcome(low, high)],
    ]


def _baseline_time(run: PublishedRun, line: "pd.Series[Any]") -> str:
    contest = run.cases[(run.cases[CONTEST] == line[CONTEST]).all(axis=1)]
    return duration(contest[contest.baseline.astype(bool)].median_us.min())

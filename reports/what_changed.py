"""What changed: each headline beside those of the runs that a newer one replaced.

    results/published/GPU/earlier/DAY-COMMIT/RUN ─> was   ┐ one line per question and earlier run
    results/published/GPU/RUN                    ─> is    ┘

Both speedups have today's statistics, and both are over dense on the same zeros if the earlier run
has no dense contender with unpruned weights. Their ratio has an interval, which decides whether a
speedup became larger or smaller (`results.changes.difference`).
"""

from collections.abc import Mapping, Sequence

from sparsebench.reports.findings import contender_name
from sparsebench.reports.grids import gain_text
from sparsebench.reports.headline import (
    QUESTIONS,
    PublishedRun,
    Question,
    headline_case,
)
from sparsebench.reports.tables import markdown_table
from sparsebench.results.comparison.compare import difference
from sparsebench.results.formatting import between, duration
from sparsebench.results.run.provenance import commit_of
from sparsebench.results.statistics.outcome import Outcome, outcome
from sparsebench.results.tables.analysis import has_unpruned, on_same_zeros, tables
from sparsebench.results.tables.contests import is_short

COLUMNS = ["question", "was", "is", "our kernel", "dense", "is / was", "change"]
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
    lines = [
        _line(question, before, _like(before, runs[question.run]))
        for question in questions
        for before in runs[question.run].replaced
    ]
    return markdown_table(COLUMNS, lines)


def _like(before: PublishedRun, now: PublishedRun) -> PublishedRun:
    """Return the newer run with the dense contenders that the earlier one has."""
    if has_unpruned(before.run) or not has_unpruned(now.run):
        return now
    run = on_same_zeros(now.run)
    return PublishedRun(run, *tables(run), now.home)


def _line(question: Question, before: PublishedRun, now: PublishedRun) -> list[str]:
    cases = [headline_case(question, run) for run in (before, now)]
    same_scope = len({case.finding.best["scope"] for case in cases}) == 1
    old, new = (case.finding.best if same_scope else case.isolated for case in cases)
    commit = commit_of(before.run.path, before.run.environment)[:7]
    names = [contender_name(line) for line in (old, new)]
    named = [f" with `{name}`" if names[0] != names[1] else "" for name in names]
    gains = [(line["gain"], line["low"], line["high"], 0.0) for line in (old, new)]
    ratio, low, high = difference(*gains)
    return [
        question.text,
        f"{gain_text(old)} ([{commit}](/{before.home}))",
        gain_text(new) + (" isolated" if is_short(new) else ""),
        f"{duration(old['median_us'])}{named[0]} > {duration(new['median_us'])}{named[1]}",
        f"{duration(old['dense_us'])} > {duration(new['dense_us'])}",
        between(ratio, low, high),
        WORDS[outcome(low, high)],
    ]

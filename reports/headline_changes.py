"""What changed: each headline beside the one that it replaced, and where the difference comes from.

    question  before               now                 change            cause
    ...       3.6× bsr_strips ...  5.5× bsr_wgmma ...  1.5× [1.4, 1.6]   our kernel: ...

A cause is a recorded difference. Four are read off the two headlines: the measure, the weights that
the baseline multiplies, the baseline's kernel, and our kernel. The change is that of one case: the
headline now, or its isolated call if only that was measured before. It is compared as `sparsebench
compare` does it (results/comparison), on the same zeros if a run has no unpruned weights. If it is
settled, the cause of that comparison is shown, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sparsebench.errors import ResultError
from sparsebench.reports.grids import gain_text
from sparsebench.reports.headline import (
    QUESTIONS,
    PublishedRun,
    Question,
    headline_case,
)
from sparsebench.reports.tables import markdown_table
from sparsebench.results.comparison.causes import Cause
from sparsebench.results.comparison.changes import changes
from sparsebench.results.comparison.sides import Side, short_card, side
from sparsebench.results.formatting import between, join_words, kernel
from sparsebench.results.record import UNPRUNED
from sparsebench.results.run.provenance import commit_of, flat
from sparsebench.results.statistics.outcome import DIFFERENT
from sparsebench.results.tables.frame import KEYS, records
from sparsebench.results.tables.grid import Case, Finding

COLUMNS = ["question", "before", "now", "change of this case", "cause"]
WEIGHTS = {"original": "unpruned weights", "pruned": "the same zeros", "": "no dense contender"}
MEASURES = {"kernel": "isolated", "chain": "inside a chain", "op": "called from Python"}


def headline_changes(
    runs: Mapping[str, PublishedRun], questions: Sequence[Question] = QUESTIONS
) -> str:
    """Return a Markdown table with a line for each question whose run replaced another one.

    Raises ResultError if a question selects no single problem of its run now, or if the operands of
    a problem differ.
    """
    replacing = [(each, runs[each.run]) for each in questions if runs[each.run].replaced]
    lines = [_line(question, run) for question, run in replacing]
    return markdown_table(COLUMNS, lines) if lines else "No headline has replaced another one yet."


def _line(question: Question, run: PublishedRun) -> list[str]:
    earlier, now = run.replaced[-1], headline_case(question, run)
    try:
        before = headline_case(question, earlier)
    except ResultError:
        return [question.text, "another problem", _headline(now.finding, run), "", "the suite"]
    same_scope = before.finding.best["scope"] == now.finding.best["scope"]
    case = now.finding.best if same_scope else now.isolated
    change, cause = _change(case, _contest(earlier, case), _contest(run, case))
    causes = dict.fromkeys([*_differences(before.finding, now.finding), *filter(None, [cause])])
    shown = _headline(before.finding, earlier), _headline(now.finding, run)
    return [question.text, *shown, change, "; ".join(causes) or "none is settled"]


def _headline(finding: Finding, run: PublishedRun) -> str:
    """Write the speedup, the kernel, the measure, the commit and the cards."""
    facts = flat(run.run.environment)
    cards = {short_card(value) for name, value in facts.items() if name.endswith("gpu.uuid")}
    words = [MEASURES[finding.best["scope"]], commit_of(run.run.path, facts)[:7]]
    words += [f"card {join_words(sorted(cards))}"] if cards else []
    return f"{gain_text(finding.best)} `{finding.contender}` ({', '.join(words)})"


def _differences(before: Finding, now: Finding) -> Iterator[str]:
    """Yield what differs between two headlines: measure, baseline and kernel."""
    first, second = before.best, now.best
    pairs = [
        ("the measure", *(MEASURES[best["scope"]] for best in (first, second))),
        (Cause.BASELINE, *(WEIGHTS[best["over"]] for best in (first, second))),
        (Cause.BASELINE, *(best["dense_name"].removesuffix(UNPRUNED) for best in (first, second))),
        (Cause.KERNEL, before.contender, now.contender),
    ]
    yield from (f"{cause}: {a} > {b}" for cause, a, b in pairs if a != b)


def _change(case: Case, before: Side, now: Side) -> tuple[str, str]:
    """Return the change of a case's speedup, and its cause if it is settled; "" if there is none.

    The earlier run may lack the case, or may have compared it with another baseline.
    """
    cells = changes(before, now).cases
    same = cells[(cells[KEYS] == [case[key] for key in KEYS]).all(axis=1)]
    if same.empty:
        return "", ""
    line = records(same)[0]
    if not line["by_speedup"]:
        labels = (kernel(line[f"baseline_label_{end}"]) for end in "ab")
        return "", f"{Cause.BASELINE}: {' > '.join(labels)}"
    change = between(line["ratio"], line["low"], line["high"])
    if line["gain"] not in DIFFERENT:
        return f"{change} ({line['gain']})", ""
    return change, f"{line['cause']}: {line['why']}" if line["cause"] else ""


def _contest(run: PublishedRun, case: Case) -> Side:
    """Return the problem of a case in a run as a side of a comparison."""
    rows = [row for row in run.run.rows if row.case.problem.id == case["problem_id"]]
    return side(replace(run.run, rows=rows))

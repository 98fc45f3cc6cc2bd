"""Tables of claims for the terminal: the list and the verdicts."""

from collections.abc import Iterable, Sequence

from sparsebench.reports.tables import Cell, Table
from sparsebench.results.claims.decision import Word, cell_state
from sparsebench.results.claims.metrics import SIGNS
from sparsebench.results.claims.schema import ClaimFile
from sparsebench.results.claims.verdict import TestVerdict, Verdict
from sparsebench.results.formatting import amount, significant

STYLES = {
    Word.HOLDS: "good",
    Word.HOLDS_IN_PART: "unsure",
    Word.FALLS_SHORT: "bad",
    Word.OTHER_CONDITIONS: "unsure",
    Word.NOT_SETTLED: "quiet",
    Word.NOT_MEASURED: "quiet",
    Word.NOT_TESTABLE: "quiet",
}
NOTHING = "No run measures these claims; `sparsebench claims report` judges them by published runs"
WORDS = frozenset({"claim", "statement", "source", "test", "verdict", "basis", "why"})
WORDS |= {"tendency", "GPU"}


def closest(verdict: Verdict) -> TestVerdict | None:
    """Return the test with a value that is closest to the claim; None if none has one.

    If several are equally close, one that decides the verdict comes first.
    """
    tests = [each for each in verdict.tests if any(not cell.reason for cell in each.deciding)]
    rank = {id(each): (each.test.distance, each.word is not verdict.word) for each in tests}
    return min(tests, key=lambda each: rank[id(each)], default=None)


def plain_words(verdict: Verdict) -> str:
    """Write a verdict in plain words with its numbers.

    holds · holds in 3 of 8 cells · falls short: best 1.64× (claimed: 2×) · measured under other
    conditions: 6.7× (claimed: 16.7×) · not settled
    """
    judged, word = closest(verdict), str(verdict.word)
    if judged is None or verdict.word is Word.HOLDS:
        return word
    test, valued = judged.test, [cell for cell in judged.cells if not cell.reason]
    if verdict.word is Word.HOLDS_IN_PART:
        tests = [each for each in verdict.tests if each.test.distance == test.distance]
        if count := sum(each.word is Word.HOLDS for each in tests):
            return f"holds in {count} of {amount(len(tests), 'test')}"
        cells = [(each.test, cell) for each in tests for cell in each.cells]
        count = sum(not cell.reason and cell_state(each, cell) == "met" for each, cell in cells)
        return f"holds in {count} of {amount(len(cells), 'cell')}"
    if verdict.word in (Word.FALLS_SHORT, Word.OTHER_CONDITIONS):
        best = "" if len(valued) == 1 else "mean " if test.quantifier == "typical" else "best "
        value = f"{significant(judged.deciding[0].value)}{SIGNS[test.unit]}"
        return f"{word}: {best}{value} (claimed: {test.claimed_text})"
    return word


def list_table(claims: Iterable[ClaimFile]) -> Table:
    """Return a line per claim: name, statement, source and number of tests."""
    lines = [
        [w.name, w.claim.title, f"{w.claim.source.kind}, {w.claim.source.date}", _tests(w)]
        for w in claims
    ]
    columns = ("claim", "statement", "source", "tests")
    return Table(columns=columns, lines=lines, words=WORDS, spare=("source",))


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """Return a line per claim and device: verdict, basis, tendency of a look, reason."""
    judged_claims = list(verdicts)
    measured = any(test.cells for verdict in judged_claims for test in verdict.tests)
    lines: list[Sequence[Cell]] = [
        [
            verdict.claim,
            verdict.device.removeprefix("NVIDIA "),
            (plain_words(verdict), STYLES[verdict.word]),
            str(verdict.basis),
            str(verdict.tendency or ""),
            verdict.why,
        ]
        for verdict in judged_claims
    ]
    columns = ("claim", "GPU", "verdict", "basis", "tendency", "why")
    title = "" if measured else NOTHING
    return Table(title=title, columns=columns, lines=lines, words=WORDS)


def _tests(written: ClaimFile) -> str:
    tests = written.claim.tests
    return str(len(tests)) if tests else "none"

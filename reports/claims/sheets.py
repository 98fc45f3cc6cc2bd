"""Tables of claims for the terminal: the list and the verdicts."""

from collections.abc import Iterable, Sequence

from sparsebench.reports.tables import Cell, Table
from sparsebench.results.claims.decision import Word
from sparsebench.results.claims.schema import ClaimFile
from sparsebench.results.claims.verdict import Verdict

STYLES = {
    Word.REPRODUCED: "good",
    Word.PARTLY: "unsure",
    Word.REFUTED: "bad",
    Word.NOT_CARRIED_OVER: "bad",
    Word.NOT_SETTLED: "quiet",
    Word.NOT_MEASURED: "quiet",
    Word.NOT_TESTABLE: "quiet",
}
NOTHING = "No run measures these claims; use `--from results/published/GPU` to judge published runs"
WORDS = frozenset({"claim", "statement", "source", "test", "verdict", "basis", "why"})
WORDS |= {"tends to", "GPU"}


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
            (str(verdict.word), STYLES[verdict.word]),
            str(verdict.basis),
            str(verdict.tendency or ""),
            verdict.why,
        ]
        for verdict in judged_claims
    ]
    columns = ("claim", "GPU", "verdict", "basis", "tends to", "why")
    title = "" if measured else NOTHING
    return Table(title=title, columns=columns, lines=lines, words=WORDS)


def _tests(written: ClaimFile) -> str:
    tests = written.claim.tests
    return str(len(tests)) if tests else "none"

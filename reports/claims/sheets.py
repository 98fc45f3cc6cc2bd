"""Claims in the terminal: what is known, what could at most be reached, what was found."""

from collections.abc import Iterable, Sequence

from sparsebench.reports.tables import Cell, Table
from sparsebench.results.claims.decision import Word
from sparsebench.results.claims.metrics import SIGNS
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import ClaimFile
from sparsebench.results.claims.verdict import Verdict
from sparsebench.results.formatting import rounded

STYLES = {
    Word.REPRODUCED: "good",
    Word.PARTLY: "good",
    Word.REFUTED: "bad",
    Word.NOT_CARRIED_OVER: "bad",
    Word.INCONCLUSIVE: "unsure",
    Word.NOT_TESTABLE: "quiet",
}
NOTHING = "Nothing was measured here; `--from results/published/GPU` judges runs that are known"
WORDS = frozenset({"claim", "what is claimed", "source", "test", "verdict", "basis", "why"})
WORDS |= {"tends to", "GPU"}


def listed(claims: Iterable[ClaimFile]) -> Table:
    """Return a line a claim: its name, what it says, who and when, how many tests."""
    lines = [
        [w.name, w.claim.title, f"{w.claim.source.kind}, {w.claim.source.date}", _tests(w)]
        for w in claims
    ]
    columns = ("claim", "what is claimed", "source", "tests")
    return Table(columns=columns, lines=lines, words=WORDS, spare=("source",))


def bounded(claims: Iterable[PlannedClaim]) -> Table:
    """Return a line a test: its threshold, the bound over its cells, and whether it can be met."""
    lines: list[Sequence[Cell]] = []
    for asked in claims:
        for test in asked.claim.tests:
            known = asked.bounds.get(test.name, {}).values()
            most = "–" if not known else _range(min(known), max(known))
            beyond = test.name in asked.unreachable
            said: Cell = ("no", "bad") if beyond else "yes" if known else ("?", "quiet")
            proxy = " (proxy)" if test.proxy else ""
            lines.append([asked.name, said, most, test.name + proxy, test.sentence])
        for bound in asked.claim.bounds:
            share = f", {100 * bound.share:.3g} % of the whole" if bound.share < 1 else ""
            most = f"{rounded(bound.most, 0.01)}{SIGNS['x']}"
            lines.append([asked.name, "", most, bound.of + share, ""])
    title = "At most, as efficient as dense; no: no such kernel can meet the threshold"
    columns = ("claim", "can be met", "at most", "test or part", "threshold")
    words = WORDS | {"threshold", "test or part"}
    return Table(title=title, columns=columns, lines=lines, words=words)


def judged(verdicts: Iterable[Verdict]) -> Table:
    """Return a line a claim and device: verdict, basis, the tendency of a look, and why."""
    known = list(verdicts)
    measured = any(test.cells for each in known for test in each.tests)
    lines: list[Sequence[Cell]] = [
        [
            each.claim,
            ("SIMULATED " if each.simulated else "") + each.device.removeprefix("NVIDIA "),
            (str(each.word), STYLES[each.word]),
            str(each.basis),
            str(each.tendency or ""),
            each.why,
        ]
        for each in known
    ]
    columns = ("claim", "GPU", "verdict", "basis", "tends to", "why")
    title = "" if measured else NOTHING
    return Table(title=title, columns=columns, lines=lines, words=WORDS)


def _range(low: float, high: float) -> str:
    return "–".join(dict.fromkeys(f"{end:.3g}" for end in (low, high))) + SIGNS["x"]


def _tests(written: ClaimFile) -> str:
    found = written.claim.tests
    return str(len(found)) if found else "none"

"""The decision on one test from its cells, by its quantifier; verdict.py lists the rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log

import numpy as np

from sparsebench.results.claims.cells import ClaimCell, largest_value, pool, value_text
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Test
from sparsebench.results.formatting import are
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.statistics.ratio import FEWEST, more_processes


class Word(StrEnum):
    """The word of a verdict; reports/claims/sheets.py adds the numbers to it.

    HOLDS             the measurement meets the value
    HOLDS_IN_PART     some cells or tests meet it, and others miss it
    FALLS_SHORT       every cell misses it
    OTHER_CONDITIONS  a proxy was measured, or every cell missed where the claim could not be met:
                      on a GPU that it is not about, or above what the device allows
    """

    HOLDS = "holds"
    HOLDS_IN_PART = "holds in part"
    FALLS_SHORT = "falls short"
    OTHER_CONDITIONS = "measured under other conditions"
    NOT_SETTLED = Outcome.NOT_SETTLED.value
    NOT_MEASURED = Outcome.NOT_MEASURED.value
    NOT_TESTABLE = "not testable"


OPEN = (Word.NOT_SETTLED, Word.NOT_MEASURED)
"""The words of a verdict that more measurements may change to any other."""


@dataclass(frozen=True)
class Decision:
    """What the cells of a test show, before the basis and the number of processes limit the word.

    deciding  the cells that it rests on
    confirm   the cell that a confirming run would have to measure
    """

    word: Word
    why: str
    deciding: Sequence[ClaimCell]
    confirm: ClaimCell | None = None


def cell_state(test: Test, cell: ClaimCell) -> str:
    """Return whether a cell is "met", "missed" or "not settled"."""
    least, most = (cell.low, cell.high) if test.upward else (cell.high, cell.low)
    return "met" if test.meets(least) else "not settled" if test.meets(most) else "missed"


def decide(test: Test, cells: Sequence[ClaimCell], failed: int, unmeasured: int) -> Decision:
    """Return the verdict on cells with values; others `failed` or are still `unmeasured`."""
    judged = [pool(cells, test)] if test.quantifier == "typical" else cells
    passes, misses, doubts = (
        [cell for cell in judged if cell_state(test, cell) == state]
        for state in ("met", "missed", "not settled")
    )
    if test.quantifier == "exists":
        return _one_of(test, cells, passes, doubts, unmeasured)
    typical, every = test.quantifier == "typical", len(cells) + failed
    number = f"{len(cells)} of {every}" if failed else f"{every}"
    sign = "≥" if test.upward else "≤"
    counted = f"{len(passes)} of {are(every, 'cell')} {sign} {test.limit_text}{test.over_text}"
    counted += f", {failed} without a value" if failed else ""

    def because(cell: ClaimCell, end: str = "") -> str:
        if typical:
            name = f"the mean of {number} cells is" if every > 1 else "the only cell has"
            return f"{name} {_against_claim(test, cell)}{end}."
        return f"{counted}; {cell.label} has {value_text(test, cell)}{end}."

    if unmeasured and (typical or not (passes and (misses or failed))):
        why = "" if typical else f"{counted}; "
        return Decision(Word.NOT_SETTLED, f"{why}{are(unmeasured, 'cell')} not measured.", cells)
    worst = _best(test, misses or passes or judged, worst=True)
    if passes and (misses or failed):
        return Decision(Word.HOLDS_IN_PART, because(worst), [worst])
    if doubts:
        nearest = _best(test, doubts)
        return Decision(Word.NOT_SETTLED, because(nearest, _needed(test, nearest)), doubts)
    if passes:
        return Decision(Word.HOLDS, because(worst), [worst])
    best = _best(test, judged)
    word, end = _miss(test, judged)
    return Decision(word, because(best, end), [best])


def _one_of(
    test: Test,
    cells: Sequence[ClaimCell],
    passes: list[ClaimCell],
    doubts: list[ClaimCell],
    unmeasured: int,
) -> Decision:
    """Judge by one cell; the best of several must be met in a run made for it."""
    alone = len(cells) == 1 and not unmeasured
    proven = [cell for cell in passes if cell.confirms or alone]
    best, top = _best(test, proven or passes or doubts or cells), _best(test, cells)
    which = f"the best of {len(cells)} cells" if len(cells) > 1 else "the only measured cell"
    if proven:
        which = "the only cell" if alone else "the best cell that was measured again alone"
    why = f"{which}, {best.label}, has {_against_claim(test, best)}"
    confirm = None if best.confirms or alone else best
    if proven and top is not best:
        why += f". The {value_text(test, top)} of {top.label} would count if confirmed"
    if proven:
        return Decision(Word.HOLDS, f"{why}.", [best])
    if passes:
        why = f"{why}. A run made for this cell alone would settle it."
        return Decision(Word.NOT_SETTLED, why, [best], confirm)
    if doubts:
        return Decision(Word.NOT_SETTLED, f"{why}{_needed(test, best)}.", [best], confirm)
    if unmeasured:
        why = f"{why}; {are(unmeasured, 'cell')} not measured."
        return Decision(Word.NOT_SETTLED, why, [best])
    word, end = _miss(test, cells)
    return Decision(word, f"{why}{end}.", [best], confirm if best.processes < FEWEST else None)


def _miss(test: Test, cells: Sequence[ClaimCell]) -> tuple[Word, str]:
    """Return the word for cells that all miss the limit, and the end of its reason.

    The device's ceilings may not allow the limit in any cell.
    """
    most = [largest_value(test, cell) or np.inf for cell in cells]
    if test.upward and not test.meets(max(most)):
        unit = SIGNS[test.unit]
        end = f", which these cells cannot reach: this device allows at most {max(most):.3g}{unit}"
        return Word.OTHER_CONDITIONS, end
    return Word.FALLS_SHORT, ""


def _best(test: Test, cells: Sequence[ClaimCell], worst: bool = False) -> ClaimCell:
    return (max if test.upward != worst else min)(cells, key=lambda cell: cell.value)


def _against_claim(test: Test, cell: ClaimCell) -> str:
    """Write a value with its quantity, and the claim: `a speedup of 1.1×; the claim requires ...`.

    The quantity may be 27.1 % [26.8, 27.3] of the ideal speedup.
    """
    value = value_text(test, cell, METRICS[test.metric].template + test.over_text)
    return f"{value}; the claim requires at {'least' if test.upward else 'most'} {test.limit_text}"


def _needed(test: Test, cell: ClaimCell) -> str:
    """Say how many processes would settle a cell whose interval contains the limit.

    More processes of a run do not narrow what cards add to the interval.
    """
    around = ", which is inside the interval"
    if cell.processes < FEWEST:
        return around
    at = log(METRICS[test.metric].back(test.limit, cell.density))
    count = more_processes(np.array(cell.logs) - at, margin=0.0, between=cell.between)
    if not count:
        return f"{around}; more {test.samples} would not settle it, but another card might"
    total = cell.processes + count
    return f"{around}; {total} {test.samples} in place of {cell.processes} would settle it"

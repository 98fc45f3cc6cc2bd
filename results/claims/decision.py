"""The decision on one test from its cells, by its quantifier; verdict.py lists the rules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import log

import numpy as np

from sparsebench.results.claims.cells import Cell, largest_value, pool, value_text
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Test
from sparsebench.results.formatting import are
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.statistics.ratio import FEWEST, more_processes


class Word(StrEnum):
    """The word of a verdict."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    REFUTED = "refuted"
    NOT_CARRIED_OVER = "not carried over"
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
    deciding: Sequence[Cell]
    confirm: Cell | None = None


def cell_state(test: Test, cell: Cell) -> str:
    """Return whether a cell is "met", "missed" or "not settled"."""
    up = test.at_least is not None
    reached = cell.low >= test.limit if up else cell.high <= test.limit
    missed = cell.high < test.limit if up else cell.low > test.limit
    return "met" if reached else "missed" if missed else "not settled"


def decide(test: Test, cells: Sequence[Cell], failed: int, unmeasured: int) -> Decision:
    """Return the verdict on cells with values; others `failed` or are still `unmeasured`."""
    alone = len(cells) == 1 and not failed and not unmeasured
    if test.quantifier == "typical" or (test.quantifier == "for_all" and alone):
        return _typical(test, cells, failed, unmeasured)
    if test.quantifier == "for_all":
        return _for_all(test, cells, failed, unmeasured)
    return _exists(test, cells, unmeasured)


def _typical(test: Test, cells: Sequence[Cell], failed: int, unmeasured: int) -> Decision:
    if unmeasured:
        return _leave_open(f"{are(unmeasured, 'cell')} not measured", cells)
    whole = pool(cells, test)
    state = cell_state(test, whole)
    few = {1: "the only cell has", 2: "the mean of both cells is"}
    which = few.get(len(cells), f"the mean of all {len(cells)} cells is")
    why = f"{which} {_value(test, whole)}; {_claim_text(test)}"
    if state == "met" and not failed:
        return Decision(Word.REPRODUCED, f"{why}.", [whole])
    if state == "not settled":
        return _leave_open(f"{why}, which is inside the interval{_needed(test, whole)}", [whole])
    if state == "met":
        return Decision(Word.PARTLY, f"{why}; {are(failed, 'cell')} without a value.", [whole])
    if _partly(test, whole):
        return Decision(Word.PARTLY, f"{why}, and {_partly_text(test)}.", [whole])
    return _miss(test, why, [whole], whole)


def _for_all(test: Test, cells: Sequence[Cell], failed: int, unmeasured: int) -> Decision:
    met, missed, open_ = (
        [cell for cell in cells if cell_state(test, cell) == state]
        for state in ("met", "missed", "not settled")
    )
    up = test.at_least is not None
    ends = ("smallest", "largest") if up else ("largest", "smallest")
    over = f" that of {test.over}" if test.over else ""
    limit = f"{'≥' if up else '≤'} {test.limit_text}{over}"
    count = f"{len(met)} of {are(len(cells) + failed, 'cell')} {limit}"
    count += f", {failed} {'has' if failed == 1 else 'have'} no value" if failed else ""
    if len(met) == len(cells) and not failed and not unmeasured:
        worst = _best(test, cells, worst=True)
        why = f"{count}; the {ends[0]} is {value_text(test, worst)}."
        return Decision(Word.REPRODUCED, why, [worst])
    if met and (missed or failed):
        worst = _best(test, missed or met, worst=True)
        why = f"{count}, but {worst.label} has {value_text(test, worst)}."
        return Decision(Word.PARTLY, why, [worst])
    if unmeasured:
        return _leave_open(f"{count}; {are(unmeasured, 'cell')} not measured", cells)
    if open_:
        worst = _best(test, open_)
        value = f"{value_text(test, worst)}, an interval around the limit"
        return _leave_open(f"{count}; {worst.label} has {value}{_needed(test, worst)}", open_)
    best = _best(test, cells)
    why = f"{count}; the {ends[1]} is {value_text(test, best)}"
    if _partly(test, best):
        return Decision(Word.PARTLY, f"{why}; the claim {_partly_text(test)}.", [best])
    return Decision(Word.REFUTED, f"{why}.", [best])


def _exists(test: Test, cells: Sequence[Cell], unmeasured: int) -> Decision:
    """Judge by one cell; the best of several must be met in a run made for it."""
    reaching, open_ = (
        [cell for cell in cells if cell_state(test, cell) == state]
        for state in ("met", "not settled")
    )
    alone = len(cells) == 1 and not unmeasured
    only = "the only cell" if alone else "the only measured cell"
    which = f"the best of {len(cells)} cells" if len(cells) > 1 else only
    if proven := [cell for cell in reaching if cell.confirms or alone]:
        best, top = _best(test, proven), _best(test, cells)
        cell = "the best cell, which was measured again alone" if best.confirms else "the only cell"
        if top is not best:
            cell = "the best of the cells that were measured again alone"
        why = f"{cell}, {best.label}, has {_value(test, best)}; {_claim_text(test)}."
        if top is not best:
            value = value_text(test, top)
            why += f" The {value} of {top.label} would count if it were measured again alone."
        return Decision(Word.REPRODUCED, why, [best])
    if reaching:
        best = _best(test, reaching)
        why = f"{which}, {best.label}, has {_value(test, best)}; {_claim_text(test)}"
        why += ". A run made for this cell alone would settle it"
        return Decision(Word.NOT_SETTLED, f"{why}.", [best], confirm=best)
    if open_:
        best = _best(test, open_)
        limit = f"an interval around the claimed {test.limit_text}{_needed(test, best)}"
        why = f"{which}, {best.label}, has {_value(test, best)}, {limit}."
        confirm = None if best.confirms or alone else best
        return Decision(Word.NOT_SETTLED, why, [best], confirm)
    best = _best(test, cells)
    if unmeasured:
        left = f"{are(unmeasured, 'cell')} not measured"
        return _leave_open(f"the best so far has {value_text(test, best)}; {left}", [best])
    name = "" if alone else f", {best.label},"
    why = f"{which}{name} has {_value(test, best)}; {_claim_text(test)}"
    confirm = None if alone or best.processes >= FEWEST else best
    if _partly(test, best):
        return Decision(Word.PARTLY, f"{why}, and {_partly_text(test)}.", [best], confirm)
    return replace(_miss(test, why, cells, best), confirm=confirm)


def _miss(test: Test, why: str, cells: Sequence[Cell], deciding: Cell) -> Decision:
    """Refute, unless the device's ceilings do not allow the limit in any of these cells."""
    up = test.at_least is not None
    allowed = [largest_value(test, cell) if up else None for cell in cells]
    limits = [value for value in allowed if value is not None]
    if len(limits) < len(allowed) or max(limits) >= test.limit:
        return Decision(Word.REFUTED, f"{why}.", [deciding])
    most = f"this device allows at most {max(limits):.3g}{SIGNS[test.unit]}"
    why = f"{why}, which these cells cannot reach: {most}."
    return Decision(Word.NOT_TESTABLE, why, [deciding])


def _leave_open(why: str, deciding: Sequence[Cell]) -> Decision:
    return Decision(Word.NOT_SETTLED, f"{why}.", deciding)


def _best(test: Test, cells: Sequence[Cell], worst: bool = False) -> Cell:
    up = (test.at_least is not None) != worst
    return (max if up else min)(cells, key=lambda cell: cell.value)


def _partly(test: Test, cell: Cell) -> bool:
    """Return whether a cell that missed the limit still shows part of the claim."""
    if test.partly_at is not None:
        up = test.at_least is not None
        return cell.low >= test.partly_at if up else cell.high <= test.partly_at
    none = METRICS[test.metric].none
    return test.at_least is not None and none is not None and none < min(cell.low, test.threshold)


def _partly_text(test: Test) -> str:
    """Say which values show part of a claim, as `_partly` decides: `holds partly above 1×`."""
    if test.partly_at is None:
        return f"holds partly above {METRICS[test.metric].none:g}{SIGNS[test.unit]}"
    at = f"{test.partly_at:g}{SIGNS[test.unit]}"
    return f"holds partly from {at} on" if test.at_least is not None else f"holds partly up to {at}"


def _claim_text(test: Test) -> str:
    end = "least" if test.at_least is not None else "most"
    return f"the claim requires at {end} {test.limit_text}"


def _value(test: Test, cell: Cell) -> str:
    """Write a value with its quantity: `27.1 % [26.8, 27.3] of the ideal speedup`."""
    over = f" over that of {test.over}" if test.over else ""
    return value_text(test, cell, METRICS[test.metric].template + over)


def _needed(test: Test, cell: Cell) -> str:
    """Say how many processes would settle a cell whose interval contains the limit.

    More processes of a run do not narrow what cards add to the interval.
    """
    if cell.processes < FEWEST:
        return ""
    at = log(METRICS[test.metric].back(test.limit, cell.density))
    count = more_processes(np.array(cell.logs) - at, margin=0.0, between=cell.between)
    if not count:
        return f"; more {test.samples} would not settle it, but another card might"
    return f"; {cell.processes + count} {test.samples} in place of {cell.processes} would settle it"

"""Cells to a verdict. The order is fixed, and each step is one rule; the first that holds decides.

    a cell is   met      its whole interval is beyond the limit
                missed   its whole interval is short of it         else unclear

    1  not testable     no cell has a value: what was claimed cannot run here, with the reason
    2  inconclusive     nothing was measured; the A/A pairs of a run came out different;
                        fewer than 6 processes (a look: `leans` says what it would be)
    3  reproduced       exists: a cell that a screening chose is met in another run
                        typical: all cells together are met       for_all: every cell is met
    4  inconclusive     a cell that is unclear, unmeasured or not confirmed could still change it
    5  partly           some cells of for_all are met; or one is beyond partly_at; or, where no
                        partly_at is given, one is better than equal
    6  not testable     the device's ceilings allow the limit in none of the cells of exists, or not
                        for all cells of typical together; others might meet it
    7  refuted          every cell is missed, and the claim is general or names this GPU
       not carried over     likewise, and the claim names another GPU

A kernel proxy is never more than partly and never refutes. So 100 equal contenders, of which the
luckiest is chosen, reproduce nothing: the choice is measured anew. A problem that several runs
measured is one cell: of a run whose A/A pairs agree, then of one made for it, else of most
processes. Alone what is open leans.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sparsebench.results.claims.cells import Cell, most, over, said, united
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Claim, Hardware, Test
from sparsebench.results.claims.sentences import (
    asked,
    capital,
    has,
    limit,
    more,
    not_measured,
    nothing,
)
from sparsebench.results.formatting import are, listed
from sparsebench.results.statistics import FEWEST


class Word(StrEnum):
    """A verdict."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    REFUTED = "refuted"
    NOT_CARRIED_OVER = "not carried over"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTABLE = "not testable"


class Basis(StrEnum):
    """How near to what was claimed the measurement is."""

    AS_PUBLISHED = "as published"
    SAME_ARCHITECTURE = "same architecture"
    NO_GPU_NAMED = "no GPU named"
    OTHER_GPU = "other GPU"
    KERNEL_PROXY = "kernel proxy"
    NONE = "nothing measured"


MISSED = (Word.REFUTED, Word.NOT_CARRIED_OVER)
ARCHITECTURES = {
    "Volta": ("V100",),
    "Turing": ("T4",),
    "Ampere": ("A100", "A800", "A30", "A40", "A10"),
    "Ada": ("L40", "L40S", "L4", "4090", "6000 Ada"),
    "Hopper": ("H100", "H200", "H800", "H20", "GH200"),
    "Blackwell": ("B100", "B200", "B300", "GB200", "GB300"),
}
"""GPUs of one architecture, by what their names hold."""


@dataclass(frozen=True)
class Judged:
    """The verdict on one test.

    why       a sentence: what decided, and where it is open what would decide
    cells     those that count, one a problem; `others` measured the same problems
    deciding  the cells that the verdict stands on
    leans     of a look, or of a cell that is not confirmed: what it would be if that stood
    confirm   the cell that a confirming run would have to measure
    """

    test: Test
    word: Word
    basis: Basis
    why: str
    cells: tuple[Cell, ...] = ()
    deciding: tuple[Cell, ...] = ()
    leans: Word | None = None
    confirm: Cell | None = None
    others: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, on one device ("" where nothing was measured)."""

    claim: str
    device: str
    word: Word
    basis: Basis
    why: str
    tests: tuple[Judged, ...] = ()
    leans: Word | None = None
    simulated: bool = False

    @property
    def sentence(self) -> str:
        """Say it in a sentence."""
        return f"{self.word.capitalize()} {self.rest}"

    @property
    def rest(self) -> str:
        """Return the sentence without its first word: on what, on which basis, and why."""
        where = f"on {self.device} " if self.device else ""
        lean = f"; leans to {self.leans}" if self.leans else ""
        return f"{where}({self.basis}{lean}). {self.why}"

    @property
    def rank(self) -> tuple[bool, bool, bool, int]:
        """Order verdicts: one that says something first, on a GPU near to what the claim names."""
        place = list(Basis).index(self.basis)
        untold = self.word is Word.NOT_TESTABLE
        return self.simulated, untold, self.word is Word.INCONCLUSIVE, place


def judge(
    name: str,
    claim: Claim,
    cells: Sequence[Cell],
    wanted: Mapping[str, Collection[str]],
    refused: Mapping[str, str] | None = None,
) -> list[Verdict]:
    """Return the verdict on a claim for each device that its cells are from; one without cells.

    The one that says most comes first.

    `wanted` has the ids of the problems of each test, `refused` why a test was not run.
    """
    devices = list(dict.fromkeys(cell.device for cell in cells)) or [""]
    made = []
    for device in devices:
        own = [cell for cell in cells if cell.device == device]
        tests = [
            _test(
                claim,
                test,
                [cell for cell in own if cell.test == test.name],
                set(wanted.get(test.name, ())),
                (refused or {}).get(test.name, ""),
            )
            for test in claim.tests
        ]
        made.append(_claim(name, claim, device, tests, any(cell.simulated for cell in own)))
    return sorted(made, key=lambda verdict: verdict.rank)


def basis(hardware: Hardware, device: str, proxy: bool) -> Basis:
    """Return how near a device is to what a claim names."""
    if proxy:
        return Basis.KERNEL_PROXY
    words = device.replace("-", " ").split()
    if not hardware.gpus:
        return Basis.NO_GPU_NAMED
    if any(gpu in device for gpu in hardware.gpus):
        return Basis.AS_PUBLISHED
    for names in ARCHITECTURES.values():
        own = any(name in words for name in names)
        theirs = any(name in gpu.split() for gpu in hardware.gpus for name in names)
        if own and theirs:
            return Basis.SAME_ARCHITECTURE
    return Basis.OTHER_GPU


def state(test: Test, cell: Cell) -> str:
    """Say whether a cell is met, missed or unclear."""
    up = test.at_least is not None
    met = cell.low >= test.limit if up else cell.high <= test.limit
    missed = cell.high < test.limit if up else cell.low > test.limit
    return "met" if met else "missed" if missed else "unclear"


def _test(claim: Claim, test: Test, known: list[Cell], wanted: set[str], refused: str) -> Judged:
    unmeasured = len(wanted - {cell.problem for cell in known})
    measured = over(test, known)
    cells = _counted(measured)
    if not cells:
        why = refused or nothing(claim, test)
        word = Word.NOT_TESTABLE if refused else Word.INCONCLUSIVE
        return Judged(test, word, Basis.NONE, capital(f"{why}."))
    near = basis(claim.hardware, cells[0].device, test.proxy is not None)
    valued = [cell for cell in cells if not cell.reason]
    others = tuple(cell for cell in measured if cell not in cells)
    blank = Judged(test, Word.INCONCLUSIVE, near, "", tuple(cells), tuple(valued), others=others)
    if not valued:
        reasons = [refused] if refused else list(dict.fromkeys(cell.reason for cell in cells))
        return replace(blank, word=Word.NOT_TESTABLE, why=capital(f"{'; '.join(reasons[:2])}."))
    if any(not cell.reliable for cell in valued):
        runs = listed(sorted({cell.run for cell in valued if not cell.reliable}))
        why = f"Equal kernels came out different in {runs}: measure again on a quiet machine."
        return replace(blank, why=why)
    word, why, deciding, confirm = _decided(test, valued, len(cells) - len(valued), unmeasured)
    hopeful = confirm is not None and state(test, confirm) == "met"
    general = claim.hardware.scope == "general"
    leans = _in_scope(Word.REPRODUCED, near, general) if hopeful else None
    word = _in_scope(word, near, general)
    fewest = min(cell.processes for cell in deciding)
    if fewest < FEWEST and word is not Word.NOT_TESTABLE:
        leans = leans if word is Word.INCONCLUSIVE else word
        look = f"a look, {fewest} of the {FEWEST} processes that a verdict needs"
        why, word = f"{why.rstrip('.')}; {look}.", Word.INCONCLUSIVE
    return replace(
        blank, word=word, why=capital(why), deciding=tuple(deciding), leans=leans, confirm=confirm
    )


Decision = tuple[Word, str, list[Cell], Cell | None]


def _decided(test: Test, valued: list[Cell], failed: int, unmeasured: int) -> Decision:
    """Return the verdict as if nothing limited it, why, on which cells, and what to confirm."""
    states = {cell.problem: state(test, cell) for cell in valued}
    alone = len(valued) == 1 and not failed and not unmeasured
    if test.quantifier == "typical" or (test.quantifier == "for_all" and alone):
        return _typical(test, valued, failed, unmeasured)
    if test.quantifier == "for_all":
        return _for_all(test, valued, states, failed, unmeasured)
    return _exists(test, valued, states, unmeasured)


def _typical(test: Test, cells: list[Cell], failed: int, unmeasured: int) -> Decision:
    if unmeasured:
        return _open(not_measured(unmeasured), cells)
    pooled = united(cells, test)
    whole = state(test, pooled)
    few = {1: "the only cell has", 2: "both cells together have"}
    which = few.get(len(cells), f"all {len(cells)} cells together have")
    why = f"{which} {has(test, pooled)}; {asked(test)}"
    if whole == "met" and not failed:
        return Word.REPRODUCED, f"{why}.", [pooled], None
    if whole == "unclear":
        return _open(f"{why}, and the interval holds it{more(test, pooled)}", [pooled])
    if _partly(test, pooled) or whole == "met":
        return Word.PARTLY, f"{why}.", [pooled], None
    return _missed(test, why, [pooled], pooled)


def _for_all(
    test: Test, cells: list[Cell], states: dict[str, str], failed: int, unmeasured: int
) -> Decision:
    by = {name: [c for c in cells if states[c.problem] == name] for name in ("met", "missed")}
    unclear = [cell for cell in cells if states[cell.problem] == "unclear"]
    up = test.at_least is not None
    ends = ("smallest", "largest") if up else ("largest", "smallest")
    end = f" that of {test.over}" if test.over else ""
    sign = "≥" if up else "≤"
    count = f"{len(by['met'])} of {are(len(cells) + failed, 'cell')} {sign} {limit(test)}{end}"
    if len(by["met"]) == len(cells) and not failed and not unmeasured:
        worst = _best(test, cells, worst=True)
        return Word.REPRODUCED, f"{count}; the {ends[0]} is {said(test, worst)}.", [worst], None
    if by["met"] and (by["missed"] or failed):
        worst = _best(test, by["missed"] or by["met"], worst=True)
        return Word.PARTLY, f"{count}, but {worst.label} has {said(test, worst)}.", [worst], None
    if unmeasured:
        return _open(f"{count}; {not_measured(unmeasured)}", cells)
    if unclear:
        worst = _best(test, unclear)
        why = f"{worst.label} has {said(test, worst)}, astride it{more(test, worst)}"
        return _open(f"{count}; {why}", unclear)
    best = _best(test, cells)
    word = Word.PARTLY if _partly(test, best) else Word.REFUTED
    return word, f"{count}; the {ends[1]} is {said(test, best)}.", [best], None


def _exists(test: Test, cells: list[Cell], states: dict[str, str], unmeasured: int) -> Decision:
    """Judge by one cell. The best of several must be met in a run that was made for it."""
    alone = len(cells) == 1 and not unmeasured
    only = "the only cell" if alone else "the only cell measured"
    which = f"the best of {len(cells)} cells" if len(cells) > 1 else only
    proven = [c for c in cells if states[c.problem] == "met" and (c.confirms or alone)]
    if proven:
        best = _best(test, proven)
        again = "the cell measured alone after a screening" if best.confirms else "the only cell"
        why = f"{again}, {best.label}, has {has(test, best)}; {asked(test)}."
        return Word.REPRODUCED, why, [best], None
    hopeful = [c for c in cells if states[c.problem] in ("met", "unclear") and not c.confirms]
    met = [cell for cell in hopeful if states[cell.problem] == "met"]
    if met:
        best = _best(test, met)
        why = f"{which}, {best.label}, has {has(test, best)}; {asked(test)}"
        word, _, deciding, _ = _open("", [best])
        return word, f"{why}. A run made for it alone would decide.", deciding, best
    unclear = [cell for cell in cells if states[cell.problem] == "unclear"]
    if unclear:
        best = _best(test, unclear)
        why = f"{which}, {best.label}, has {has(test, best)}, astride the {limit(test)} asked for"
        confirm = None if best.confirms or alone else best
        return Word.INCONCLUSIVE, f"{why}{more(test, best)}.", [best], confirm
    best = _best(test, cells)
    if unmeasured:
        return _open(f"the best so far has {said(test, best)}; {not_measured(unmeasured)}", [best])
    why = f"{which}{'' if alone else f', {best.label},'} has {has(test, best)}; {asked(test)}"
    if _partly(test, best):
        return Word.PARTLY, f"{why}.", [best], None
    return _missed(test, why, cells, best)


def _missed(test: Test, why: str, cells: list[Cell], deciding: Cell) -> Decision:
    """Refute, but where the device's ceilings do not allow the limit in any of these cells."""
    reach = [most(test, cell) for cell in cells] if test.at_least is not None else [None]
    known = [each for each in reach if each is not None]
    if len(known) < len(reach) or max(known) >= test.limit:
        return Word.REFUTED, f"{why}.", [deciding], None
    there = f"this device allows {max(known):.3g}{SIGNS[test.unit]} at most"
    said = f"{why}, which cannot be met in these cells: {there}."
    return Word.NOT_TESTABLE, said, [deciding], None


def _open(why: str, deciding: list[Cell]) -> Decision:
    return Word.INCONCLUSIVE, f"{why}.", deciding, None


def _counted(cells: Sequence[Cell]) -> list[Cell]:
    """Return one cell a problem: of a reliable run, a confirming one, one that searched.

    Then of most processes, then with the narrowest interval, in whatever order runs are read.
    """
    found: dict[str, Cell] = {}
    for cell in sorted(cells, key=_counts):
        found[cell.problem] = cell
    return [cell for cell in cells if found[cell.problem] is cell]


def _counts(cell: Cell) -> tuple[bool, bool, bool, bool, int, float]:
    return not cell.reason, cell.reliable, cell.confirms, *cell.weight


def _best(test: Test, cells: Sequence[Cell], worst: bool = False) -> Cell:
    up = (test.at_least is not None) != worst
    return (max if up else min)(cells, key=lambda cell: cell.value)


def _partly(test: Test, cell: Cell) -> bool:
    """Say whether a cell that missed the limit still shows part of what was claimed."""
    if test.partly_at is not None:
        up = test.at_least is not None
        return cell.low >= test.partly_at if up else cell.high <= test.partly_at
    none = METRICS[test.metric].none
    return test.at_least is not None and none is not None and none < min(cell.low, test.threshold)


def _in_scope(word: Word, near: Basis, general: bool) -> Word:
    """Weaken what a basis cannot carry; a general claim is refuted on any GPU."""
    if near is Basis.KERNEL_PROXY and word is Word.REPRODUCED:
        return Word.PARTLY
    carried = near is Basis.AS_PUBLISHED or (general and near is not Basis.KERNEL_PROXY)
    if word is Word.REFUTED and not carried:
        return Word.NOT_CARRIED_OVER
    return word


def _claim(name: str, claim: Claim, device: str, tests: list[Judged], simulated: bool) -> Verdict:
    """Unite the verdicts of a claim's tests: those that are no proxies, if one of them can run."""
    whole = [t for t in tests if not t.test.proxy]
    runs = [t for t in whole if t.word is not Word.NOT_TESTABLE]
    used = runs or [t for t in tests if t.test.proxy and t.word is not Word.NOT_TESTABLE]
    if not used:
        own = [f"{t.test.name}: {t.why}" if len(tests) > 1 else t.why for t in tests]
        near = tests[0].basis if tests else Basis.NONE
        why = " ".join(
            capital(f"{each.rstrip('.')}.") for each in [claim.missing or "", *own] if each
        )
        return Verdict(name, device, Word.NOT_TESTABLE, near, why, tuple(tests), None, simulated)
    capped = bool(runs) and len(runs) < len(whole)
    word = _united([t.word for t in used], capped)
    leans = None
    if word is Word.INCONCLUSIVE and any(t.leans for t in used):
        lean = _united([t.leans or t.word for t in used], capped)
        leans = lean if lean is not Word.INCONCLUSIVE else None
    measured = [t.basis for t in used if t.basis is not Basis.NONE]
    near = max(measured, key=list(Basis).index, default=Basis.NONE)
    own = [capital(f"{t.test.name}: {t.why}" if len(used) > 1 else t.why) for t in used]
    return Verdict(name, device, word, near, " ".join(own), tuple(tests), leans, simulated)


def _united(words: Sequence[Word], capped: bool) -> Word:
    """Return the verdict on several tests; an open one is tried as either, and must not matter."""
    if Word.INCONCLUSIVE in words:
        rest = [word for word in words if word is not Word.INCONCLUSIVE]
        either = {_united([*rest, end], capped) for end in (Word.REPRODUCED, Word.REFUTED)}
        return either.pop() if len(either) == 1 else Word.INCONCLUSIVE
    if all(word is Word.REPRODUCED for word in words):
        return Word.PARTLY if capped else Word.REPRODUCED
    if all(word in MISSED for word in words):
        return Word.REFUTED if Word.REFUTED in words else Word.NOT_CARRIED_OVER
    return Word.PARTLY

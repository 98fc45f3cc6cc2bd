"""Derive the verdict on a claim from its cells (the cases it covers).

The rules are tried in order; the first that holds decides.

    a cell is   met      its whole interval is beyond the limit
                missed   its whole interval is short of the limit
                not settled  anything else

    1  not testable     no cell has a value: the claim cannot be tested here, for a given reason
    2  not measured     no run has a cell yet
       not settled      in some run, the two halves of A/A pairs differ significantly; or there are
                        fewer than 6 processes (a look; `tendency` is what the verdict would be)
    3  holds            exists: a cell picked in a screening run is met again in a separate run
                        typical: the value pooled over all cells is met
                        for_all: every cell is met
    4  not settled      a cell that is not settled, not measured or not confirmed could change it
    5  holds in part    some cells of for_all are met, or some tests of the claim
    6  measured under other conditions      the device's ceilings rule out the limit in every cell
                        (typical: for the pooled value); other cells might meet it
    7  falls short      every cell is missed, and the claim is general or names this GPU
       measured under other conditions      every cell is missed, and the claim names another GPU

A claim that is tested through a proxy was measured under other conditions, met or not. Because the
best of several cells is measured again, picking the luckiest of 100 equally fast contenders cannot
make a claim hold. A problem that several runs measured is one cell. Its value comes from,
in order of preference: a run whose A/A pairs agree, one that timed the fastest subject and baseline
of all runs, one that confirms chosen cells, one that searched, the one with the most processes.
Only a verdict that is not settled has a tendency.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sparsebench._gpus import generation_of
from sparsebench.results.claims.cells import ClaimCell, is_outdone, over_op
from sparsebench.results.claims.decision import OPEN, Word, cell_state, decide
from sparsebench.results.claims.schema import Claim, Hardware, Test
from sparsebench.results.formatting import capital, join_words
from sparsebench.results.statistics.ratio import FEWEST


class Basis(StrEnum):
    """How close the measurement is to what was claimed."""

    AS_PUBLISHED = "as published"
    SAME_ARCHITECTURE = "same architecture"
    NO_GPU_NAMED = "no GPU named"
    OTHER_GPU = "other GPU"
    PROXY = "proxy"
    NONE = "nothing measured"


@dataclass(frozen=True)
class TestVerdict:
    """The verdict on one test.

    why       a sentence: what decided or, if it is open, what would decide
    limit     a sentence: how proxy or GPU changed the word; "" if they did not
    cells     the cells that count, one per problem; `others` measured the same problems
    deciding  the cells that the verdict rests on
    tendency  of a look or an unconfirmed cell: the verdict if a longer run agrees
    confirm   the cell that a confirming run would have to measure
    """

    __test__ = False  # pytest collects classes with this name

    test: Test
    word: Word
    basis: Basis
    why: str
    cells: tuple[ClaimCell, ...] = ()
    deciding: tuple[ClaimCell, ...] = ()
    tendency: Word | None = None
    confirm: ClaimCell | None = None
    others: tuple[ClaimCell, ...] = ()
    limit: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim on one device ("" if nothing was measured)."""

    claim: str
    device: str
    word: Word
    basis: Basis
    why: str
    tests: tuple[TestVerdict, ...] = ()
    tendency: Word | None = None

    @property
    def sentence(self) -> str:
        return f"{self.word.capitalize()} {self.rest}"

    @property
    def rest(self) -> str:
        """Return the sentence without its first word: the device, the basis and the reason."""
        where = f"on {self.device} " if self.device else ""
        tendency = f"; tendency: {self.tendency}" if self.tendency else ""
        return f"{where}({self.basis}{tendency}). {self.why}"

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Return the order of verdicts: decided first, then by how close the GPU is."""
        place = list(Basis).index(self.basis)
        untested = self.word is Word.NOT_TESTABLE
        return untested, self.word in OPEN, place


def judge(
    name: str,
    claim: Claim,
    cells: Sequence[ClaimCell],
    problems: Mapping[str, Collection[str]],
    refused: Mapping[str, str] | None = None,
) -> list[Verdict]:
    """Return the verdict on a claim for each device with cells, or one without a device.

    `problems` has the ids of each test's problems, and `refused` why a test was not run. The most
    decided verdict comes first.
    """
    verdicts = []
    for device in dict.fromkeys(cell.device for cell in cells) or [""]:
        here = [cell for cell in cells if cell.device == device]
        tests = [
            _test(
                claim,
                test,
                [cell for cell in here if cell.test == test.name],
                set(problems.get(test.name, ())),
                (refused or {}).get(test.name, ""),
            )
            for test in claim.tests
        ]
        verdicts.append(_claim(name, claim, device, tests))
    return sorted(verdicts, key=lambda verdict: verdict.rank)


def basis_of(hardware: Hardware, device: str, proxy: bool) -> Basis:
    """Return how close a device is to the hardware of a claim."""
    if proxy:
        return Basis.PROXY
    if not hardware.gpus:
        return Basis.NO_GPU_NAMED
    if any(gpu in device for gpu in hardware.gpus):
        return Basis.AS_PUBLISHED
    generation = generation_of(device)
    if generation and generation in map(generation_of, hardware.gpus):
        return Basis.SAME_ARCHITECTURE
    return Basis.OTHER_GPU


def _test(
    claim: Claim, test: Test, measured: list[ClaimCell], problems: set[str], refused: str
) -> TestVerdict:
    unmeasured = len(problems - {cell.problem for cell in measured})
    measured = over_op(test, measured)
    cells = _one_per_problem(test, measured)
    if not cells:
        why = refused or _no_cell(claim, test)
        word = Word.NOT_TESTABLE if refused else Word.NOT_MEASURED
        return TestVerdict(test, word, Basis.NONE, capital(f"{why}."))
    basis = basis_of(claim.hardware, cells[0].device, test.proxy is not None)
    valued = tuple(cell for cell in cells if not cell.reason)
    others = tuple(cell for cell in measured if cell not in cells)
    blank = TestVerdict(test, Word.NOT_SETTLED, basis, "", tuple(cells), valued, others=others)
    if not valued:
        reasons = [refused] if refused else list(dict.fromkeys(cell.reason for cell in cells))
        return replace(blank, word=Word.NOT_TESTABLE, why=capital(f"{'; '.join(reasons[:2])}."))
    if any(not cell.reliable for cell in valued):
        runs = join_words(sorted({cell.run for cell in valued if not cell.reliable}))
        why = f"Equal kernels came out different in {runs}: measure again on a quiet machine."
        return replace(blank, why=why)
    decision = decide(test, valued, len(cells) - len(valued), unmeasured)
    confirm, fewest = decision.confirm, min(cell.processes for cell in decision.deciding)
    hopeful = confirm is not None and cell_state(test, confirm) == "met"
    outcome = Word.HOLDS if hopeful else decision.word
    word, limit = _limited(outcome, basis, claim.hardware)
    why, tendency = decision.why, word if hopeful else None
    if fewest < FEWEST and word is not Word.NOT_TESTABLE:
        tendency = None if word is Word.NOT_SETTLED else word
        look = f"this is a look with {fewest} of the {FEWEST} {test.samples} that a verdict needs"
        why = f"{why.rstrip('.')}; {look}."
    word = Word.NOT_SETTLED if tendency else word
    return replace(
        blank,
        word=word,
        why=capital(why),
        limit=limit,
        deciding=tuple(decision.deciding),
        tendency=tendency,
        confirm=confirm,
    )


def _one_per_problem(test: Test, cells: Sequence[ClaimCell]) -> list[ClaimCell]:
    """Return one cell per problem, by the order in the module's text."""
    by_problem: dict[str, list[ClaimCell]] = {}
    for cell in cells:
        by_problem.setdefault(cell.problem, []).append(cell)

    def rank(cell: ClaimCell) -> tuple[Any, ...]:
        outdone = is_outdone(test, cell, by_problem[cell.problem])
        return not cell.reason, cell.reliable, not outdone, cell.confirms, *cell.weight

    best = {problem: sorted(each, key=rank)[-1] for problem, each in by_problem.items()}
    return [cell for cell in cells if best[cell.problem] is cell]


def _limited(word: Word, basis: Basis, hardware: Hardware) -> tuple[Word, str]:
    """Weaken a word that the basis cannot support, and say why; "" if nothing limits it."""
    if basis is Basis.PROXY and word not in (*OPEN, Word.NOT_TESTABLE):
        return Word.OTHER_CONDITIONS, "A proxy neither confirms nor refutes a claim."
    if word is not Word.FALLS_SHORT or basis is Basis.AS_PUBLISHED:
        return word, ""
    if hardware.scope == "general":
        return word, "The claim is about GPUs in general, so any GPU can refute it."
    return Word.OTHER_CONDITIONS, f"The claim is about {join_words(hardware.gpus)}."


def _claim(name: str, claim: Claim, device: str, tests: list[TestVerdict]) -> Verdict:
    """Combine the verdicts of a claim's tests: of those that are no proxies, if one can run."""
    whole = [t for t in tests if not t.test.proxy]
    testable = [t for t in whole if t.word is not Word.NOT_TESTABLE]
    used = testable or [t for t in tests if t.test.proxy and t.word is not Word.NOT_TESTABLE]
    word, basis, tendency = Word.NOT_TESTABLE, tests[0].basis if tests else Basis.NONE, None
    reasons = [f"{t.test.name}: {t.why}" if len(used or tests) > 1 else t.why
               for t in used or tests]  # fmt: skip
    if not used:
        needed = f"a test needs {claim.missing}" if claim.missing else ""
        reasons = [f"{reason.rstrip('.')}." for reason in (needed, *reasons) if reason]
    else:
        capped = bool(testable) and len(testable) < len(whole)
        words = [t.word for t in used]
        other = not testable and Word.OTHER_CONDITIONS in words
        word = Word.OTHER_CONDITIONS if other else _combine(words, capped)
        if word in OPEN and any(t.tendency for t in used):
            combined = _combine([t.tendency or t.word for t in used], capped)
            tendency = None if combined in OPEN else combined
        measured = [t.basis for t in used if t.basis is not Basis.NONE]
        basis = max(measured, key=list(Basis).index, default=Basis.NONE)
    reasons += dict.fromkeys(t.limit for t in used if t.limit)
    why = " ".join(map(capital, reasons))
    return Verdict(name, device, word, basis, why, tuple(tests), tendency)


def _combine(words: Sequence[Word], capped: bool) -> Word:
    """Return the verdict on several tests; an open one must not matter, whichever way it ends."""
    rest = [word for word in words if word not in OPEN]
    if len(rest) < len(words):
        either = {_combine([*rest, end], capped) for end in (Word.HOLDS, Word.FALLS_SHORT)}
        open_ = Word.NOT_MEASURED if set(words) == {Word.NOT_MEASURED} else Word.NOT_SETTLED
        return either.pop() if len(either) == 1 else open_
    if len(set(words)) == 1 and not (capped and Word.HOLDS in words):
        return words[0]
    return Word.HOLDS_IN_PART if {Word.HOLDS, Word.HOLDS_IN_PART} & {*words} else Word.FALLS_SHORT


def _no_cell(claim: Claim, test: Test) -> str:
    """Say why a test has no cell."""
    if test.of_file:
        script = "train_lm.py --pattern" if test.trained else "whole_model.py"
        return f"no file of `experiments/{script}` was given"
    measure = claim.measured(test)
    files = f"; {measure.suite} needs files (--data)" if measure and measure.data else ""
    return f"nothing is measured yet{files}"

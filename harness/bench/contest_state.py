"""What a contest is made of while it runs.

    ContestOptions    how to run it, as a runner asks
    Entry             a contender on its way: launch, clock, rows
    RunningContest    the problem with its operands; turns what a contender raises into its row

After a CUDA error nothing more can be trusted: Fatal.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.harness.bench.operands import DenseOperands, Layer
from sparsebench.harness.bench.sampling import CHAIN, Measure
from sparsebench.harness.bench.spot_checks import Spots
from sparsebench.harness.bench.tampering import Guard, Meddled, Seal
from sparsebench.harness.bench.timing import Chain, Timed
from sparsebench.harness.catalog import keywords
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import Launch
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Problem, Row, Status

Announce = Callable[[str, str], None]
"""Called with a case id and a stage before anything of that case runs: if the process dies or
hangs, its parent knows whose fault it was."""

OnFailure = Callable[[str, str, str], None]
"""Called with a case id, why the case ended, and the traceback (explain.py)."""


def ignore_failure(case: str, reason: str, traceback: str) -> None:
    """Tell nobody."""


class Fatal(Exception):
    """The device no longer answers; the process must end. Carries the case and the reason."""

    def __init__(self, case: str, detail: str) -> None:
        """Blame a case id, or nobody ("")."""
        super().__init__(detail)
        self.case, self.detail = case, detail


@dataclass(frozen=True)
class ContestOptions:
    """How a contest is to be run.

    replicate  number of this process in the run, from 0
    attempt    number of this try; above 0, an earlier one lost its worker
    reference  whether the contest is one of references.py
    measures   what is timed, each giving a row
    pinned     by case id, what a kernel chose before: no search; empty where each process searches
    timed      by case id, what an earlier process timed for a choice (Row.candidates)
    ceilings   of the device, where they are known
    energy     also measure the energy of a call, which takes 2 to 3 s
    """

    replicate: int = 0
    attempt: int = 0
    reference: bool = False
    measures: tuple[Measure, ...] = (("kernel", "cold"),)
    pinned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timed: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    energy: bool = False

    @property
    def careful(self) -> bool:
        """Wait for and announce every sample: an attempt before this one was lost."""
        return self.attempt > 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what a runner sends."""
        ceilings = data["ceilings"] and Ceilings.from_json(data["ceilings"])
        measures = tuple((scope, cache) for scope, cache in data["measures"])
        return cls(**{**data, "ceilings": ceilings, "measures": measures})


@dataclass
class Entry:
    """A contender on its way through the contest; `row` ends up on disk, once a measure.

    chain    its launches on all layers, where layers that follow each other are timed
    alone    why it has no chain, though that is asked for; its other measures do not mind
    """

    row: Row
    pattern: Format | None = None  # what the output is to be packed like, where it is not dense
    launch: Launch | None = None
    timed: Timed | None = None
    chain: Chain | None = None
    chained: Timed | None = None
    alone: tuple[Status, str] | None = None
    measured: dict[Measure, Row] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Say whether nothing has gone wrong yet."""
        return self.row.status is Status.OK

    def end(self, status: Status, detail: str) -> None:
        """Record how the contender ended, and let go of what it holds."""
        self.row = replace(self.row, status=status, detail=detail)
        self.launch = self.timed = self.chain = self.chained = None
        self.measured.clear()

    def clock(self, scope: str) -> Timed | None:
        """Return what is called in a scope: a captured graph, or the launch; None if it ended."""
        if scope == "op" and self.timed and self.timed.clock != "host":
            assert self.launch is not None
            return Timed(self.launch.run, "events")
        return self.chained if scope == CHAIN else self.timed

    def leave_chain(self, status: Status, reason: str) -> None:
        """Record why there is no chain of it, and let go of its layers."""
        self.chain = self.chained = None
        self.alone = status, reason

    def rows(self, measures: tuple[Measure, ...]) -> list[Row]:
        """Return a row for each measure; what was not measured says so by its status."""
        blank = {(s, c): replace(self.row, scope=s, cache=c) for s, c in measures}
        if self.alone and self.running:
            status, reason = self.alone
            for measure in blank:
                if measure[0] == CHAIN:
                    blank[measure] = replace(blank[measure], status=status, detail=reason)
        return [self.measured.get(measure, row) for measure, row in blank.items()]


@dataclass
class RunningContest:
    """A problem being measured. `spent_s` is where the time went, by stage.

    layers    the problem and its operands; behind them the further layers of a chain, if one is
              timed. `chain_spots` are of all their activations
    """

    problem: Problem
    op: Op
    device: torch.device
    options: ContestOptions
    dense: DenseOperands
    entries: list[Entry]
    announce: Announce
    guard: Guard
    seal: Seal
    spots: Spots
    layers: list[Layer]
    chain_spots: Spots
    on_failure: OnFailure = ignore_failure
    draw: int = 0  # of the activations, now
    timed_last: str = ""  # the case of the last sample, where each is announced
    output_bytes: int = 0
    spent_s: dict[str, float] = field(default_factory=dict)
    packed: dict[str, tuple[dict[str, Format], float]] = field(default_factory=dict)

    def inspect(self) -> None:
        """Raise Meddled where an operand or the harness itself is not what it was."""
        self.seal.check()
        self.guard.check()

    def spots_of(self, scope: str) -> Spots:
        """Return what looks at the calls of a scope."""
        return self.chain_spots if scope == CHAIN else self.spots

    def keep(self, which: str) -> None:
        """Copy the activations of all layers as they are now (spots.py)."""
        self.spots.keep(which)
        if len(self.layers) > 1:
            self.chain_spots.keep(which)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.spent_s[name] = self.spent_s.get(name, 0.0) + elapsed

    @contextmanager
    def at(self, entry: Entry, stage: str) -> Iterator[None]:
        """Announce the contender, and turn whatever it raises into its row."""
        case = entry.row.case.id
        self.announce(case, stage)
        try:
            with self.stage(stage):
                yield
                synchronize(self.device)
        except Meddled as found:
            entry.end(Status.WRONG, f"{stage}: {found}")
        except (FormatError, Unsupported) as refusal:
            entry.end(Status.UNSUPPORTED, str(refusal))
            self._mend()
        except (torch.OutOfMemoryError, MemoryError) as error:
            entry.end(Status.OUT_OF_MEMORY, one_line(error))
            self.on_failure(case, entry.row.detail, traceback_of(error))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._mend()
        except Exception as error:
            try:
                synchronize(self.device)
            except Exception as dead:
                raise Fatal(case, f"{stage}: {one_line(dead)}") from error
            entry.end(Status.FAILED, f"{stage}: {one_line(error)}")
            self.on_failure(case, entry.row.detail, traceback_of(error))
            self._mend()

    def _mend(self) -> None:
        """Put back what a contender changed before it ended in another way."""
        with suppress(Meddled):
            self.inspect()


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that an error surfaces where it was made."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bound(function: Callable[..., Tensor], problem: Problem) -> Callable[..., Tensor]:
    """Set the arguments of an op's function that are fields of the problem."""
    return partial(function, **{name: problem[name] for name in keywords(function)})


def one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message, where it has one."""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # its text is code of a contender
        lines = [""]
    return f"{type(error).__name__}: {lines[0][:400]}"


LONGEST = 20_000  # characters; the last ones stay


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and of what caused it, with modules for files."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as unsayable:  # its text is code of a contender
        text = f"{type(error).__name__}, whose text cannot be had: {type(unsayable).__name__}\n"
    for file, module in set(_modules(error)):
        text = text.replace(f'File "{file}"', f'File "{module.replace(".", "/")}.py"')
    return text if len(text) <= LONGEST else f"...\n{text[-LONGEST:]}"


def _modules(error: BaseException | None) -> Iterator[tuple[str, str]]:
    """Yield the file and the module of each frame, also of causes and contexts."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            yield frame.f_code.co_filename, str(frame.f_globals.get("__name__", "?"))
        error = error.__cause__ or error.__context__

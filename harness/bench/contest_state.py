"""The state of a running contest.

    ContestOptions    how to run it, as the runner asks
    Entry             a contender: launch, timed calls, rows
    RunningContest    the problem with its operands; turns an exception of a contender into its row

After a CUDA error no result can be trusted: Fatal.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from sparsebench.errors import FormatError, SparsebenchError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.harness.bench.operands import DenseOperands, Layer
from sparsebench.harness.bench.process_state import rewritten_modules
from sparsebench.harness.bench.sampling import CHAIN, Measure, layers_of
from sparsebench.harness.bench.spot_checks import Spots
from sparsebench.harness.bench.tampering import Guard, Seal, TamperingError
from sparsebench.harness.bench.timing import Chain, TimedCall
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import Launch
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Problem, Row, Status

Announce = Callable[[str, str], None]
"""Called with a case id and a stage before anything of that case runs, so that the parent knows
which case to blame if the process dies or hangs."""

OnFailure = Callable[[str, str, str], None]
"""Called with a case id, the reason why the case ended, and the traceback."""

LONGEST = 20_000  # characters of a traceback; the last ones are kept


class Fatal(Exception):
    """The device no longer answers, so the process must end; `case` is "" if none is to blame."""

    def __init__(self, case: str, detail: str) -> None:
        super().__init__(detail)
        self.case, self.detail = case, detail


@dataclass(frozen=True)
class ContestOptions:
    """How a contest is run.

    replicate  number of this process in the run, from 0
    attempt    number of this attempt; above 0, an earlier one lost its worker, so every sample is
               announced and awaited
    reference  True for a noise-floor contest (plan/selection.py)
    measures   what is timed; each gives a row
    pinned     choices by case id, taken without a search; empty if each process searches
    timed      by case id, what an earlier process timed for a choice (Row.candidates)
    checked    by case id, the configurations that an earlier process of this run found right
    ceilings   the device's, if known
    energy     also measure the energy of a call, which takes 2 to 3 s
    """

    replicate: int = 0
    attempt: int = 0
    reference: bool = False
    measures: tuple[Measure, ...] = (("kernel", "cold"),)
    pinned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timed: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    checked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    energy: bool = False

    def after(self, rows: Iterable[Row]) -> Self:
        """Return the options after these rows: a reference among them may raise the ceilings."""
        return replace(self, ceilings=self.ceilings and self.ceilings.after(rows)[0])

    def bounded(self, row: Row, output_bytes: int) -> Row:
        """Return the row with its bound, if the ceilings are known."""
        if self.ceilings is None:
            return row
        work = row.flops or 0.0, row.fewest_bytes or 0, output_bytes
        dtype, layers = row.case.problem["dtype"], layers_of(row.scope)
        bound_us, by = self.ceilings.bound(dtype, *work, row.cache, layers) or (None, None)
        return replace(row, bound_us=bound_us, bound_by=by)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        ceilings = data["ceilings"] and Ceilings.from_json(data["ceilings"])
        measures = tuple((scope, cache) for scope, cache in data["measures"])
        return cls(**{**data, "ceilings": ceilings, "measures": measures})


def configuration(row: Row) -> str:
    """Return what a row's kernel chose, and the digest of its machine code, as text."""
    return json.dumps([row.choice, row.code], sort_keys=True)


@dataclass
class Entry:
    """A contender in a contest.

    row            its result so far, without times
    pattern        for a packed output: the format that it must have
    chain          its launches on all layers, if a chain is timed
    chain_failure  why its chain is not timed; its other measures are not affected
    results        rows with times, by measure
    """

    row: Row
    pattern: Format | None = None
    launch: Launch | None = None
    timed_call: TimedCall | None = None
    chain: Chain | None = None
    timed_chain: TimedCall | None = None
    chain_failure: tuple[Status, str] | None = None
    results: dict[Measure, Row] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.row.status is Status.OK

    def end(self, status: Status, detail: str) -> None:
        """Record how the contender ended, and release its memory."""
        self.row = replace(self.row, status=status, detail=detail)
        self.launch = self.timed_call = self.chain = self.timed_chain = None
        self.results.clear()

    def call_in(self, scope: str) -> TimedCall | None:
        """Return the call that is timed in a scope, or None if the contender ended."""
        if scope == "op" and self.timed_call and self.timed_call.clock != "host":
            assert self.launch is not None
            return TimedCall(self.launch.run, "events")
        return self.timed_chain if scope == CHAIN else self.timed_call

    def leave_chain(self, status: Status, reason: str) -> None:
        """Record why the contender has no chain, and release its layers."""
        self.chain = self.timed_chain = None
        self.chain_failure = status, reason

    def rows(self, measures: tuple[Measure, ...]) -> list[Row]:
        """Return a row for each measure; a row without a time has a status that says why."""
        blank = {(s, c): replace(self.row, scope=s, cache=c) for s, c in measures}
        if self.chain_failure and self.running:
            status, reason = self.chain_failure
            for measure in blank:
                if measure[0] == CHAIN:
                    blank[measure] = replace(blank[measure], status=status, detail=reason)
        return [self.results.get(measure, row) for measure, row in blank.items()]


@dataclass(kw_only=True)
class RunningContest:
    """A problem being measured.

    layers        the problem with its operands, then the further layers of a chain, if one is timed
    chain_spots   like `spots`, for the activations of all layers
    draw          number of the present draw of the activations
    timed_last    the case of the last sample, if each is announced
    conversions   weights and µs of each conversion, by format and parameters
    """

    problem: Problem
    op: Op
    device: torch.device
    options: ContestOptions
    entries: list[Entry]
    announce: Announce
    on_failure: OnFailure
    guard: Guard
    seal: Seal
    layers: list[Layer]
    spots: Spots
    chain_spots: Spots
    draw: int = 0
    timed_last: str = ""
    output_bytes: int = 0
    spent_s: dict[str, float] = field(default_factory=dict)
    conversions: dict[str, tuple[dict[str, Format], float]] = field(default_factory=dict)

    @property
    def dense(self) -> DenseOperands:
        return self.layers[0].dense

    def check_tampering(self) -> None:
        """Raise TamperingError if an operand or the harness itself has changed."""
        self.seal.check()
        self.guard.check()
        if self.options.attempt and (modules := rewritten_modules()):
            raise TamperingError(f"rewrote the files of {', '.join(modules[:3])}")

    def spots_of(self, scope: str) -> Spots:
        return self.chain_spots if scope == CHAIN else self.spots

    def keep(self, which: str) -> None:
        """Copy the present activations of all layers (spot_checks.py)."""
        self.spots.keep(which)
        if len(self.layers) > 1:
            self.chain_spots.keep(which)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.spent_s[name] = self.spent_s.get(name, 0.0) + elapsed

    @contextmanager
    def at(self, entry: Entry, stage: str) -> Iterator[None]:
        """Announce the contender, and turn any exception of the block into its row."""
        case = entry.row.case.id
        self.announce(case, stage)
        try:
            with self.stage(stage):
                yield
                synchronize(self.device)
        except TamperingError as error:
            entry.end(Status.WRONG, f"{stage}: {error}")
        except Exception as error:
            status, reason = end_status(error)
            if status is Status.FAILED:
                try:
                    synchronize(self.device)
                except Exception as dead:
                    raise Fatal(case, f"{stage}: {one_line(dead)}") from error
                reason = f"{stage}: {one_line(error)}"
            entry.end(status, reason)
            if status is not Status.UNSUPPORTED:
                self.on_failure(case, reason, traceback_of(error))
            if status is Status.OUT_OF_MEMORY and self.device.type == "cuda":
                torch.cuda.empty_cache()
            with suppress(TamperingError):  # restore what it changed before it failed
                self.check_tampering()


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that an error appears where it was caused."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


NO_MEMORY = torch.OutOfMemoryError, MemoryError


def end_status(error: Exception) -> tuple[Status, str]:
    """Return the status of a case that ended with this error, and the reason."""
    if isinstance(error, FormatError | Unsupported):
        return Status.UNSUPPORTED, str(error)
    if isinstance(error, NO_MEMORY):
        return Status.OUT_OF_MEMORY, one_line(error)
    ours = isinstance(error, SparsebenchError)  # such as a file that is missing or has changed
    return Status.FAILED, str(error) if ours else one_line(error)


def one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # the message is computed by a contender's code
        lines = [""]
    return f"{type(error).__name__}: {lines[0][:400]}"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and its causes, with module names for paths."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as second:  # the message is computed by a contender's code
        text = f"{type(error).__name__}, whose message raises {type(second).__name__}\n"
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    frames = (frame for each in chain for frame, _ in traceback.walk_tb(each.__traceback__))
    for file, module in {
        (f.f_code.co_filename, str(f.f_globals.get("__name__", "?"))) for f in frames
    }:
        text = text.replace(f'File "{file}"', f'File "{module.replace(".", "/")}.py"')
    return text if len(text) <= LONGEST else f"...\n{text[-LONGEST:]}"

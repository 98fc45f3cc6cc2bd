"""The state of a contender in a contest, and how it ends.

ContestOptions    how a contest is run, as the runner asks
RunningContender  a contender: its calls, and its rows
end_status        an exception ─> the status of its row. After a CUDA error no result can be
                  trusted: Fatal
"""

import json
import random
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Self

import torch

from sparsebench.errors import FormatError, SparsebenchError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.harness.bench.sampling import CHAIN, SCOPES, Measure, call_of, layers_of
from sparsebench.harness.bench.spot_checks import Outputs, SpotChecks
from sparsebench.harness.bench.timing import Chain, Samples, TimedCall, launches_of
from sparsebench.kernels._kernel import Launch
from sparsebench.results.ceilings import Ceilings, check_bound
from sparsebench.results.record import Contender, Row, Status

Announce = Callable[[str, str], None]
"""Called with a case id and a stage before anything of that case runs, so that the parent knows
which case to blame if the process dies or hangs."""

OnFailure = Callable[[str, str, str], None]
"""Called with a case id, the reason why the case ended, and the traceback."""

LONGEST_REASON = 1000  # characters
LONGEST = 20_000  # characters of a traceback; the last ones are kept


class Fatal(Exception):
    """The device no longer answers, so the process must end; `case` is "" if none is to blame."""

    def __init__(self, case: str, detail: str) -> None:
        super().__init__(detail)
        self.case, self.detail = case, detail


class GuestLoss(Exception):
    """A guest has ended, or cannot go on; with the status and the reason of its row."""

    def __init__(self, status: Status, reason: str, traceback: str = "") -> None:
        super().__init__(line_of(reason))
        self.status, self.traceback = status, traceback[-LONGEST:]


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
    ceilings   the device's, if known; those of a CPU, whose cores are shared, are not
    energy     also measure energy and time of a call under load, which takes 8 s
    timeout_s  time without an announcement after which the process is ended
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
    timeout_s: float = 120.0

    def with_ceilings_after(self, rows: Iterable[Row]) -> Self:
        """Return the options after these rows: a reference among them may raise the ceilings."""
        return replace(self, ceilings=self.ceilings and self.ceilings.after(rows)[0])

    def bounded(self, row: Row, output_bytes: int) -> Row:
        """Return the row with its bound, if the ceilings are known and it is not of a CPU."""
        if self.ceilings is None or row.clock == "host":
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


def with_samples(row: Row, taken: Samples, options: ContestOptions, output_bytes: int) -> Row:
    """Put samples into a row, unless they are faster than the device's ceilings allow.

    A chain's samples are divided into those of one layer, whose operands and outputs are cold like
    all others.
    """
    taken = taken.per_layer(layers_of(row.scope))
    row = check_bound(options.bounded(row, output_bytes), median(taken.times_us))
    if row.status is not Status.OK:
        return row
    times: dict[str, Any] = {"samples_us": taken.times_us, "samples_per_block": taken.per_round}
    return replace(row, **times, late=taken.late)


def configuration(row: Row) -> str:
    """Return what a row's kernel chose, and the digest of its machine code, as text."""
    return json.dumps([row.choice, row.code], sort_keys=True)


def checked_before(row: Row, options: ContestOptions) -> bool:
    """Return whether an earlier process compared the whole output of this configuration."""
    return configuration(row) in options.checked.get(row.case.id, ())


@dataclass
class CheckedCall:
    """A call that is checked and timed as one: a launch alone, or a chain of layers."""

    work: Launch | Chain
    spots: SpotChecks
    timed: TimedCall | None = None

    @property
    def call(self) -> Callable[[], Outputs]:
        return self.timed.call if self.timed else self.work.run

    @property
    def launches(self) -> tuple[Launch, ...]:
        return launches_of(self.work)


@dataclass
class RunningContender:
    """A contender in a contest; only the contest changes it, and its stages end it (stages.py).

    row            its result so far, without times
    pattern        for a packed output: the format that it must have
    calls          its launch (`kernel`), and its launches on all layers if a chain is timed
    chain_failure  why its chain is not timed; its other measures are not affected
    results        rows with times, by measure
    """

    row: Row
    pattern: Format | None = None
    calls: dict[str, CheckedCall] = field(default_factory=dict)
    chain_failure: tuple[Status, str] | None = None
    results: dict[Measure, Row] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.row.status is Status.OK

    @property
    def contender(self) -> Contender:
        return self.row.case.contender

    def timed_in(self, scope: str) -> TimedCall | None:
        """Return the call that is timed in a scope, or None if there is none."""
        checked = self.calls.get(call_of(scope))
        timed = checked and checked.timed
        return timed.in_scope(scope, checked.work.run) if checked and timed else None

    def spots_in(self, scope: str) -> SpotChecks:
        return self.calls[call_of(scope)].spots

    def record(self, **facts: Any) -> None:
        """Add facts to the row."""
        self.row = replace(self.row, **facts)

    def record_timed(self, scopes: Collection[str], **facts: Any) -> None:
        """Add facts to the rows with times of some scopes."""
        for measure, row in self.results.items():
            if measure[0] in scopes:
                self.results[measure] = replace(row, **facts)

    def record_errors(self, scope: str, errors: Mapping[str, Any]) -> None:
        """Add the errors of the launch alone (scope kernel), or of the chain."""
        if scope != CHAIN:
            self.record(**errors)
        of_launch = {measured for measured, _ in self.results} | {CHAIN}
        scopes = {CHAIN} if scope == CHAIN else of_launch
        self.record_timed(scopes, **errors, draws=self.row.draws)

    def add(
        self, measure: Measure, call: TimedCall, taken: Samples, options: ContestOptions, size: int
    ) -> None:
        """Add the row of a measure, with samples of a call; `size` are the bytes of its output."""
        scope, cache = measure
        row = replace(self.row, scope=scope, cache=cache, clock=call.clock, detail=call.why)
        self.results[measure] = with_samples(row, taken, options, size)

    def add_reading(self, measure: Measure, call: TimedCall, taken: Samples) -> None:
        """Add the row of a reading, which has no bound: it is a part of a call, or a mean."""
        scope, cache = measure
        self.results[measure] = replace(
            self.row,
            scope=scope,
            cache=cache,
            clock=call.clock,
            detail=call.why,
            samples_us=taken.times_us,
            samples_per_block=taken.per_round,
        )

    def end(self, status: Status, detail: str) -> None:
        """Record how the contender ended, and release its memory."""
        self.record(status=status, detail=detail)
        self.release()
        self.results.clear()

    def release(self) -> None:
        self.calls = {}

    def leave_chain(self, status: Status, reason: str) -> None:
        """Record why the contender has no chain, and release its layers."""
        self.calls = {scope: call for scope, call in self.calls.items() if scope != CHAIN}
        self.chain_failure = status, f"chain: {reason}"

    def rows(self, measures: tuple[Measure, ...]) -> list[Row]:
        """Return a row for each measure; a row without a time has a status that says why."""
        blank = {(s, c): replace(self.row, scope=s, cache=c) for s, c in measures}
        if self.chain_failure and self.running:
            status, reason = self.chain_failure
            for measure in blank:
                if measure[0] == CHAIN:
                    blank[measure] = replace(blank[measure], status=status, detail=reason)
        for measure, row in blank.items():
            if self.running and measure[0] not in SCOPES:
                blank[measure] = replace(
                    row, status=Status.UNSUPPORTED, detail=f"this kernel reads no {measure[0]}"
                )
        return [self.results.get(measure, row) for measure, row in blank.items()]


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that an error appears where it was caused."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exchange_twins(entries: Sequence[RunningContender], coin: random.Random) -> None:
    """Give each A/A twin the calls of its original, and the reverse, with even odds.

    A twin takes the choice of its original, so it is always prepared later. Without the exchange,
    a cost of the order of allocation would have the same sign in every process. Both must run the
    same machine code, and both or neither have a chain.
    """
    by_case = {entry.row.case.id: entry for entry in entries}
    for twin in (entry for entry in entries if entry.contender.twin):
        original = by_case.get(twin.row.case.original.id)
        if original and coin.random() < 0.5 and original.running and _alike(original, twin):
            original.calls, twin.calls = twin.calls, original.calls


def _alike(original: RunningContender, twin: RunningContender) -> bool:
    a, b = ((e.running, e.row.choice, e.row.code, e.calls.keys()) for e in (original, twin))
    return a == b


NO_MEMORY = torch.OutOfMemoryError, MemoryError


def end_status(error: Exception) -> tuple[Status, str]:
    """Return the status of a case that ended with this error, and the reason."""
    if isinstance(error, GuestLoss):
        return error.status, str(error)
    if isinstance(error, FormatError | Unsupported):
        return Status.UNSUPPORTED, str(error)
    if isinstance(error, NO_MEMORY):
        return Status.OUT_OF_MEMORY, one_line(error)
    ours = isinstance(error, SparsebenchError)  # such as a file that is missing or has changed
    return Status.FAILED, str(error) if ours else one_line(error)


def line_of(text: str) -> str:
    """Return the beginning of a text that another process wrote, as one line."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_REASON])


def one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # the message is computed by a contender's code
        lines = [""]
    return f"{type(error).__name__}: {lines[0][:400]}"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and its causes, with module names for paths."""
    if isinstance(error, GuestLoss):
        return error.traceback
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

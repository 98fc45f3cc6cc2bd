"""Measure a whole run: run a suite's contests in worker processes and write a run directory.

The run directory is created after the first worker has responded, and it is valid from then on: the
rows of every contest are on disk before the next contest starts, and run.json says whether the run
has finished. The directory stays locked until the run ends.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from sparsebench._discovery import CONSTANTS, modules
from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench import contest_state, energy
from sparsebench.harness.doctor.findings import failure, no_commit
from sparsebench.harness.machine import nvml
from sparsebench.harness.machine.code import is_refused
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.run import plan_part
from sparsebench.harness.run.history import History
from sparsebench.harness.run.recorded_plan import (
    code_of,
    completed_rows,
    require_same_choices,
    require_same_machine,
)
from sparsebench.harness.run.run_json import Counts, Flags, OnMessage, Record, Watch, now
from sparsebench.harness.run.runner import Runner
from sparsebench.results import files
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.formatting import amount
from sparsebench.results.record import Row, Status
from sparsebench.results.run import bundle, provenance, store
from sparsebench.results.run.consistency import Owners, faults
from sparsebench.results.statistics.ratio import FEWEST

Progress = Callable[[int, int, str], None]
"""Called with contests done, contests in all, and the problem that is measured."""

Rank = Callable[[Contest], int]

LEAST_S, MOST_S = 0.1, 86400.0  # limits of --timeout


@dataclass(frozen=True)
class RunOptions:
    """How a run is measured, beyond its suite and its flags.

    progress    called before each contest
    on_message  receives machine findings and failure reasons
    searched    rows of an earlier run, among whose finalists the processes of a verdict search
    origin      the bundle that this run reproduces or confirms, for run.json
    until       when to end, by time.monotonic(). A contest starts only if it would end
                before, judged by its time in the last process or the longest time so far
    rank        contests of a lower rank come first in every process; ties are in random order
    even        the first process takes an equal share of the time until `until`, and later ones
                repeat what it reached; --resume measures the others
    part        set if several processes share the plan (plan_part.py)
    """

    progress: Progress = lambda done, total, problem: None
    on_message: OnMessage = lambda finding: None
    searched: Sequence[Row] = ()
    origin: Mapping[str, Any] | None = None
    until: float = inf
    rank: Rank | None = None
    even: bool = False
    part: plan_part.PlanPart | None = None


class Stopped(KeyboardInterrupt):
    """A run was interrupted; `--resume` continues it from the directory `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


class Unfinished(ResultError):
    """The time ended before the run at `path` was whole; its parts are kept."""

    def __init__(self, path: Path, done: int, of: int) -> None:
        expected = f"expected all {amount(of, 'contest')}, found {done}"
        super().__init__(f"{path}: {expected}; `sparsebench run --resume {path}` measures the rest")
        self.path, self.done, self.of = path, done, of


def measure(
    suite: Suite,
    flags: Flags,
    out: Path | None,
    resume: Path | None,
    options: RunOptions = RunOptions(),
) -> Path:
    """Run the suite, or resume a stopped run, and return the sealed run directory.

    out     the directory of a new run; by default runs/TIME-SUITE-DEVICE
    resume  the directory of a stopped run, or None

    Raises SuiteError or ResultError if the run cannot start, and Stopped if it is interrupted
    after its directory was made.
    """
    part, since, began = options.part, now(), monotonic()
    _require_flags(flags)
    contests = planned_contests(suite, flags.device, flags.only, flags.unpruned)
    if out and not resume:
        require_new(out)
    for folder in CONSTANTS:
        modules(folder)  # two files of one name are an error now, not when the report is built
    with ExitStack() as stack:
        if resume:
            stack.enter_context(store.lock_run(resume))
        rows = completed_rows(resume, suite, flags, contests) if resume else []
        searched, processes = options.searched, flags.replicates
        chosen_by = provenance.planned_choices(processes, bool(searched))
        on_gpu = flags.device.startswith("cuda")
        history = History(share=processes < FEWEST, share_references=on_gpu)
        place = flags.device, flags.data, flags.timeout_s
        runner = Runner(*place, history=history, processes=processes)
        stack.callback(runner.kill)
        if part:
            part.start(runner)
            history.remember(part.earlier, same_run=False)
        if chosen_by is provenance.Choices.EARLIER:
            history.remember(searched, same_run=False)
        history.remember(rows)
        identity = runner.about["identity"]
        if flags.energy:
            energy.require_meter(identity)
        # Before anything runs: a GPU reports how busy it was in the last second.
        watch = Watch(flags.device, identity, runner.pid, options.on_message)
        before = {**(options.origin or {}), "choices": chosen_by}
        if part:
            before["part"] = {"number": part.number, "host": part.host}
        record = Record(suite.name, flags, len(contests) * processes, before, since)
        environment = runner.about["environment"] | code_of(contests)
        if is_refused(environment):
            options.on_message(no_commit())
        if part:
            part.require_alike(environment)
        if resume:
            require_same_machine(resume, environment)
            stopped, path = store.read(resume), resume
            require_same_choices(resume, stopped.state, chosen_by)
            record = replace(record, before={**stopped.state, "choices": chosen_by})
            bundle.unseal(resume)
            store.replace_rows(resume, rows)
            ceilings = stopped.environment["ceilings"]
        else:
            ceilings = runner.ceilings(contests)
            environment |= {"ceilings": ceilings}
            path = create_directory(out, suite, environment, record, runner.about["slug"])
            stack.enter_context(store.lock_run(path))
        runner.log.file = path / "worker.log"
        runner.log.on_failure = lambda reason, text: options.on_message(failure(reason, text))
        contest_options = contest_state.ContestOptions(
            measures=suite.measures,
            ceilings=Ceilings.from_json(ceilings) if ceilings else None,
            energy=flags.energy,
        )
        began += runner.spent_s["ceilings"]  # which no later process measures
        share_s = (options.until - began) / processes if options.even else inf
        session = _Session(
            runner, path, record, contests, contest_options, rows, watch, options, began + share_s
        )
        try:
            session.measure()
        except KeyboardInterrupt as stop:
            raise Stopped(path) from stop
    return path


def _require_flags(flags: Flags) -> None:
    """Raise SuiteError for values that no run can have; the command line rejects most earlier."""
    for name, value, least, most, unit in (
        ("timeout", flags.timeout_s, LEAST_S, MOST_S, "s"),
        ("replicates", flags.replicates, 1, store.REPLICATES, ""),
    ):
        if not least <= value <= most:
            limits = f"{least:g} to {most:g} {unit}".strip()
            raise SuiteError(f"--{name}: expected {limits}, found {value}")
    if flags.data and not flags.data.is_dir():
        raise SuiteError(f"--data {flags.data}: expected a folder, found none")


def require_new(out: Path) -> None:
    """Raise SuiteError if the run directory cannot be made, before anything is measured."""
    if not files.utf8(str(out)):
        raise SuiteError(f"--out: expected a name in UTF-8, found {str(out)!a}")
    if not store.is_new(out):
        problem = "expected a new directory, found one; --resume continues a run"
        raise SuiteError(f"--out {out}: {problem}")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        actual = f"{above}, which is {'read-only' if above.is_dir() else 'a file'}"
        raise SuiteError(f"--out {out}: expected a folder to write into, found {actual}")


def create_directory(
    out: Path | None, suite: Suite, environment: Mapping[str, Any], record: Record, slug: str
) -> Path:
    state = record.at("running", Counts(), {})
    named = Path("runs") / f"{record.since:%Y%m%d-%H%M%S}-{suite.name}-{slug}"
    for attempt in count(1):
        path = out or named.with_name(f"{named.name}-{attempt}" if attempt > 1 else named.name)
        try:
            store.create(path, suite.text, environment, state)
            return path
        except ResultError:
            if out or store.is_new(path):
                raise
    raise AssertionError


def without_faults(row: Row, owners: Owners) -> Row:
    """Return a row, or one that says why it is not taken: `validate` would refuse the bundle."""
    others = (f"expected {expected}, found {actual}" for expected, actual in faults(row, owners))
    if not (fault := store.unreadable(row) or next(others, "")):
        return row
    about = row.replicate, row.attempt, row.reference, row.device, row.scope, row.cache
    return Row(row.case, Status.FAILED, *about, detail=f"a row that no reader takes: {fault}")


@dataclass
class _Session:
    """The measuring part of a run: append contest by contest, and keep run.json true."""

    runner: Runner
    path: Path
    record: Record
    contests: list[Contest]
    contest_options: contest_state.ContestOptions
    rows: list[Row]  # starts with the rows of an earlier session
    watch: Watch
    options: RunOptions
    first_until: float  # when to end the first process, by time.monotonic()
    counts: Counts = field(init=False)
    spent_s: Counter[str] = field(init=False)
    done: int = field(init=False)  # number of contests
    durations_s: dict[str, float] = field(default_factory=dict)  # last time of each problem
    owners: Owners = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = [without_faults(row, self.owners) for row in self.rows]
        self.counts = Counts(self.rows)
        self.spent_s = Counter(self.record.before.get("spent_s", {}))
        self.done = len(self.counts.done)

    def measure(self) -> None:
        part, identity = self.options.part, self.runner.about["identity"]
        with self._seal_at_end(), nvml.telemetry(identity, self.runner.log.add) as window:
            for replicate in range(self.record.flags.replicates):
                seed = f"{self.record.suite} {replicate}" + (f" {part.number}" if part else "")
                order = random.Random(seed).sample(self.contests, len(self.contests))
                order.sort(key=self.options.rank or (lambda contest: 0))
                missing = [c for c in order if (replicate, c.problem.id) not in self.counts.done]
                until = self.options.until
                if monotonic() >= until:
                    break
                if replicate == 0:
                    until = min(until, self.first_until)
                elif self.options.even:
                    missing = [c for c in missing if (0, c.problem.id) in self.counts.done]
                if replicate:
                    self.runner.next_process()
                left = part.take(missing, replicate) if part else missing
                self._process(replicate, self._in_time(left, until), window)
            self.runner.kill()
            self.watch.end()

    def _process(self, replicate: int, contests: Iterable[Contest], window: nvml.Window) -> None:
        window()  # drop what happened before the first contest
        options = replace(self.contest_options.with_ceilings_after(self.rows), replicate=replicate)
        for result in self.runner.run(contests, options):
            seen = window()
            rows = [replace(row, telemetry=row.telemetry or seen) for row in result.rows]
            rows = [without_faults(row, self.owners) for row in rows]
            store.append(self.path, rows)
            self.done += 1
            self.spent_s.update(result.spent_s)
            self.rows += rows
            self.counts.add(rows)
            store.set_state(self.path, self._run_json("running", self.counts))  # survives a kill
        self.options.progress(self.done, self._total(), "")

    def _in_time(self, contests: Iterable[Contest], until: float) -> Iterator[Contest]:
        """Yield and announce the contests for which there is time (RunOptions.until)."""
        began = monotonic()
        for contest in contests:
            longest_s = max(self.durations_s.values(), default=0.0)
            expected_s = self.durations_s.get(contest.problem.id, longest_s)
            if began + expected_s > until:
                return
            self.options.progress(self.done, self._total(), contest.problem.text)
            yield contest
            now = monotonic()
            self.durations_s[contest.problem.id], began = now - began, now

    def _total(self) -> int:
        part, processes = self.options.part, self.record.flags.replicates
        return part.total(self.contests, processes) if part else self.record.contests

    def _run_json(self, status: str, counts: Counts | None = None) -> dict[str, Any]:
        """Return run.json. Without `counts`, count the rows on disk.

        A stop may fall between writing a contest and counting it.
        """
        counts = counts or Counts(store.rows(self.path))
        running = self.runner.spent_s.items()
        every = {**self.spent_s, **{stage: self.spent_s[stage] + s for stage, s in running}}
        record = replace(self.record, contests=self._total())
        return record.at(status, counts, every) | self.watch.json

    @contextmanager
    def _seal_at_end(self) -> Iterator[None]:
        """Set the status in run.json: running, then finished or interrupted; then seal the run."""
        store.set_state(self.path, self._run_json("running"))
        status, ended = "interrupted", {}
        try:
            yield
            counts = self._run_json(status)["contests"]
            if counts["done"] == counts["of"]:
                status = "finished"
            else:
                ended = {"ended_by": store.BUDGET}
        finally:
            store.set_state(self.path, self._run_json(status) | ended)
            bundle.seal(self.path)

"""A whole run: a suite's contests through workers into a run directory, and on again after a stop.

A run directory is made only when a worker has answered, and is valid from then on: every contest's
rows are on disk before the next contest starts, and run.json says whether it finished. It is locked
meanwhile.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import exp, inf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from sparsebench._discovery import CONSTANTS, modules
from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench.energy import require_meter
from sparsebench.harness.bench.sampling import possible
from sparsebench.harness.doctor.findings import failure
from sparsebench.harness.machine.cpu_placement import boot
from sparsebench.harness.machine.device import tuned_tables
from sparsebench.harness.machine.telemetry import telemetry
from sparsebench.harness.plan.selection import meets, planned, text
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.run import early_start as ahead
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.recorded_plan import code_of
from sparsebench.harness.run.run_json import Counts, Flags, OnMessage, Record, Watch, now
from sparsebench.harness.run.runner import Pinned, Runner, Wanted
from sparsebench.harness.sim.gpu_model import faults
from sparsebench.results import bundle, provenance, store
from sparsebench.results.files import utf8
from sparsebench.results.formatting import rounded
from sparsebench.results.frame import logs_over
from sparsebench.results.provenance import Choices, flat
from sparsebench.results.record import Case, Row, Status
from sparsebench.results.statistics import FEWEST

Progress = Callable[[int, int, str], None]
"""Called with contests done, contests in all, and the problem that is next."""

Rank = Callable[[Contest], int]

LEAST_S, MOST_S = 0.1, 86400.0  # of --timeout


@dataclass(frozen=True)
class RunOptions:
    """How a run is measured, beyond its suite and its flags.

    progress    called before each contest
    on_message  receives machine findings and failure reasons
    pinned      choices of each process of another run, taken without a search
    origin      the bundle that this run reproduces or confirms, for run.json
    until       a time.monotonic(): no contest starts that would end after it if it took as long as
                the longest so far; --resume measures the rest
    rank        contests of a lower rank come first in every process; ties are in random order
    part        set if several processes share the plan (part.py)
    """

    progress: Progress = lambda done, total, problem: None
    on_message: OnMessage = lambda finding: None
    pinned: Sequence[Pinned] = ()
    origin: Mapping[str, Any] | None = None
    until: float = inf
    rank: Rank | None = None
    part: Part | None = None


class Stopped(KeyboardInterrupt):
    """A run was interrupted; `path` is its directory, which `--resume` goes on with."""

    def __init__(self, path: Path) -> None:
        """Keep the path."""
        super().__init__(str(path))
        self.path = path


def measure(
    suite: Suite,
    flags: Flags,
    out: Path | None,
    resume: Path | None,
    options: RunOptions = RunOptions(),
) -> Path:
    """Run the suite, or resume a stopped run, and return the sealed run directory.

    Raises SuiteError or ResultError if the run cannot start, and Stopped if it is interrupted
    after its directory was made.
    """
    part, pinned = options.part, options.pinned
    since = now()
    _require_flags(flags)
    contests = planned(suite, flags.device, flags.only, flags.shard)
    _strike(flags.device, planned(suite, flags.device))
    if out and not resume:
        _require_new(out)
    tuned_tables()
    for folder in CONSTANTS:
        modules(folder)  # a taken name is an error now, not when the report is written
    with ExitStack() as held:
        if resume:
            held.enter_context(store.locked(resume))
        done = finished(resume, suite, flags, contests) if resume else []
        chosen_by = provenance.planned_choices(flags.replicates, bool(pinned))
        share = flags.replicates < FEWEST
        given = flags.device, flags.data, flags.timeout_s
        runner = Runner(*given, pinned, share, flags.replicates)
        held.callback(runner.kill)
        if part:
            part.start(runner)
            runner.pin(part.earlier)
        runner.pin(done)
        if flags.energy:
            require_meter(runner.about["identity"])
        watch = Watch(flags.device, runner, options.on_message)  # before: a GPU tells the last 1 s
        before = {**(options.origin or {}), "choices": chosen_by, **_part(flags, part)}
        record = Record(suite.name, flags, len(contests) * flags.replicates, before, since)
        whole = planned(suite, flags.device, flags.only)
        environment = runner.about["environment"] | code_of(whole)
        if part:
            part.require_alike(environment)
        if resume:
            _same_place(resume, environment)
            stopped, path = store.read(resume), resume
            _same_choices(resume, stopped.state, chosen_by)
            record = replace(record, before={**stopped.state, "choices": chosen_by})
            bundle.unseal(resume)
            store.replace_rows(resume, done)
            ceilings = stopped.environment["ceilings"]
        else:
            ceilings = runner.ceilings(contests)
            environment |= {"ceilings": ceilings}
            path = _created(out, suite, environment, record, runner.about["slug"])
            held.enter_context(store.locked(path))
        ahead.settled()  # nothing is imported while a contest runs
        runner.log.file = path / "worker.log"
        runner.log.explained = lambda reason, text: options.on_message(failure(reason, text))
        measures = possible(suite.measures, flags.device)
        wanted = Wanted(measures, ceilings, flags.energy)
        try:
            _rows(runner, path, record, contests, wanted, done, watch, options)
        except KeyboardInterrupt as stop:
            raise Stopped(path) from stop
    return path


def _part(flags: Flags, part: Part | None) -> dict[str, Any]:
    """Return what run.json says of a run that has a part of a plan; {} of a whole one."""
    if part:
        return {"part": {"number": part.number, "host": part.host}}
    return {"part": {"number": 0, "host": boot()}} if flags.shard else {}


def _require_flags(flags: Flags) -> None:
    """Refuse what no run can have; the command line refuses most of it before."""
    if not LEAST_S <= flags.timeout_s <= MOST_S:
        limits = f"seconds from {LEAST_S:g} to {MOST_S:g}"
        raise SuiteError(f"--timeout: expected {limits}, found {flags.timeout_s}")
    if not 1 <= flags.replicates <= store.REPLICATES:
        limits = f"from 1 to {store.REPLICATES} (REPLICATES)"
        raise SuiteError(f"--replicates: expected {limits}, found {flags.replicates}")
    if flags.data and not flags.data.is_dir():
        raise SuiteError(f"--data {flags.data}: expected a folder, found none")


def _require_new(out: Path) -> None:
    """Refuse a directory that a run cannot be made in, before anything is measured."""
    if not utf8(str(out)):
        raise SuiteError(f"--out: expected a name in UTF-8, found {str(out)!a}")
    if not store.is_new(out):
        said = "expected a new directory, found one; --resume continues a run"
        raise SuiteError(f"--out {out}: {said}")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise SuiteError(f"--out {out}: expected a folder to write into, found {above}")


def _created(
    out: Path | None, suite: Suite, environment: Mapping[str, Any], record: Record, slug: str
) -> Path:
    """Make the run directory; without `out`, in runs/ under a name that no other run has."""
    state = record.at("running", Counts(), {})
    named = Path("runs") / f"{record.since:%Y%m%d-%H%M%S}-{suite.name}-{slug}"
    for number in count(1):
        path = out or named.with_name(f"{named.name}-{number}" if number > 1 else named.name)
        try:
            store.create(path, suite.text, environment, state)
            break
        except ResultError:
            if out or store.is_new(path):
                raise
    return path


def _strike(device: str, contests: Sequence[Contest]) -> None:
    """Refuse a simulated device with a fault that would strike nothing."""
    for fault in faults(device):
        if not any(meets(c.problem, k, fault.when) for c in contests for k in c.contenders):
            what = f"{fault.fault} when {fault.when!r}"
            raise SuiteError(f"--device {device}: {what}: expected at least one case, found none")


def _rows(
    runner: Runner,
    path: Path,
    record: Record,
    contests: list[Contest],
    wanted: Wanted,
    done: list[Row],
    watch: Watch,
    options: RunOptions,
) -> None:
    """Measure what is left, appending contest by contest; run.json always tells the truth."""
    part = options.part
    counts, kept = Counts(done), [*done]
    spent_s = Counter[str](record.before.get("spent_s", {}))
    done_now, last = len(counts.done), ""

    def total() -> int:
        return part.total(contests, record.flags.replicates) if part else record.contests

    def state(status: str, counts: Counts | None = None) -> dict[str, Any]:
        # A stop may fall between writing a contest and counting it: then the rows on disk count.
        now = replace(record, contests=total())
        counts = counts or Counts(store.rows(path))
        every = {**spent_s, **{stage: spent_s[stage] + s for stage, s in runner.spent_s.items()}}
        return now.at(status, counts, every) | watch.json

    def announced(contests: Iterable[Contest]) -> Iterator[Contest]:
        for contest in contests:
            options.progress(done_now, total(), describe(contest) + last)
            yield contest

    time = _Time(options.until)
    with _truthful(path, state), telemetry(runner.about["identity"], runner.log.add) as window:
        for replicate in range(record.flags.replicates):
            seed = f"{record.suite} {replicate}" + (f" {part.number}" if part else "")
            order = random.Random(seed).sample(contests, len(contests))
            order.sort(key=options.rank or (lambda contest: 0))
            missing = [c for c in order if (replicate, c.problem.id) not in counts.done]
            left = part.take(missing, replicate) if part else missing
            if monotonic() >= options.until:
                break
            if replicate:
                runner.fresh()
            window()  # what was before the first contest is no contest's
            asked = wanted.after(kept)
            timely = announced(time.for_all(left))
            for measured in runner.run(timely, replicate, asked):
                seen_meanwhile = window()
                store.append(
                    path,
                    [replace(r, telemetry=r.telemetry or seen_meanwhile) for r in measured.rows],
                )
                done_now += 1
                spent_s.update(measured.spent_s)
                kept += measured.rows
                counts.add(measured.rows)
                store.set_state(path, state("running", counts))  # a killed run keeps its time, too
                last = leader(measured.rows)
            options.progress(done_now, total(), last)
        runner.kill()
        watch.end()


@dataclass
class _Time:
    """The time until a moment, for contests of all processes, the longest so far in mind."""

    until: float
    longest_s: float = 0.0

    def for_all(self, contests: Iterable[Contest]) -> Iterator[Contest]:
        """Yield contests while there is time for one more that takes as long as the longest."""
        began = monotonic()
        for contest in contests:
            if began + self.longest_s > self.until:
                return
            yield contest
            now = monotonic()
            self.longest_s, began = max(self.longest_s, now - began), now


@contextmanager
def _truthful(path: Path, state: Callable[[str], dict[str, Any]]) -> Iterator[None]:
    """Keep run.json's status true: running, then finished or interrupted, and sealed."""
    store.set_state(path, state("running"))
    status = "interrupted"
    try:
        yield
        counts = state(status)["contests"]
        status = "finished" if counts["done"] == counts["of"] else status
    finally:
        store.set_state(path, state(status))
        bundle.seal(path)


def describe(contest: Contest) -> str:
    """Name a problem for a line of progress."""
    shown = {k: v for k, v in contest.problem.fields.items() if k not in ("pattern", "dtype")}
    return " ".join(f"{name}={text(value)}" for name, value in shown.items())


def leader(rows: Sequence[Row]) -> str:
    """Say who was the fastest in a contest, for a line of progress; "" of a reference contest."""
    timed = [row for row in rows if row.status is Status.OK and row.samples_us]
    over = next((row for row in timed if row.case.contender.baseline), None)
    if over is None or len(timed) == 1 or timed[0].reference:
        return ""
    logs = [float(np.median(logs_over(row, over))) for row in timed]
    best = timed[logs.index(max(logs))]
    ratio = f"{rounded(exp(max(logs)))} x {over.case.contender.kernel}"
    return f"; last: {best.case.contender.kernel}, {'the baseline' if best is over else ratio}"


def finished(path: Path, suite: Suite, flags: Flags, contests: list[Contest]) -> list[Row]:
    """Return the rows of the contests that a stopped run completed; refuse another run's."""
    run = store.read(path)
    if run.suite_text != suite.text:
        raise SuiteError(f"--resume {path}: expected the run's own suite.yaml, found another suite")
    if "ceilings" not in run.environment:
        raise SuiteError(f"--resume {path}: expected ceilings in environment.json, found none")
    before = run.state["flags"]
    for name, given in (("only", flags.only), ("replicates", flags.replicates)):
        if before[name] != given:
            raise SuiteError(f"--resume {path}: expected {name} {before[name]!r}, found {given!r}")
    measures = possible(suite.measures, flags.device)
    expected = {
        contest.problem.id: {
            (Case(contest.problem, contender).id, *measure)
            for contender in contest.contenders
            for measure in measures
        }
        for contest in contests
    }
    contested: dict[tuple[int, str], list[Row]] = {}
    for row in store.rows(path):
        contested.setdefault((row.replicate, row.case.problem.id), []).append(row)
    return [
        row
        for (_, problem), rows in contested.items()
        if {(row.case.id, row.scope, row.cache) for row in rows} == expected.get(problem)
        for row in rows
    ]


def _same_place(path: Path, here: Mapping[str, Any]) -> None:
    """Refuse to go on with other code, plug-ins, tables, libraries or on another device."""
    before, now = flat(store.read(path).environment), flat(here)
    plugged = {name for name in {*before, *now} if name.startswith(("plugins.", "tuned."))}
    device = "gpu.uuid", "gpu.driver", "gpu.spec_sha256", "cpu.name"
    versions = (f"versions.{name}" for name in here["versions"])
    for what in (*sorted(plugged), "code_sha256", *device, *versions):
        if before.get(what) != now.get(what):
            expected = f"expected {what} {before.get(what)}, found {now.get(what)}"
            raise SuiteError(f"--resume {path}: {expected}")


def _same_choices(path: Path, before: Mapping[str, Any], chosen_by: Choices) -> None:
    """Refuse to search in a run that takes its configurations from a bundle, and the reverse."""
    if provenance.choices_of(before) is not chosen_by:
        expected = f"expected choices by {provenance.choices_of(before)}, found {chosen_by}"
        again = "; reproduce or confirm with --out goes on with such a run"
        of_bundle = provenance.choices_of(before) is Choices.BUNDLE
        raise SuiteError(f"--resume {path}: {expected}{again if of_bundle else ''}")

"""A whole run: a suite's contests through workers into a run directory, and on again after a stop.

A run directory is made only when a worker has answered, and is valid from then on: every contest's
rows are on disk before the next contest starts, and run.json says whether it finished.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from sparsebench._discovery import CONSTANTS, modules
from sparsebench.errors import SuiteError
from sparsebench.harness.bench.energy import require_meter
from sparsebench.harness.bench.timing import possible
from sparsebench.harness.doctor import fitness
from sparsebench.harness.doctor.findings import Finding
from sparsebench.harness.machine.device import simulated, tuned_tables
from sparsebench.harness.machine.telemetry import telemetry
from sparsebench.harness.plan.selection import meets, planned, text
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.run.runner import Pinned, Runner, Wanted
from sparsebench.harness.sim.clock import faults
from sparsebench.results import bundle, choices, store
from sparsebench.results.choices import Choices
from sparsebench.results.record import Case, Row, Status
from sparsebench.results.statistics import FEWEST

Progress = Callable[[int, int, str], None]
"""Called with contests done, contests in all, and the problem that is next."""

Told = Callable[[Finding], None]
"""Called with each finding on the machine (doctor/fitness.py), before the run and after it."""

ORIGINS = "reproduces", "confirms"  # what run.json may say of another bundle, and keeps on resuming


class Stopped(KeyboardInterrupt):
    """A run was interrupted; `path` is its directory, which `--resume` goes on with."""

    def __init__(self, path: Path) -> None:
        """Keep the path."""
        super().__init__(str(path))
        self.path = path


@dataclass(frozen=True)
class Flags:
    """Where, how long and how often; never what. They are written into the run."""

    device: str
    data: Path | None = None
    timeout_s: float = 120.0
    replicates: int = 3
    only: str = ""
    energy: bool = False


def measure(
    suite: Suite,
    flags: Flags,
    out: Path | None,
    resume: Path | None,
    progress: Progress = lambda done, total, problem: None,
    pinned: Sequence[Pinned] = (),
    origin: Mapping[str, Any] | None = None,
    told: Told = lambda finding: None,
    until: float = inf,
) -> Path:
    """Run the suite and return the run directory, sealed (results/bundle.py).

    `pinned` is what kernels chose in each process of another run, to be taken again without a
    search (results/choices.py); `origin` goes into run.json: the bundle that this run reproduces
    or confirms. So does what the machine was found like. Raises Stopped where it is interrupted
    with a directory. `until` is a moment of time.monotonic(): no contest starts that would outlast
    it if it took as long as the longest so far. What is left then is left to --resume.
    """
    contests = planned(suite, flags.device, flags.only)
    before: Mapping[str, Any] = origin or {}
    _strike(flags.device, planned(suite, flags.device))
    path = resume or out
    if path and not resume and path.exists():
        raise SuiteError(
            f"--out {path}: expected a new directory, found one; --resume continues a run"
        )
    done = _finished(resume, suite, flags, contests) if resume else []
    tuned_tables()
    for folder in CONSTANTS:
        modules(folder)  # a taken name is an error now, not when the report is written
    chosen_by = choices.planned(flags.replicates, bool(pinned))
    share = flags.replicates < FEWEST
    runner = Runner(flags.device, flags.data, flags.timeout_s, pinned, share)
    runner.pin(done)
    try:
        if flags.energy:
            require_meter(runner.about["identity"])
        path = path or Path("runs") / f"{_now():%Y%m%d-%H%M%S}-{suite.name}-{runner.about['slug']}"
        if resume:
            _same_place(resume, runner.about["environment"])
            stopped = store.read(resume)
            before = stopped.state
            _same_choices(resume, before, chosen_by)
            bundle.unseal(resume)
            store.keep(resume, done)
            ceilings = stopped.environment["ceilings"]
        else:
            ceilings = runner.ceilings()
            environment = runner.about["environment"] | {"ceilings": ceilings}
            store.create(path, suite.text, environment)
        runner.log.file = path / "worker.log"
        measures = possible(suite.measures, flags.device)
        wanted = Wanted(measures, ceilings, flags.energy)
        before = {**before, "choices": chosen_by}
        watch = Watch(flags.device, runner, told)
        try:
            _rows(
                runner, path, suite, flags, contests, wanted, done, progress, before, watch, until
            )
        except KeyboardInterrupt as stop:
            raise Stopped(path) from stop
    finally:
        runner.kill()
    return path


class Watch:
    """What else is at work on the machine: before a run, and over all of it. Not where simulated.

    The time of a worker counts as ours once it has ended.
    """

    def __init__(self, device: str, runner: Runner, told: Told) -> None:
        """Look at the machine while the worker waits."""
        self._kind = "" if simulated(device) else device.partition(":")[0]
        self._began, self._told = fitness.read_spent(), told
        self.found: dict[str, list[Finding]] = {}
        if self._kind:
            self._tell("before", fitness.before(self._kind, runner.about["identity"], runner.pid))

    def end(self) -> None:
        """Look again, when all workers have ended."""
        if self._kind:
            whole = fitness.host(self._began, fitness.read_spent(), self._kind)
            self._tell("during", [whole])

    @property
    def json(self) -> dict[str, Any]:
        """Return what goes into run.json."""
        found = {when: [asdict(one) for one in several] for when, several in self.found.items()}
        return {"fitness": found} if found else {}

    def _tell(self, when: str, several: list[Finding]) -> None:
        self.found[when] = several
        for finding in several:
            self._told(finding)


def _strike(device: str, contests: Sequence[Contest]) -> None:
    """Refuse a simulated device with a fault that would strike nothing."""
    for fault in faults(device):
        if not any(meets(c.problem, k, fault.when) for c in contests for k in c.contenders):
            what = f"{fault.fault} when {fault.when!r}"
            raise SuiteError(f"--device {device}: {what}: expected at least one case, found none")


def _rows(
    runner: Runner,
    path: Path,
    suite: Suite,
    flags: Flags,
    contests: list[Contest],
    wanted: Wanted,
    done: list[Row],
    progress: Progress,
    before: Mapping[str, Any],
    watch: Watch,
    until: float,
) -> None:
    """Measure what is left, appending contest by contest; run.json always tells the truth.

    Of `before`, what run.json said until then, origins stay, and times are added to.
    """
    seen = {(row.replicate, row.case.problem.id) for row in done}
    spent_s = Counter[str](before.get("spent_s", {}))
    total, finished = len(contests) * flags.replicates, len(seen)
    now = _now()
    started = before.get("started", now.isoformat(timespec="seconds"))
    seconds = before.get("seconds", 0)
    origin = {name: before[name] for name in ORIGINS if name in before}
    kept = [*done]

    def state(status: str, rows: list[Row] | None = None) -> dict[str, Any]:
        if rows is None:  # a stop may fall between writing a contest and counting it
            rows = store.rows(path)
        contests_done = {(row.replicate, row.case.problem.id) for row in rows}
        return {
            "suite": suite.name,
            **origin,
            "choices": before["choices"],
            "status": status,
            "started": started,
            "seconds": round(seconds + (_now() - now).total_seconds(), 1),
            "flags": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(flags).items()},
            "contests": {"done": len(contests_done), "of": total},
            "cases": dict(Counter(row.status.value for row in rows if not row.reference)),
            "spent_s": {stage: round(s, 2) for stage, s in spent_s.items()},
            **watch.json,
        }

    with _truthful(path, state), telemetry(runner.about["identity"], runner.log.add) as window:
        for replicate in range(flags.replicates):
            order = random.Random(f"{suite.name} {replicate}").sample(contests, len(contests))
            left = [c for c in order if (replicate, c.problem.id) not in seen]
            if monotonic() >= until:
                break
            if replicate:
                runner.fresh()
            window()  # what was before the first contest is no contest's
            progress(finished, total, describe(left[0]) if left else "")
            asked = wanted.after(kept)
            timely = _before(until, left)
            for number, measured in enumerate(runner.run(timely, replicate, asked), start=1):
                seen_meanwhile = window()
                store.append(
                    path,
                    [replace(r, telemetry=r.telemetry or seen_meanwhile) for r in measured.rows],
                )
                finished += 1
                spent_s.update(measured.spent_s)
                kept += measured.rows
                store.set_state(path, state("running", kept))  # a killed run keeps its time, too
                following = describe(left[number]) if number < len(left) else ""
                progress(finished, total, f"{following}{leader(measured.rows)}")
        runner.kill()
        watch.end()


def _before(until: float, contests: Iterable[Contest]) -> Iterator[Contest]:
    """Yield contests while there is time for one more that takes as long as the longest so far."""
    longest_s, began = 0.0, monotonic()
    for contest in contests:
        if began + longest_s > until:
            return
        yield contest
        now = monotonic()
        longest_s, began = max(longest_s, now - began), now


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
    base = [row for row in timed if row.case.contender.baseline]
    if not base or len(timed) == 1 or timed[0].reference:
        return ""
    best, over = (min(some, key=lambda row: median(row.samples_us)) for some in (timed, base))
    ratio = median(over.samples_us) / median(best.samples_us)
    kernel = best.case.contender.kernel
    said = f"{ratio:.2g} x {over.case.contender.kernel}" if best is not over else "the baseline"
    return f"; last: {kernel}, {said}"


def _finished(path: Path, suite: Suite, flags: Flags, contests: list[Contest]) -> list[Row]:
    """Return the rows of the contests that a stopped run completed; refuse another run's."""
    run = store.read(path)
    if run.suite_text != suite.text:
        raise SuiteError(f"--resume {path}: expected the run's own suite.yaml, found another suite")
    before = run.state["flags"]
    for name, now in (("only", flags.only), ("replicates", flags.replicates)):
        if before[name] != now:
            raise SuiteError(f"--resume {path}: expected {name} {before[name]!r}, found {now!r}")
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


def _same_place(path: Path, here: dict[str, Any]) -> None:
    """Refuse to go on with other code, on another device or with other libraries."""
    there = store.read(path).environment
    device = "gpu.uuid", "gpu.driver", "gpu.spec_sha256", "cpu.name"
    versions = (f"versions.{name}" for name in here["versions"])
    for what in ("code_sha256", "tuned", *device, *versions):
        outer, _, inner = what.partition(".")
        before, now = there.get(outer), here.get(outer)
        if inner:
            before, now = (before or {}).get(inner), (now or {}).get(inner)
        if before != now:
            raise SuiteError(f"--resume {path}: expected {what} {before}, found {now}")


def _same_choices(path: Path, before: Mapping[str, Any], chosen_by: Choices) -> None:
    """Refuse to search in a run that takes its configurations from a bundle, and the reverse."""
    if choices.choices(before) is not chosen_by:
        expected = f"expected choices by {choices.choices(before)}, found {chosen_by}"
        again = "; reproduce or confirm with --out goes on with such a run"
        of_bundle = choices.choices(before) is Choices.BUNDLE
        raise SuiteError(f"--resume {path}: {expected}{again if of_bundle else ''}")


def _now() -> datetime:
    return datetime.now(UTC)

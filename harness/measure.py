"""A whole run: a suite's contests through workers into a run directory, and on again after a stop.

A run directory is made only when a worker has answered, and is valid from then on: every contest's
rows are on disk before the next contest starts, and run.json says whether it finished.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsebench.harness._errors import SuiteError
from sparsebench.harness.runner import Runner
from sparsebench.harness.suite import Contest, Suite
from sparsebench.results import store
from sparsebench.results.record import Case, Contender, Problem, Row

Progress = Callable[[int, int, str], None]
"""Called with contests done, contests in all, and the problem that is next."""


@dataclass(frozen=True)
class Flags:
    """Where, how long and how often; never what. They are written into the run."""

    device: str
    data: Path | None = None
    timeout_s: float = 120.0
    replicates: int = 1
    only: str = ""


def measure(
    suite: Suite,
    flags: Flags,
    out: Path | None,
    resume: Path | None,
    progress: Progress = lambda done, total, problem: None,
) -> Path:
    """Run the suite and return the run directory."""
    contests = only(suite.contests, flags.only)
    path = resume or out
    if path and not resume and path.exists():
        raise SuiteError(
            f"--out {path}: expected a new directory, found one; --resume continues a run"
        )
    done = _finished(resume, suite, flags, contests) if resume else []
    runner = Runner(flags.device, flags.data, flags.timeout_s)
    try:
        path = path or Path("runs") / f"{_now():%Y%m%d-%H%M%S}-{suite.name}-{runner.about['slug']}"
        if resume:
            _same_place(resume, runner.about["environment"])
            store.keep(resume, done)
        else:
            store.create(path, suite.text, runner.about["environment"])
        runner.log.file = path / "worker.log"
        _rows(runner, path, suite, flags, contests, done, progress)
    finally:
        runner.kill()
    return path


def only(contests: Sequence[Contest], condition: str) -> list[Contest]:
    """Keep what `field=value field=value` asks for; a contest's baselines stay with it."""
    wanted = dict(part.partition("=")[::2] for part in condition.replace(",", " ").split())
    known = {"case", "format", "kernel", *(name for c in contests for name in c.problem.fields)}
    for name, value in wanted.items():
        if name not in known or not value:
            expected = f"field=value with a field of {', '.join(sorted(known))}"
            raise SuiteError(f"--only: expected {expected}; found {f'{name}={value}'!r}")
    kept = []
    for contest in contests:
        chosen = [c for c in contest.contenders if _meets(contest.problem, c, wanted)]
        if chosen:
            left = (c for c in contest.contenders if c.baseline or c in chosen)
            kept.append(Contest(contest.problem, tuple(left)))
    if not kept:
        raise SuiteError(f"--only {condition!r}: expected at least one case, found none")
    return kept


def _meets(problem: Problem, contender: Contender, wanted: dict[str, str]) -> bool:
    facts: dict[str, Any] = {
        **problem.fields,
        "format": contender.format,
        "kernel": contender.kernel,
        "case": Case(problem, contender).id,
    }
    return all(n in facts and _text(facts[n]) == _text(value) for n, value in wanted.items())


def _text(value: Any) -> str:
    """Write a field as a user would: 64, 0.9, 16x32."""
    if isinstance(value, list):
        return "x".join(str(v) for v in value)
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)


def _rows(
    runner: Runner,
    path: Path,
    suite: Suite,
    flags: Flags,
    contests: list[Contest],
    done: list[Row],
    progress: Progress,
) -> None:
    """Measure what is left, appending contest by contest; run.json always tells the truth."""
    seen = {(row.replicate, row.case.problem.id) for row in done}
    spent_s: Counter[str] = Counter()
    total, finished = len(contests) * flags.replicates, len(seen)
    started = _now()

    def state(status: str) -> dict[str, Any]:
        rows = store.rows(path)  # a stop may fall between writing a contest and counting it
        contests_done = {(row.replicate, row.case.problem.id) for row in rows}
        return {
            "suite": suite.name,
            "status": status,
            "started": started.isoformat(timespec="seconds"),
            "seconds": round((_now() - started).total_seconds(), 1),
            "flags": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(flags).items()},
            "contests": {"done": len(contests_done), "of": total},
            "cases": dict(Counter(row.status.value for row in rows)),
            "spent_s": {stage: round(s, 2) for stage, s in spent_s.items()},
        }

    with _truthful(path, state):
        for replicate in range(flags.replicates):
            order = list(contests)
            if replicate:
                runner.fresh()
                random.Random(f"{suite.name} {replicate}").shuffle(order)
            left = [c for c in order if (replicate, c.problem.id) not in seen]
            progress(finished, total, _describe(left[0]) if left else "")
            for number, measured in enumerate(runner.run(left, replicate), start=1):
                store.append(path, measured.rows)
                finished += 1
                spent_s.update(measured.spent_s)
                progress(finished, total, _describe(left[number]) if number < len(left) else "")


@contextmanager
def _truthful(path: Path, state: Callable[[str], dict[str, Any]]) -> Iterator[None]:
    """Keep run.json's status true: running, then finished or interrupted."""
    store.set_state(path, state("running"))
    status = "interrupted"
    try:
        yield
        status = "finished"
    finally:
        store.set_state(path, state(status))


def _describe(contest: Contest) -> str:
    shown = {k: v for k, v in contest.problem.fields.items() if k not in ("pattern", "dtype")}
    return " ".join(f"{name}={_text(value)}" for name, value in shown.items())


def _finished(path: Path, suite: Suite, flags: Flags, contests: list[Contest]) -> list[Row]:
    """Return the rows of the contests that a stopped run completed; refuse another run's."""
    run = store.read(path)
    if run.suite_text != suite.text:
        raise SuiteError(f"--resume {path}: expected the run's own suite.yaml, found another suite")
    before = run.state["flags"]
    for name, now in (("only", flags.only), ("replicates", flags.replicates)):
        if before[name] != now:
            raise SuiteError(f"--resume {path}: expected {name} {before[name]!r}, found {now!r}")
    expected = {c.problem.id: {Case(c.problem, k).id for k in c.contenders} for c in contests}
    contested: dict[tuple[int, str], list[Row]] = {}
    for row in run.rows:
        contested.setdefault((row.replicate, row.case.problem.id), []).append(row)
    return [
        row
        for (_, problem), rows in contested.items()
        if {row.case.id for row in rows} == expected.get(problem)
        for row in rows
    ]


def _same_place(path: Path, here: dict[str, Any]) -> None:
    """Refuse to go on with other code or on another device."""
    there = store.read(path).environment
    for what in ("code_sha256", "gpu.uuid", "cpu.name"):
        outer, _, inner = what.partition(".")
        before, now = there.get(outer), here.get(outer)
        if inner:
            before, now = (before or {}).get(inner), (now or {}).get(inner)
        if before != now:
            raise SuiteError(f"--resume {path}: expected {what} {before}, found {now}")


def _now() -> datetime:
    return datetime.now(UTC)

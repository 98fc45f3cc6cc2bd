"""The pieces of one plan, joined into one sealed run.

    whole files ─> one kind of GPU, one code, the same packages ─> each contest once
    ─> all rows, each with its GPU ─> environment with every GPU ─> sealed

A contest is never split: all contenders of a problem in one process come from one piece, and a
piece is from one GPU. If processes of a problem ran on two GPUs, the report says so
(reports/build.py).

    environment.json   what all pieces share; `devices` has the rest for each GPU, hosts by number
    run.json           `shards`: GPU, host and SHA-256 of the manifest of each piece
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.recorded_plan import require_planned_rows
from sparsebench.harness.run.run_json import Counts
from sparsebench.results import files
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.run import bundle, consistency, store
from sparsebench.results.run.provenance import device_id, require_equal_facts, shared_facts
from sparsebench.results.run.store import StoredRun

COMMON = "suite", "reproduces", "confirms", "choices"  # fields that all run.json share
LOGS = "worker.log", "failures.log"


def merge(paths: Sequence[Path], out: Path, suite: Suite) -> Path:
    """Join the pieces of a plan, which have all its contests, into a new run and return it.

    Raises ResultError, and writes nothing, if a piece was changed, its code, packages or kind of
    GPU differ, or a contest occurs twice.
    """
    for path in paths:
        bundle.verify(path)
    runs = [store.read(path) for path in paths]
    for run in runs[1:]:
        _require_same_machine(runs[0], run)
    _require_distinct_contests(runs)
    size = sum(len(bundle.content(path, bundle.ROWS)) for path in paths)
    if size > files.ROWS_BYTES:
        limit = f"{files.ROWS_BYTES} bytes of rows (ROWS_BYTES)"
        raise ResultError(f"{out}: expected at most {limit}, found {size}; --only makes two runs")
    joined = _join(runs, out)
    require_planned_rows(joined, suite)
    deque(consistency.check_consistency(joined), 0)
    every_row = [*joined.reference, *joined.rows]
    counts = Counts(every_row)
    done = {"done": len(counts.done), "of": len(counts.done)}
    state = {**joined.state, "contests": done, "cases": dict(counts.cases)}
    with store.new_directory(out) as fresh:
        store.write_run(fresh, joined.suite_text, joined.environment, state, every_row)
        write_file(fresh / bundle.LOCK, bundle.content(paths[0], bundle.LOCK))
        for name in LOGS:
            if logs := [run / name for run in paths if (run / name).exists()]:
                write_file(fresh / name, "".join(log.read_text("utf-8", "replace") for log in logs))
        bundle.seal_files(fresh, sorted(bundle.REQUIRED))
    return out


def _require_same_machine(first: StoredRun, other: StoredRun) -> None:
    facts = [shared_facts(run.environment) for run in (first, other)]
    require_equal_facts(str(other.path), *facts)
    locks = [(run.path / bundle.LOCK).read_text("utf-8") for run in (first, other)]
    if locks[0] != locks[1]:
        lines = zip(*(lock.splitlines() for lock in locks), strict=False)
        before, now = next((pair for pair in lines if pair[0] != pair[1]), ("more", "fewer lines"))
        raise ResultError(f"{other.path / bundle.LOCK}: expected {before}, found {now}")


def _require_distinct_contests(runs: Iterable[StoredRun]) -> None:
    seen: dict[tuple[int, str], StoredRun] = {}
    for run in runs:
        rows = [*run.reference, *run.rows]
        for key, row in {(r.replicate, r.case.problem.id): r for r in rows}.items():
            other = seen.setdefault(key, run)
            if other is not run:
                what = f"problem {key[1]} ({row.case.problem.op}) in replicate {key[0]}"
                raise ResultError(f"{run.path}: expected {what} once, found it in {other.path} too")


def _join(runs: Sequence[StoredRun], out: Path) -> StoredRun:
    hosts = {host: number for number, host in enumerate(dict.fromkeys(map(_host, runs)), start=1)}
    common = _shared([run.environment for run in runs])
    devices: dict[str, dict[str, Any]] = {}
    shards = []
    for run in runs:
        device, host = device_id(run.environment), hosts[_host(run)]
        rest = _without(run.environment, common)
        devices.setdefault(device, {"uuid": device, "host": host, **rest})
        manifest = bundle.identity(run.path)
        shards.append({"device": device, "host": host, "manifest_sha256": manifest})
    ceilings = _highest([each for run in runs if (each := run.environment["ceilings"])])
    return replace(
        runs[0],
        path=out,
        environment={**common, "ceilings": ceilings, "devices": list(devices.values())},
        state=_state(runs) | {"shards": shards},
        rows=[row for run in runs for row in run.rows],
        reference=[row for run in runs for row in run.reference],
    )


def _state(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Return run.json: `seconds` of all GPUs, and `wall_s` from the first start to the last end."""
    first = runs[0].state
    starts = [datetime.fromisoformat(run.state["started"]) for run in runs]
    durations = [timedelta(seconds=run.state["seconds"]) for run in runs]
    end = max(start + duration for start, duration in zip(starts, durations, strict=True))
    spent_s = sum((Counter(run.state["spent_s"]) for run in runs), Counter[str]())
    names = dict.fromkeys(run.state["flags"]["device"] for run in runs)
    fitness: dict[str, list[Any]] = {}
    for run in runs:
        for when, findings in run.state.get("fitness", {}).items():
            fitness.setdefault(when, []).extend(findings)
    common: dict[str, Any] = {name: first[name] for name in COMMON if name in first}
    return {
        **common,
        "status": "finished",
        "started": min(starts).isoformat(timespec="seconds"),
        "seconds": round(sum(run.state["seconds"] for run in runs), 1),
        "wall_s": round((end - min(starts)).total_seconds(), 1),
        "flags": first["flags"] | {"device": ",".join(names)},
        "spent_s": {stage: round(s, 2) for stage, s in spent_s.items()},
        **({"fitness": fitness} if fitness else {}),
    }


def _host(run: StoredRun) -> str:
    return str((run.state.get("part") or {}).get("host") or run.path)


def _shared(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = environments
    common: dict[str, Any] = {}
    for name, value in first.items():
        values = [other.get(name) for other in others]
        if all(value == other for other in values):
            common[name] = value
        elif all(isinstance(other, Mapping) for other in (value, *values)):
            common[name] = _shared([value, *(other for other in values if other is not None)])
    return common


def _without(facts: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    rest = {}
    for name, value in facts.items():
        if name not in common:
            rest[name] = value
        elif isinstance(value, Mapping) and value != common[name]:
            rest[name] = _without(value, common[name])
    return rest


def _highest(ceilings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the highest ceilings of several GPUs, which bound the rows of each of them.

    Without any, as on a CPU, return {}.
    """
    if not ceilings:
        return {}
    every = [asdict(Ceilings.from_json(each)) for each in ceilings]
    highest = every[0] | {"launch_us": min(each["launch_us"] for each in every)}
    for name in ("read_gb_per_s", "copy_gb_per_s", "write_gb_per_s", "age_s"):
        values = [each[name] for each in every if each[name] is not None]
        highest[name] = max(values, default=None)
    rates = [each["matrix_tflops"] for each in every]
    names = sorted({name for each in rates for name in each})
    return highest | {"matrix_tflops": {n: max(e.get(n, 0.0) for e in rates) for n in names}}

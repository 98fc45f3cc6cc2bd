"""Runs that hold parts of one plan, joined into one sealed run.

    whole files ─> one suite, one set of flags ─> one kind of GPU, one code ─> each contest once,
    none missing ─> all rows, each with its GPU ─> environment with every GPU ─> sealed

A contest is never split: all contenders of a problem in one process come from one run, and a run is
from one GPU. If processes of a problem ran on two GPUs, the report says so (reports/build.py).

    environment.json   what all runs share; `devices` has the rest for each GPU, hosts by number
    run.json           `shards`: GPU, host and SHA-256 of the manifest of each run;
                       `planned_replicates`: those of the plan, if only the first ones are kept
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sparsebench._discovery import own_code_only
from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.results import files
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.run import bundle, consistency, store
from sparsebench.results.run.provenance import device_id, require_equal_facts, shared_facts
from sparsebench.results.run.store import StoredRun

# Fields that all run.json share
COMMON = "suite", "reproduces", "confirms", "choices", "planned_replicates"
LOGS = "worker.log", "failures.log"
PER_PART = "device", "data", "shard", "timeout_s"  # flags in which parts of a plan may differ


def merge(
    paths: Sequence[Path],
    out: Path,
    data: Path | None = None,
    *,
    plugins: bool = False,
    replicates: int | None = None,
) -> Path:
    """Join runs into a new one at `out` and return it.

    `plugins` allows the suite to import modules of other packages. With `replicates`, only that
    many first processes are kept, such as those that a run completed before its time ended. Raises
    ResultError, and writes nothing, if a run was changed, its suite, code or kind of GPU differs,
    or a contest is missing or occurs twice.
    """
    if not store.is_new(out):
        raise ResultError(f"{out}: expected a new directory, found one")
    runs = _read_runs(paths)
    if replicates is not None:
        runs = [_first_processes(run, replicates) for run in runs]
    for run in runs[1:]:
        _require_one_plan(runs[0], run)
    _require_distinct_contests(runs)
    size = sum(len(bundle.content(path, bundle.ROWS)) for path in paths)
    if size > files.ROWS_BYTES:
        limit = f"{files.ROWS_BYTES} bytes of rows (ROWS_BYTES)"
        raise ResultError(f"merge: expected at most {limit}, found {size}; --only makes two runs")
    # These import torch, for which no error above has to wait.
    from sparsebench.harness.plan.selection import planned_contests
    from sparsebench.harness.run import recorded_plan, run_json

    joined = _join(runs, out)
    counts, flags = run_json.Counts([*joined.reference, *joined.rows]), joined.state["flags"]
    with nullcontext() if plugins else own_code_only():
        suite = recorded_plan.suite_of_run(joined, data)
        problems = [c.problem.id for c in planned_contests(suite, flags["device"], flags["only"])]
        plan = [(n, problem) for n in range(flags["replicates"]) for problem in problems]
        if missing := [contest for contest in plan if contest not in counts.done]:
            raise ResultError(_missing_contests(runs, missing, len(counts.done)))
        recorded_plan.require_planned_rows(joined, suite)
    deque(consistency.check_consistency(joined), 0)
    done = {"done": len(counts.done), "of": len(counts.done)}
    state = {**joined.state, "contests": done, "cases": dict(counts.cases)}
    with store.new_directory(out) as fresh:
        every_row = [*joined.reference, *joined.rows]
        store.write_run(fresh, joined.suite_text, joined.environment, state, every_row)
        write_file(fresh / bundle.LOCK, bundle.content(paths[0], bundle.LOCK))
        for name in LOGS:
            if logs := [run / name for run in paths if (run / name).exists()]:
                write_file(fresh / name, "".join(log.read_text("utf-8", "replace") for log in logs))
        bundle.seal_files(fresh, sorted(bundle.REQUIRED))
    return out


def _read_runs(paths: Sequence[Path]) -> list[StoredRun]:
    """Read runs of one GPU each. Raises ResultError if one was changed or occurs twice."""
    runs, seen = list[StoredRun](), dict[str, Path]()
    for path in paths:
        if (identity := bundle.identity(path)) in seen:  # even under another name
            raise ResultError(f"{path}: expected each run once, found {seen[identity]} too")
        seen[identity] = path
    for path in paths:
        bundle.verify(path)
        runs.append(store.read(path))
        if runs[-1].state.get("shards"):
            raise ResultError(f"{path}: expected a run of one GPU, found a merged one")
    if not runs:
        raise ResultError("merge: expected runs, found none")
    return runs


def _first_processes(run: StoredRun, replicates: int) -> StoredRun:
    flags = run.state["flags"]
    planned = flags["replicates"]
    if not 1 <= replicates <= planned:
        expected = f"expected 1 to {planned}, as many as {run.path} planned"
        raise ResultError(f"--replicates: {expected}; found {replicates}")
    return replace(
        run,
        state={
            **run.state,
            "flags": {**flags, "replicates": replicates},
            "planned_replicates": planned,
        },
        rows=[row for row in run.rows if row.replicate < replicates],
        reference=[row for row in run.reference if row.replicate < replicates],
    )


def _require_one_plan(first: StoredRun, other: StoredRun) -> None:
    if other.suite_text != first.suite_text or other.state["suite"] != first.state["suite"]:
        raise ResultError(f"{other.path}: expected the suite of {first.path}, found another")
    require_equal_facts(
        str(other.path), shared_facts(first.environment), shared_facts(other.environment)
    )
    for name in ("flags", *COMMON[1:]):
        both: list[Any] = [run.state.get(name) for run in (first, other)]
        if name == "flags":
            both = [{k: v for k, v in flags.items() if k not in PER_PART} for flags in both]
        if both[0] != both[1]:
            expected = f"expected {name} {both[0]} as in {first.path}"
            raise ResultError(f"{other.path}: {expected}, found {both[1]}")
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
    ceilings = _highest([run.environment["ceilings"] for run in runs])
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
    merged = {"device": ",".join(names), "shard": ""}
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
        "flags": first["flags"] | merged,
        "spent_s": {stage: round(s, 2) for stage, s in spent_s.items()},
        **({"fitness": fitness} if fitness else {}),
    }


def _missing_contests(
    runs: Sequence[StoredRun], missing: Sequence[tuple[int, str]], done: int
) -> str:
    """Return the error for missing contests, with the missing shards if runs have numbers."""
    shards = {str(run.state["flags"].get("shard", "")) for run in runs} - {""}
    of = {int(shard.partition("/")[2]) for shard in shards}
    missing_shards = [f"{n}/{max(of)}" for n in range(1, max(of, default=0) + 1)]
    missing_shards = [shard for shard in missing_shards if shard not in shards]
    replicate, problem = missing[0]
    what = f"{len(missing)} missing, such as problem {problem} in replicate {replicate}"
    first = min(number for number, _ in missing)
    hint = f"; --replicates {first} keeps the complete processes" if first else ""
    which = f" (no shard {', '.join(missing_shards[:5])})" if missing_shards else ""
    return (
        f"merge: expected all {done + len(missing)} contests of the plan, found {what}{which}{hint}"
    )


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
    """Return the highest ceilings of several GPUs, which bound the rows of each of them."""
    every = [asdict(Ceilings.from_json(each)) for each in ceilings]
    highest = every[0] | {"launch_us": min(each["launch_us"] for each in every)}
    for name in ("read_gb_per_s", "copy_gb_per_s", "write_gb_per_s", "age_s"):
        values = [each[name] for each in every if each[name] is not None]
        highest[name] = max(values, default=None)
    rates = [each["matrix_tflops"] for each in every]
    names = sorted({name for each in rates for name in each})
    return highest | {"matrix_tflops": {n: max(e.get(n, 0.0) for e in rates) for n in names}}

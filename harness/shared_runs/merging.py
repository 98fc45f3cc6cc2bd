"""Runs that have parts of one plan, joined into one sealed run.

    whole files ─> one suite, one set of flags ─> one kind of GPU, one code ─> no contest twice,
    none missing ─> all rows, each with its GPU ─> environment with every GPU ─> sealed

A contest is never split: all contenders of a problem in one process come from one run, and a run is
of one GPU. A shard is one of the runs. Where processes of a problem ran on two GPUs, the report
says so (reports/build.py).

    environment.json   what all shards share; `devices`: of each GPU the rest, its host by number
    run.json           `shards`: GPU, host and SHA-256 of the manifest of each run
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sparsebench._discovery import own_code_only
from sparsebench.errors import ResultError
from sparsebench.harness.plan.selection import planned
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.recorded_plan import own_suite, require_planned
from sparsebench.harness.run.run_json import Counts
from sparsebench.results import bundle, files, store
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.consistency import check_consistency
from sparsebench.results.provenance import device_id, require_equal_facts, shared_facts
from sparsebench.results.store import Run

KEPT = "suite", "reproduces", "confirms", "choices"  # of run.json, the same in all
LOGS = "worker.log", "failures.log"
OWN = "device", "data", "shard", "timeout_s"  # flags that parts of a plan may differ in


def merge(
    paths: Sequence[Path],
    out: Path,
    data: Path | None = None,
    *,
    plugins: bool = False,
    whole: bool = True,
) -> Path:
    """Join runs into a new one at `out` and return it; nothing is written where that cannot be.

    Raises ResultError for a run that is changed, of another suite, code or kind of GPU, and for
    contests that are there twice or not at all. `plugins` allows the suite to import modules of
    other packages. Unless the plan must be `whole`, what is missing makes the run `interrupted`.
    """
    _each_run_once(paths)
    runs = [_opened(path) for path in paths]
    if not runs:
        raise ResultError("merge: expected runs, found none")
    if not store.is_new(out):
        raise ResultError(f"{out}: expected a new directory, found one")
    for run in runs[1:]:
        _of_one_plan(runs[0], run)
    _each_contest_once(runs)
    _readable(paths)
    joined = _joined(runs, out)
    with nullcontext() if plugins else own_code_only():
        suite = own_suite(joined, data)
        missing = _missing(joined, suite)
        if not missing:
            require_planned(joined, suite)
    if missing and whole:
        raise ResultError(_lacking(runs, missing, joined))
    if not missing:
        for _ in check_consistency(joined):
            pass
    counts = Counts([*joined.reference, *joined.rows])
    status = "interrupted" if missing else "finished"
    done = {"done": len(counts.done), "of": len(counts.done) + len(missing)}
    with store.new_directory(out) as fresh:
        store.write_run(
            fresh,
            joined.suite_text,
            joined.environment,
            {**joined.state, "status": status, "contests": done, "cases": dict(counts.cases)},
            [*joined.reference, *joined.rows],
        )
        (fresh / bundle.LOCK).write_text((paths[0] / bundle.LOCK).read_text())
        for name in LOGS:
            logs = [run / name for run in paths if (run / name).exists()]
            if logs:
                said = "".join(log.read_text("utf-8", "replace") for log in logs)
                (fresh / name).write_text(said)
        bundle.seal_files(fresh, sorted(bundle.REQUIRED))
    return out


def _each_run_once(paths: Iterable[Path]) -> None:
    """Refuse a bundle that is given twice, under one name or two."""
    seen: dict[str, Path] = {}
    for path in paths:
        if (identity := bundle.identity(path)) in seen:
            raise ResultError(f"{path}: expected each run once, found {seen[identity]} too")
        seen[identity] = path


def _opened(path: Path) -> Run:
    bundle.verify(path)
    run = store.read(path)
    if run.state.get("shards"):
        expected = "a run of one GPU"
        raise ResultError(f"{path}: expected {expected}, found one that is merged already")
    return run


def _of_one_plan(first: Run, other: Run) -> None:
    """Refuse runs that are not parts of one plan; ResultError names the first difference."""
    if other.suite_text != first.suite_text or other.state["suite"] != first.state["suite"]:
        raise ResultError(f"{other.path}: expected the suite of {first.path}, found another")
    require_equal_facts(
        str(other.path), shared_facts(first.environment), shared_facts(other.environment)
    )
    for name in ("flags", *KEPT[1:]):
        expected, found = (_compared(run.state.get(name)) for run in (first, other))
        if expected != found:
            said = f"{name} {expected} as in {first.path}"
            raise ResultError(f"{other.path}: expected {said}, found {found}")
    expected, found = ((run.path / bundle.LOCK).read_text() for run in (first, other))
    if expected != found:
        both = zip(expected.splitlines(), found.splitlines(), strict=False)
        before, now = next((pair for pair in both if pair[0] != pair[1]), ("more", "fewer lines"))
        raise ResultError(f"{other.path / bundle.LOCK}: expected {before}, found {now}")


def _compared(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: own for name, own in value.items() if name not in OWN}


def _each_contest_once(runs: Iterable[Run]) -> None:
    """Refuse a contest that two runs have: a shard that is given twice."""
    seen: dict[tuple[int, str], Run] = {}
    for run in runs:
        rows = [*run.reference, *run.rows]
        for key, row in {(r.replicate, r.case.problem.id): r for r in rows}.items():
            other = seen.setdefault(key, run)
            if other is not run:
                what = f"problem {key[1]} ({row.case.problem.op}) in replicate {key[0]}"
                raise ResultError(f"{run.path}: expected {what} once, found it in {other.path} too")


def _readable(paths: Iterable[Path]) -> None:
    """Refuse more rows than a run may have: nobody could read it."""
    count = sum(len(bundle.content(path, bundle.ROWS)) for path in paths)
    if count > files.ROWS_BYTES:
        limit = f"{files.ROWS_BYTES} bytes of rows (ROWS_BYTES)"
        raise ResultError(f"merge: expected at most {limit}, found {count}; --only makes two runs")


def _joined(runs: Sequence[Run], out: Path) -> Run:
    """Return the merged run as it would be read."""
    hosts = {host: number for number, host in enumerate(dict.fromkeys(map(_host, runs)), start=1)}
    devices: dict[str, dict[str, Any]] = {}
    shards = []
    for run in runs:
        device = device_id(run.environment)
        host = hosts[_host(run)]
        devices.setdefault(device, {"uuid": device, "host": host, **_own(run, runs)})
        manifest = bundle.identity(run.path)
        shards.append({"device": device, "host": host, "manifest_sha256": manifest})
    environment = {
        **_shared([run.environment for run in runs]),
        "ceilings": _highest([run.environment["ceilings"] for run in runs]),
        "devices": list(devices.values()),
    }
    return Run(
        path=out,
        suite=runs[0].suite,
        suite_text=runs[0].suite_text,
        environment=environment,
        state=_state(runs) | {"shards": shards},
        rows=[row for run in runs for row in run.rows],
        reference=[row for run in runs for row in run.reference],
    )


def _state(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what run.json says: seconds are of all GPUs together, `wall_s` is between the ends."""
    first = runs[0].state
    began = [datetime.fromisoformat(run.state["started"]) for run in runs]
    taken = [timedelta(seconds=run.state["seconds"]) for run in runs]
    ended = max(start + took for start, took in zip(began, taken, strict=True))
    spent_s = sum((Counter(run.state["spent_s"]) for run in runs), Counter[str]())
    names = dict.fromkeys(run.state["flags"]["device"] for run in runs)
    own = {"device": ",".join(names), "shard": ""}
    fitness: dict[str, list[Any]] = {}
    for run in runs:
        for when, found in run.state.get("fitness", {}).items():
            fitness.setdefault(when, []).extend(found)
    kept: dict[str, Any] = {name: first[name] for name in KEPT if name in first}
    return {
        **kept,
        "status": "finished",
        "started": min(began).isoformat(timespec="seconds"),
        "seconds": round(sum(run.state["seconds"] for run in runs), 1),
        "wall_s": round((ended - min(began)).total_seconds(), 1),
        "flags": first["flags"] | own,
        "spent_s": {stage: round(s, 2) for stage, s in spent_s.items()},
        **({"fitness": fitness} if fitness else {}),
    }


def _missing(joined: Run, suite: Suite) -> list[tuple[int, str]]:
    """Return the contests, process and problem, that no run has."""
    flags = joined.state["flags"]
    asked = planned(suite, flags["device"], flags["only"])
    found = {(row.replicate, row.case.problem.id) for row in [*joined.reference, *joined.rows]}
    wanted = [(n, c.problem.id) for n in range(flags["replicates"]) for c in asked]
    return [key for key in wanted if key not in found]


def _lacking(runs: Sequence[Run], missing: Sequence[tuple[int, str]], joined: Run) -> str:
    """Say what is missing, by shard where runs have the numbers of theirs."""
    shards = {str(run.state["flags"].get("shard", "")) for run in runs} - {""}
    of = {int(shard.partition("/")[2]) for shard in shards}
    lost = [f"{n}/{max(of)}" for n in range(1, max(of, default=0) + 1)]
    lost = [shard for shard in lost if shard not in shards]
    replicate, problem = missing[0]
    rows = [*joined.reference, *joined.rows]
    total = len(missing) + len({(row.replicate, row.case.problem.id) for row in rows})
    what = f"{len(missing)} missing, such as problem {problem} in replicate {replicate}"
    which = f" (no shard {', '.join(lost[:5])})" if lost else ""
    return f"merge: expected all {total} contests of the plan, found {what}{which}"


def _host(run: Run) -> str:
    return str((run.state.get("part") or {}).get("host") or run.path)


def _shared(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts that all have in common, at every depth."""
    first, *others = environments
    found: dict[str, Any] = {}
    for name, value in first.items():
        values = [other.get(name) for other in others]
        if all(value == other for other in values):
            found[name] = value
        elif all(isinstance(other, Mapping) for other in (value, *values)):
            found[name] = _shared([value, *(other for other in values if other is not None)])
    return found


def _own(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the facts of a run that not all have in common."""
    common = _shared([other.environment for other in runs])
    return _without(run.environment, common)


def _without(facts: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in facts.items():
        if name not in common:
            found[name] = value
        elif isinstance(value, Mapping) and value != common[name]:
            found[name] = _without(value, common[name])
    return found


def _highest(ceilings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the highest ceilings of several GPUs: a bound of their rows is no lower than this."""
    known = [Ceilings.from_json(each) for each in ceilings]
    first = known[0]
    names = {name for each in known for name in each.matrix_tflops}
    written = [each.write_gb_per_s for each in known if each.write_gb_per_s is not None]
    highest = replace(
        first,
        read_gb_per_s=max(each.read_gb_per_s for each in known),
        copy_gb_per_s=max(each.copy_gb_per_s for each in known),
        write_gb_per_s=max(written) if written else None,
        matrix_tflops={n: max(e.matrix_tflops.get(n, 0.0) for e in known) for n in sorted(names)},
        launch_us=min(each.launch_us for each in known),
        age_s=max(each.age_s for each in known),
    )
    return asdict(highest)

"""Is a run complete and consistent? Rows are checked against each other and the other files.

    finished ─> of one device ─> the same cases in every replicate ─> samples ─> operands

Each check yields one line that says what is right; the first error is a ResultError.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.results.bundle import ROWS
from sparsebench.results.environment import device_name
from sparsebench.results.record import Row, Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run


def inspect(run: Run) -> Iterator[str]:
    """Yield one line per check; ResultError at the first error.

    The run is finished. All rows are of one device. Every replicate has the same cases, each once.
    Only ok rows have samples, finite and positive. A problem has the same operands in all rows.
    """
    status, rows = run.state.get("status"), [*run.reference, *run.rows]
    if status != "finished" or not rows:
        found = f"{status} with {len(rows)} rows"
        raise ResultError(f"{run.path / 'run.json'}: expected a finished run, found {found}")
    device = dict.fromkeys([device_name(run.environment), _one_device(run, rows)])
    yield f"rows: {len(rows)}, complete, all of {', '.join(device)}"
    replicates = _equal_replicates(run, rows)
    little = "" if replicates >= FEWEST else f": a look; a verdict takes {FEWEST}"
    yield f"replicates: {replicates}, the same cases in each, none twice{little}"
    yield f"samples: {_clean_samples(run, rows)}, all in ok rows, finite and positive"
    yield f"operands: of {_equal_operands(run, rows)} problems, the same bits in every replicate"


def _one_device(run: Run, rows: list[Row]) -> str:
    """Return the GPU's UUID, or the CPU's name."""
    gpu, cpu = run.environment.get("gpu") or {}, run.environment.get("cpu") or {}
    expected = gpu.get("uuid") or cpu.get("name")
    for row in rows:
        if row.device != expected:
            said = f"expected device {expected} (environment.json), found {row.device}"
            raise ResultError(f"{_where(run, row)}: {said}")
    return str(expected)


def _equal_replicates(run: Run, rows: list[Row]) -> int:
    """Return how many replicates there are; ResultError if they differ in their cases."""
    count = run.state["flags"]["replicates"]
    seen: dict[int, dict[tuple[Any, ...], Row]] = {replicate: {} for replicate in range(count)}
    for row in rows:
        if row.replicate not in seen:
            raise ResultError(f"{_where(run, row)}: expected {count} replicates, found another")
        key = row.reference, row.case.id, row.scope, row.cache
        if key in seen[row.replicate]:
            raise ResultError(f"{_where(run, row)}: expected one row, found two")
        seen[row.replicate][key] = row
    anywhere = {key: row for here in seen.values() for key, row in here.items()}
    for replicate, here in seen.items():
        for key in anywhere.keys() - here.keys():
            where = _where(run, replace(anywhere[key], replicate=replicate))
            raise ResultError(f"{where}: expected a row as in other replicates, found none")
    return len(seen)


def _clean_samples(run: Run, rows: list[Row]) -> int:
    """Return how many samples there are."""
    for row in rows:
        if (row.status is Status.OK) != bool(row.samples_us):
            said = f"expected samples exactly where ok, found {len(row.samples_us)}, {row.status}"
            raise ResultError(f"{_where(run, row)}: {said}")
        for sample in row.samples_us:
            if not 0 < sample < math.inf:
                raise ResultError(f"{_where(run, row)}: expected a time in µs, found {sample}")
    return sum(len(row.samples_us) for row in rows)


def _equal_operands(run: Run, rows: list[Row]) -> int:
    """Return how many problems there are; ResultError if operands of one of them differ."""
    digests: dict[str, str] = {}
    for row in rows:
        if row.digest:
            expected = digests.setdefault(row.case.problem.id, row.digest)
            if row.digest != expected:
                said = f"expected operands {expected}, found {row.digest}"
                raise ResultError(f"{_where(run, row)}: {said}")
    return len(digests)


def _where(run: Run, row: Row) -> str:
    """Name a row: file, problem, contender, scope, cache state and replicate."""
    named = f"problem {row.case.problem.id} {row.case.contender.label} {row.scope} {row.cache}"
    return f"{run.path / ROWS}: {named} in replicate {row.replicate}"

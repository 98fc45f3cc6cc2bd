"""Is a run complete and consistent? Rows are checked against each other and the other files.

    finished ─> of one device, or of its shards' ─> the same cases in every replicate ─> A/A pairs
             ─> samples ─> errors within their bounds ─> times above theirs ─> operands

Whoever changes samples with care, and seals them anew, passes all of it: such a bundle differs from
the digest that was published (results/published/README.md). Each check yields one line that says
what is right; the first error is a ResultError.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.results.bundle import ROWS
from sparsebench.results.ceilings import LIGHT
from sparsebench.results.formatting import amount
from sparsebench.results.provenance import device_name
from sparsebench.results.record import Row, Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run


def inspect(run: Run) -> Iterator[str]:
    """Yield one line per check; ResultError at the first error.

    The run is finished. All rows are of one device, or of their shard's. Every replicate has the
    same cases, each once, and A/A pairs. Only ok rows have samples, finite and positive. Their
    errors are within the bound, and on a GPU their times are above the least that the ceilings
    allow. A problem has the same operands in all rows.
    """
    status, rows = run.state.get("status"), [*run.reference, *run.rows]
    if status != "finished" or not rows:
        found = f"{status} with {amount(len(rows), 'row')}"
        raise ResultError(f"{run.path / 'run.json'}: expected a finished run, found {found}")
    device = dict.fromkeys([device_name(run.environment), _one_device(run, rows)])
    of = f"from {len(shards)} shards, of" if (shards := run.state.get("shards")) else "all of"
    yield f"rows: {len(rows)}, complete, {of} {', '.join(device)}"
    replicates = _equal_replicates(run, rows)
    little = "" if replicates >= FEWEST else f": a look; a verdict takes {FEWEST}"
    yield f"replicates: {replicates}, the same cases in each, none twice{little}"
    if run.state.get("part"):
        yield "A/A pairs: not asked for: this is a part of a run"
    else:
        yield f"A/A pairs: {_pairs(run, replicates)} in each replicate"
    yield f"samples: {_clean_samples(run, rows)}, all in ok rows, finite and positive"
    yield f"errors: of {amount(_right(run, rows), 'ok row')}, each within its bound"
    yield f"times: {_below_light(run, rows)} held against a bound, none below it"
    equal = amount(_equal_operands(run, rows), "problem")
    yield f"operands: of {equal}, the same bits in every replicate"


def _one_device(run: Run, rows: list[Row]) -> str:
    """Return the GPU's UUID, or the CPU's name; of a merged run those of all its shards.

    ResultError where a row is of another device, or where a contest is of two.
    """
    gpu, cpu = run.environment.get("gpu") or {}, run.environment.get("cpu") or {}
    of_run = str(gpu.get("uuid") or cpu.get("name"))
    known = dict.fromkeys(shard["device"] for shard in run.state.get("shards", [])) or {of_run: 0}
    contests: dict[tuple[int, str], str] = {}
    for row in rows:
        contest = row.replicate, row.case.problem.id
        expected = contests.setdefault(
            contest, row.device if row.device in known else str([*known])
        )
        if row.device != expected:
            said = f"expected device {expected} (environment.json), found {row.device}"
            raise ResultError(f"{_where(run, row)}: {said}")
    return ", ".join(known)


def _equal_replicates(run: Run, rows: list[Row]) -> int:
    """Return how many replicates there are; ResultError if they differ in their cases."""
    count: int = run.state["flags"]["replicates"]
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


def _pairs(run: Run, replicates: int) -> int:
    """Return how many A/A pairs the noise-floor contests have, in the replicate with the fewest."""
    twins = Counter(row.replicate for row in run.reference if row.case.contender.twin)
    for replicate in range(replicates):
        if not twins[replicate]:
            where = f"{run.path / ROWS}: replicate {replicate}"
            raise ResultError(f"{where}: expected A/A pairs (reference rows), found none")
    return min(twins.values())


def _right(run: Run, rows: list[Row]) -> int:
    """Return how many rows are ok; ResultError where one has no error, or one beyond its bound."""
    right = [row for row in rows if row.status is Status.OK]
    for row in right:
        for name in ("error", "error_of_bound"):
            found, most = getattr(row, name), math.inf if name == "error" else 1.0
            if found is None or not 0 <= found <= most or found == math.inf:
                said = f"expected {name} of an ok row within {most:g}, found {found}"
                raise ResultError(f"{_where(run, row)}: {said}")
    return len(right)


def _below_light(run: Run, rows: list[Row]) -> int:
    """Return how many rows have a bound; on a CPU, whose cores are shared, it is no judge."""
    timed = [row for row in rows if row.status is Status.OK and row.clock != "host"]
    bound = [row for row in timed if row.bound_us]
    for row in bound:
        taken, least = median(row.samples_us), LIGHT * (row.bound_us or 0.0)
        if taken < least:
            said = f"expected at least {least:.2f} µs ({row.bound_by}), found {taken:.2f} µs"
            raise ResultError(f"{_where(run, row)}: {said}")
    return len(bound)


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

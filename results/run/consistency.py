"""Check that a run is complete and consistent: its rows against each other and the other files.

    finished ─> dates ─> one device, or the devices of its shards ─> the same cases in every
             replicate ─> A/A pairs ─> quantities ─> samples, each taken once ─> errors within their
             bounds ─> draws ─> clocks ─> ceilings, and times above their bounds ─> operands

Samples that were changed carefully and sealed again pass all of these checks; such a bundle differs
from the published digest (results/published/README.md).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations
from math import inf, isfinite
from statistics import median
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.results.ceilings import LIGHT
from sparsebench.results.formatting import amount
from sparsebench.results.record import Row, Status
from sparsebench.results.run.bundle import ROWS
from sparsebench.results.run.provenance import device_name, on_gpu
from sparsebench.results.run.store import BUDGET, StoredRun
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.frame import LOADS

FIRST = datetime(2024, 1, 1, tzinfo=UTC)  # no run is older
AHEAD = timedelta(days=1)  # of the clock of this machine
SIGNED = {"bias", "held_bytes"}  # quantities that may be negative: these two are differences

Owners = dict[tuple[float, ...], Row]
"""The rows of a run by their samples, sorted."""


def check_consistency(run: StoredRun) -> Iterator[str]:
    """Yield one line for each check that passes; raises ResultError at the first failure.

    No line is about nothing, such as times on a CPU, which have no hardware limit. The run is
    finished or used up its budget, and its dates are possible. All rows are from its device, or
    from that of their shard. Every replicate has the same cases, each once, and A/A pairs. Only ok
    rows have samples, all finite and positive, and no row has those of another row or repeats its
    own. Errors are within their bounds, every contest drew its own activations, and on a GPU no SM
    clock is above its maximum and no time below the least that the ceilings allow. A problem has
    the same operands in all rows.
    """
    status, rows = run.state.get("status"), [*run.reference, *run.rows]
    ended = status == "finished" or run.state.get("ended_by") == BUDGET
    if not ended or not rows:
        actual = f"{status} with {amount(len(rows), 'row')}"
        raise ResultError(f"{run.path / 'run.json'}: expected a finished run, found {actual}")
    if dates := _possible_dates(run):
        yield f"dates: {dates}"
    devices = ", ".join(dict.fromkeys([device_name(run.environment), _devices(run, rows)]))
    shards = run.state.get("shards", [])
    source = f"from {len(shards)} shards on" if len(shards) > 1 else "all from"
    whole = "complete" if status == "finished" else "as many as its budget allowed"
    yield f"rows: {len(rows)}, {whole}, {source} {devices}"
    replicates = _equal_replicates(run, rows)
    look = "" if replicates >= FEWEST else f": a look; a verdict needs at least {FEWEST}"
    yield f"replicates: {replicates}, each with the same cases, no case twice{look}"
    if run.state.get("part"):
        yield "A/A pairs: not required in a part of a run"
    else:
        yield f"A/A pairs: {_pairs(run, replicates)} in each replicate"
    samples = _clean_samples(run, rows)
    yield f"samples: {samples}, all in ok rows, finite and positive, no row with those of another"
    yield f"errors: {amount(_right(run, rows), 'ok row')}, each within its error bound"
    if contests := _own_draws(run, rows):
        yield f"draws: {amount(contests, 'contest')}, each with activations of its own"
    if clocks := _possible_clocks(run, rows):
        yield f"SM clocks: {amount(clocks, 'row')}, each within the maximum of the GPU"
    if bound := _above_bounds(run, rows):
        yield f"times: {amount(bound, 'row')} with a hardware limit, none below it"
    equal = amount(_equal_operands(run, rows), "problem")
    yield f"operands: {equal}, each with the same bits in every replicate"


def _possible_dates(run: StoredRun) -> str:
    """Return the days from the start to the end of a run; "" if it does not say when it began."""
    if not (text := run.state.get("started")):
        return ""
    where, now = run.path / "run.json", datetime.now(UTC)
    try:
        started = datetime.fromisoformat(text)
    except ValueError as error:
        raise ResultError(f"{where}: expected started as a date, found {text[:40]}") from error
    started = started if started.tzinfo else started.replace(tzinfo=UTC)
    if not FIRST <= started <= now + AHEAD:
        raise ResultError(f"{where}: expected started from {FIRST:%Y} to now, found {text}")
    seconds = run.state.get("wall_s", run.state.get("seconds", 0.0))  # wall_s: on several GPUs
    ended = started + timedelta(seconds=seconds)
    if ended > now + AHEAD:
        raise ResultError(f"{where}: expected an end before now, found {seconds:g} s from {text}")
    return " to ".join(dict.fromkeys(f"{day:%Y-%m-%d}" for day in (started, ended)))


def _devices(run: StoredRun, rows: list[Row]) -> str:
    """Return the GPU's UUID or the CPU's name; for a merged run, those of all shards.

    Raises ResultError if a row is from another device, or a contest from two.
    """
    gpu, cpu = run.environment.get("gpu") or {}, run.environment.get("cpu") or {}
    device_id = str(gpu.get("uuid") or cpu.get("name"))
    devices = dict.fromkeys(shard["device"] for shard in run.state.get("shards", [])) or {
        device_id: 0
    }
    contests: dict[tuple[int, str], str] = {}
    for row in rows:
        contest = row.replicate, row.case.problem.id
        first = row.device if row.device in devices else str([*devices])
        expected = contests.setdefault(contest, first)
        if row.device != expected:
            raise _error(run, row, f"device {expected} (environment.json)", row.device)
    return ", ".join(devices)


def _equal_replicates(run: StoredRun, rows: list[Row]) -> int:
    """Return the number of replicates; raises ResultError if their cases differ."""
    count: int = run.state["flags"]["replicates"]
    seen: dict[int, dict[tuple[Any, ...], Row]] = {replicate: {} for replicate in range(count)}
    for row in rows:
        if row.replicate not in seen:
            raise _error(run, row, f"{count} replicates", "another")
        seen[row.replicate][row.reference, row.case.id, row.scope, row.cache] = row
    all_rows = {key: row for here in seen.values() for key, row in here.items()}
    for replicate, here in seen.items():
        for key in all_rows.keys() - here.keys():
            row = replace(all_rows[key], replicate=replicate)
            raise _error(run, row, "a row as in other replicates", "none")
    return len(seen)


def _clean_samples(run: StoredRun, rows: list[Row]) -> int:
    """Return the number of samples. Raises ResultError for a row that no run takes."""
    owners: Owners = {}
    for row in rows:
        for expected, actual in faults(row, owners):
            raise _error(run, row, expected, actual)
    of_energy = [row for row in rows if row.energy_j is not None]
    for row in of_energy:
        if bool(row.loads) != bool(of_energy[0].loads):
            raise _error(run, row, "loads in all rows with energy_j or in none", len(row.loads))
    return sum(len(row.samples_us) for row in rows)


def faults(row: Row, owners: Owners) -> Iterator[tuple[str, object]]:
    """Yield what was expected and found in a row that can be read; a right row becomes an owner.

    No samples repeat, and no two rows have equal ones, in 55,000 published rows, though the clock
    of a GPU has steps of 32 ns.
    """
    loads = [(f"{n} of load {at}", v) for at, load in row.loads.items() for n, v in load.items()]
    timed, taken = row.status is Status.OK, row.samples_us
    quantities = *vars(row).items(), *row.telemetry.items(), *loads  # energy_j is in two of them
    for name, value in quantities if timed else ():
        least = -inf if name in SIGNED else 0
        if isinstance(value, int | float) and not (value >= least and isfinite(value)):
            yield f"{name} of 0 or more", value
    if timed != bool(taken):
        yield "samples in ok rows only", f"{len(taken)} in a {row.status} row"
    for name, share in (("late", row.late), ("sparsity", row.sparsity)):
        if not 0 <= (share or 0.0) <= 1:
            yield f"{name} of 0 to 1", share
    if timed and not row.draws:
        yield "draws of the activations that were checked", "none"
    if bool(row.energy_window_s) != (row.energy_j is not None):
        yield f"energy_window_s beside energy_j, {row.energy_j}", row.energy_window_s
    yield from (("a time in µs", us) for us in taken if not 0 < us < inf)
    for step in range(1, len(taken) // 2 + 1):
        if taken[step] == taken[0] and taken[step:] == taken[:-step]:
            yield "samples of a clock", f"the first {step} again and again"
    if taken and (owner := owners.setdefault(tuple(sorted(taken)), row)) is not row:
        named = f"those of {owner.case.contender.label} in replicate {owner.replicate}"
        yield "samples of its own", named
    if row.loads:
        yield from _faults_of_loads(row)


def _faults_of_loads(row: Row) -> Iterator[tuple[str, object]]:
    """Yield what differs from the fields that harness/bench/energy.py writes."""
    if {*row.loads} != {*LOADS}:
        yield f"loads {' and '.join(LOADS)}", ", ".join(row.loads)
    for name, of_load in (("energy_j", "j_per_call"), ("energy_window_s", "window_s")):
        actual, full = getattr(row, name), row.loads.get("full", {}).get(of_load)
        if actual != full:
            yield f"{name} as {of_load} of load full, {full}", actual
    for name, load in row.loads.items():
        us, calls, window_s = (load.get(each, 0.0) for each in ("us_per_call", "calls", "window_s"))
        if not 0 < 0.25e6 * window_s <= us * calls <= 1.01e6 * window_s:  # half of it are pauses
            yield f"calls of load {name} that fill {window_s:g} s", f"{calls:g} of {us:g} µs"


def _own_draws(run: StoredRun, rows: list[Row]) -> int:
    """Return how many contests have draws; raises ResultError if two share two of them.

    Draws have 31 bits, so one may occur twice in a long run by chance.
    """
    owners: dict[tuple[int, int], tuple[Any, ...]] = {}
    contests = set()
    for row in rows:
        contest = row.reference, row.replicate, row.attempt, row.case.problem.id
        if row.draws:
            contests.add(contest)
        if len(set(row.draws)) < len(row.draws):
            raise _error(run, row, "draws that differ", list(row.draws))
        for pair in combinations(sorted(row.draws), 2):
            if owners.setdefault(pair, contest) != contest:
                raise _error(run, row, "draws of its own contest", f"{pair[0]} in another, too")
    return len(contests)


def _pairs(run: StoredRun, replicates: int) -> int:
    """Return the number of A/A pairs with times in the replicate with the fewest.

    Raises ResultError if a replicate has none among its reference rows.
    """
    twins = [row for row in (*run.reference, *run.rows) if row.case.contender.twin]
    pairs = Counter(row.replicate for row in twins if row.status is Status.OK)
    references = {row.replicate for row in run.reference if row.case.contender.twin}
    for replicate in range(replicates):
        if replicate not in references:
            where = f"{run.path / ROWS}: replicate {replicate}"
            raise ResultError(f"{where}: expected A/A pairs (reference rows), found none")
    return min(pairs[replicate] for replicate in range(replicates))


def _right(run: StoredRun, rows: list[Row]) -> int:
    """Return the number of ok rows; raises ResultError if one has no error or exceeds its bound."""
    ok_rows = [row for row in rows if row.status is Status.OK]
    for row in ok_rows:
        allowed = (row.case.contender.error or {}).get("at_most")
        for name, limit in (("error", allowed or inf), ("error_of_bound", 1.0)):
            actual = getattr(row, name)
            if actual is None or not 0 <= actual <= limit or actual == inf:
                raise _error(run, row, f"{name} of at most {limit:.2g} in an ok row", actual)
    return len(ok_rows)


def _possible_clocks(run: StoredRun, rows: list[Row]) -> int:
    """Return the number of rows with an SM clock; raises ResultError for one that no GPU has.

    A GPU that reports its clock in environment.json also reports it under load.
    """
    gpu = run.environment.get("gpu") or {}
    most, reports = gpu.get("sm_clock_max_mhz") or inf, gpu.get("sm_clock_mhz") is not None
    count = 0
    for row in rows:
        named = {
            f"{name} of telemetry": row.telemetry.get(name) for name in ("sm_mhz", "sm_mhz_min")
        }
        loads = {f"sm_mhz of load {at}": load.get("sm_mhz") for at, load in row.loads.items()}
        for name, mhz in (named | loads).items():
            if mhz is None and name in loads and reports:
                raise _error(run, row, name, "none")
            if mhz is not None and not 0 < mhz <= most:
                raise _error(run, row, f"{name} of at most {most:g} (environment.json)", mhz)
        count += any((named | loads).values())
    return count


def _above_bounds(run: StoredRun, rows: list[Row]) -> int:
    """Return the number of rows with a bound; a CPU has none, because its cores are shared."""
    timed, gpu = [row for row in rows if row.status is Status.OK], on_gpu(run.environment)
    if gpu and not run.environment.get("ceilings"):
        where = run.path / "environment.json"
        raise ResultError(f"{where}: expected the ceilings of a GPU, found none")
    for row in timed:
        if gpu == (row.clock == "host"):
            raise _error(run, row, f"a clock of a {'GPU' if gpu else 'CPU'}", row.clock)
    bound = [row for row in timed if gpu and row.bound_us]
    for row in bound:
        time, least = median(row.samples_us), LIGHT * (row.bound_us or 0.0)
        if time < least:
            raise _error(run, row, f"at least {least:.2f} µs ({row.bound_by})", f"{time:.2f} µs")
    return len(bound)


def _equal_operands(run: StoredRun, rows: list[Row]) -> int:
    """Return the number of problems; raises ResultError if a problem has two digests."""
    digests: dict[str, str] = {}
    for row in rows:
        if row.digest:
            expected = digests.setdefault(row.case.problem.id, row.digest)
            if row.digest != expected:
                raise _error(run, row, f"operands {expected}", row.digest)
    return len(digests)


def _error(run: StoredRun, row: Row, expected: str, actual: Any) -> ResultError:
    """Name a row by file, problem, contender, scope, cache state and replicate."""
    named = f"problem {row.case.problem.id} {row.case.contender.label} {row.scope} {row.cache}"
    where = f"{run.path / ROWS}: {named} in replicate {row.replicate}"
    return ResultError(f"{where}: expected {expected}, found {actual}")

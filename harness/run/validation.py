"""Check a bundle, from the digests of its files to the plan that its suite asks for.

    files ─> published digest ─> rows ─> replicates ─> A/A pairs ─> samples ─> errors, times
          ─> operands ─> plan

No code of other packages runs, unless `plugins` allows it for a suite that names their modules.
Each check that cannot be made here is reported, and the exit code is then 5. No GPU is needed.
Without torch, or without the folder of the sources, the plan is not checked.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from sparsebench._discovery import own_code_only
from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench.sampling import (
    CAPTURED,
    INTERRUPTED,
    MIN_SAMPLES,
    ROUNDS,
    SCOPES,
    layers_of,
    sample_budget,
)
from sparsebench.results.formatting import amount, selection
from sparsebench.results.record import Row, Status
from sparsebench.results.run import bundle, store
from sparsebench.results.run.consistency import check_consistency
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables import tuning_doubts
from sparsebench.results.tables.frame import frame

DIGEST = re.compile(rf"^([0-9a-f]{{64}})  (\S+)/{re.escape(bundle.MANIFEST)}$", re.MULTILINE)
"""A line of the page of published runs, as sha256sum writes and checks it."""


@dataclass(frozen=True)
class CheckResult:
    """One line about one check; `checked` is False if the check could not be made here."""

    text: str
    checked: bool = True


def validate(
    path: Path, data: Path | None = None, *, plugins: bool = False
) -> Iterator[CheckResult]:
    """Check a bundle and yield a line for each check. Raises ResultError at the first failure.

    A badly tuned contender is only a warning.
    `plugins` allows the suite to import modules of other packages.
    """
    yield CheckResult(f"files: {', '.join(bundle.verify(path))}: unchanged since they were sealed")
    yield CheckResult(f"bundle: {_compare_with_page(path)}")
    run = store.read(path)
    for line in check_consistency(run):
        yield CheckResult(line)
    timed = amount(_require_planned_samples(run), "row")
    yield CheckResult(f"sample counts: {timed}, each with about as many as its time allows")
    for doubt in tuning_doubts.doubts(frame(run.rows)):
        yield CheckResult(f"warning: {doubt}")
    try:
        from sparsebench.harness.run.recorded_plan import require_planned_rows, suite_of_run

        with nullcontext() if plugins else own_code_only():
            count = require_planned_rows(run, suite_of_run(run, data))
    except (SuiteError, ModuleNotFoundError) as error:
        reason = f"the suite cannot be expanded here: {error}"
        yield CheckResult(f"plan: not checked, because {reason}", checked=False)
        return
    only, ended = run.state["flags"]["only"], run.state.get("ended_by")
    part = f" with --only {selection(only)!r}" if only else ""
    part += ", of the problems that its budget allowed" if ended else ""
    planned = f"{amount(count, 'row')} per replicate, exactly those of suite.yaml{part}"
    yield CheckResult(f"plan: {planned}")


def _compare_with_page(path: Path) -> str:
    """Compare a bundle's digest with the page of published runs above it, if there is one.

    Rows can be changed and sealed anew, but then the digest differs from that page.
    """
    digest, home = bundle.identity(path), path.resolve()
    folder = home.parents[3 if home.parent.parent.name == bundle.EARLIER else 1]  # a replaced run
    page = folder / "README.md"
    digests = dict[str, str]()
    if page.is_file():
        digests = {name: sha for sha, name in DIGEST.findall(page.read_text("utf-8", "replace"))}
    name = home.relative_to(page.parent).as_posix()
    if not digests:
        return f"SHA-256 {digest}; results/published/README.md lists that of every published run"
    if digests.get(name) != digest:
        expected = f"expected a manifest with SHA-256 {digests.get(name, 'none')} ({page})"
        raise ResultError(f"{path}: {expected}, found {digest}")
    return f"SHA-256 {digest}, as listed in {page.name} of the published runs"


def _require_planned_samples(run: StoredRun) -> int:
    """Return how many rows have samples. Raises ResultError for numbers that sampling.py never has.

    The plan follows from an estimate, the shorter time of two calls. Where the host makes the call,
    other work may interrupt both, so there the process with the most samples counts.
    """
    best: dict[tuple[str, str, str], list[Row]] = {}
    rows = [row for row in [*run.reference, *run.rows] if row.status is Status.OK]
    for row in rows:
        per_round = row.samples_per_block
        rounds, rest = divmod(len(row.samples_us), max(1, per_round))
        fewest = MIN_SAMPLES if row.scope in SCOPES else 1  # a reading may be taken once
        whole = not rest and per_round >= 1 and fewest <= rounds <= ROUNDS
        if not whole or (per_round > 1 and rounds < ROUNDS):
            raise _unplanned(run, row, _planned(row))
        if row.scope not in SCOPES:  # as many as its call has
            continue
        if row.clock == "graph":
            least, most = _planned(row, CAPTURED), _planned(row, 1 / CAPTURED)
            if not least <= (rounds, per_round) <= most:
                raise _unplanned(run, row, least)
        elif row.clock in ("host", "events"):
            best.setdefault((row.case.id, row.scope, row.cache), []).append(row)
    for processes in best.values():
        row = max(processes, key=lambda row: len(row.samples_us))
        least = _planned(row, INTERRUPTED)
        if len(processes) > 1 and len(row.samples_us) < prod(least):
            raise _unplanned(run, row, least)
    return len(rows)


def _planned(row: Row, slower: float = 1.0) -> tuple[int, int]:
    """Return rounds and samples per round of a call that takes `slower` times its median."""
    return sample_budget(slower * median(row.samples_us) * layers_of(row.scope))


def _unplanned(run: StoredRun, row: Row, planned: tuple[int, int]) -> ResultError:
    label = f"problem {row.case.problem.id} {row.case.contender.label} {row.scope} {row.cache}"
    count, per_round = len(row.samples_us), row.samples_per_block
    actual = f"{amount(count, 'sample')}, {per_round} per round, of {median(row.samples_us):g} µs"
    expected = f"about {planned[0]} rounds of {planned[1]} (sampling.py)"
    where = f"{run.path / bundle.ROWS}: {label} in replicate {row.replicate}"
    return ResultError(f"{where}: expected {expected}, found {actual}")

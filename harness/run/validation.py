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
from pathlib import Path
from statistics import median

from sparsebench._discovery import own_code_only
from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench.sampling import (
    BUDGET_MS,
    MIN_SAMPLES,
    ROUNDS,
    SAMPLES_PER_ROUND,
    layers_of,
)
from sparsebench.results.formatting import amount
from sparsebench.results.record import Status
from sparsebench.results.run import bundle, store
from sparsebench.results.run.consistency import check_consistency
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables import tuning_doubts
from sparsebench.results.tables.frame import frame

DIGEST = re.compile(rf"^([0-9a-f]{{64}})  (\S+)/{re.escape(bundle.MANIFEST)}$", re.MULTILINE)
"""A line of the page of published runs, as sha256sum writes and checks it."""

SPENT = 0.25, 2.0  # fractions of BUDGET_MS; published rows took 0.4 to 1.2 of it


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
    if count := _require_plausible(run):
        rows = amount(count, "row")
        yield CheckResult(f"time taken: {rows} with about as many samples as their times allow")
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
    part = f" with --only {only!r}" if (only := run.state["flags"]["only"]) else ""
    planned = f"{amount(count, 'row')} per replicate, exactly those of suite.yaml{part}"
    yield CheckResult(f"plan: {planned}")


def _compare_with_page(path: Path) -> str:
    """Compare a bundle's digest with the page of published runs above it, if there is one.

    Rows can be changed and sealed anew, but then the digest differs from that page.
    """
    digest, home = bundle.identity(path), path.resolve()
    folder = home.parents[3 if home.parent.parent.name == "earlier" else 1]  # a replaced run
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


def _require_plausible(run: StoredRun) -> int:
    """Return how many rows were checked. Raises ResultError if sample count and time disagree.

    The plan of samples (sampling.py) takes BUDGET_MS of a contender's time, within limits: samples
    that were divided by ten would add up to a tenth of that.
    """
    rows = [row for row in [*run.reference, *run.rows] if row.status is Status.OK]
    graph_rows = [row for row in rows if row.clock == "graph"]
    for row in graph_rows:
        count, per_round = len(row.samples_us), row.samples_per_block
        rounds, rest = divmod(count, max(1, per_round))
        share = 1e-3 * count * median(row.samples_us) * layers_of(row.scope) / BUDGET_MS
        fewer, more = count < ROUNDS * SAMPLES_PER_ROUND, rounds > MIN_SAMPLES
        whole = not rest and MIN_SAMPLES <= rounds <= ROUNDS and per_round >= 1
        if not whole or (fewer and share < SPENT[0]) or (more and share > SPENT[1]):
            label = f"problem {row.case.problem.id} {row.case.contender.label}"
            expected = f"samples that take about {BUDGET_MS:g} ms"
            actual = f"{count}, {per_round} per round, of {median(row.samples_us):g} µs"
            where = f"{run.path / bundle.ROWS}: {label}"
            raise ResultError(f"{where}: expected {expected}, found {actual}")
    return len(graph_rows)

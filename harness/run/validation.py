"""Is a bundle whole? From the digests of its files to the plan that its suite asks for.

    files ─> published digest ─> rows ─> replicates ─> A/A pairs ─> samples ─> errors, times
          ─> operands ─> plan

None of a stranger's code runs: a suite that names modules of another package is not expanded unless
that is allowed. What could not be checked is said, and has an exit code of its own. A GPU is not
needed, nor is torch or the folder that the sources were in, but without the latter two the plan is
not checked.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sparsebench._discovery import own_code_only
from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench.sampling import (
    BLOCKS,
    BUDGET_MS,
    MIN_SAMPLES,
    SAMPLES_PER_BLOCK,
    layers_of,
)
from sparsebench.results import bundle, store, tuning_doubts
from sparsebench.results.consistency import check_consistency
from sparsebench.results.formatting import amount
from sparsebench.results.record import Row, Status
from sparsebench.results.store import Run

DIGEST = re.compile(rf"^([0-9a-f]{{64}})  (\S+)/{re.escape(bundle.MANIFEST)}$", re.MULTILINE)
"""A line of the page of published runs, as sha256sum writes and checks it."""

SPENT = 0.25, 2.0  # of BUDGET_MS; published rows took 0.4 to 1.2 of it


@dataclass(frozen=True)
class Checked:
    """A line on one thing, and whether it could be checked here."""

    said: str
    checked: bool = True


def validate(
    path: Path,
    data: Path | None = None,
    beside: Iterable[Path] = (),
    *,
    plugins: bool = False,
) -> Iterator[Checked]:
    """Check a bundle: a line for each thing; a ResultError at the first that is wrong.

    A warning is no error: who may not have been at their best, here or in the runs in `beside`.
    `plugins` allows the suite to import modules of other packages.
    """
    yield Checked(f"files: {', '.join(bundle.verify(path))}: as they were sealed")
    yield Checked(f"bundle: {_published(path)}")
    run = store.read(path)
    for line in check_consistency(run):
        yield Checked(line)
    yield Checked(
        f"time taken: {amount(_plausible(run), 'row')}, each about as long as samples were taken"
    )
    for line in tuning_doubts.warnings(run, beside):
        yield Checked(line)
    try:
        from sparsebench.harness.run.recorded_plan import own_suite, require_planned

        with nullcontext() if plugins else own_code_only():
            count = require_planned(run, own_suite(run, data))
    except (SuiteError, ModuleNotFoundError) as error:
        why = f"not checked, the suite cannot be expanded here: {error}"
        yield Checked(f"plan: {why}", checked=False)
        return
    part = f" with --only {chosen!r}" if (chosen := run.state["flags"]["only"]) else ""
    yield Checked(f"plan: {amount(count, 'row')} a replicate, all that suite.yaml asks for{part}")


def _published(path: Path) -> str:
    """Hold a bundle's digest against the page of published runs above it, if there is one.

    Whoever changes rows and seals them anew changes it: the page is what they cannot seal.
    """
    digest, home = bundle.identity(path), path.resolve()
    page = home.parent.parent / "README.md"
    listed = dict[str, str]()
    if page.is_file():
        listed = {name: sha for sha, name in DIGEST.findall(page.read_text("utf-8", "replace"))}
    name = home.relative_to(page.parent).as_posix()
    if not listed:
        return f"SHA-256 {digest}; results/published/README.md lists that of every published run"
    if listed.get(name) != digest:
        said = f"expected a manifest with SHA-256 {listed.get(name, 'none')} ({page})"
        raise ResultError(f"{path}: {said}, found {digest}")
    return f"SHA-256 {digest}, as {page.name} of the published runs lists it"


def _plausible(run: Run) -> int:
    """Return how many rows have as many samples as their time allows; ResultError at the first.

    The plan of samples (timing.py) takes BUDGET_MS of a contender's time, within limits: rows whose
    samples were divided by ten say that they took a tenth of it.
    """
    replayed = [r for r in [*run.reference, *run.rows] if r.status is Status.OK]
    replayed = [row for row in replayed if row.clock == "graph"]
    for row in replayed:
        blocks, rest = divmod(len(row.samples_us), max(1, row.samples_per_block))
        taken_ms = 1e-3 * len(row.samples_us) * median(row.samples_us) * layers_of(row.scope)
        spent = taken_ms / BUDGET_MS
        fewer, more = len(row.samples_us) < BLOCKS * SAMPLES_PER_BLOCK, blocks > MIN_SAMPLES
        whole = not rest and MIN_SAMPLES <= blocks <= BLOCKS and row.samples_per_block >= 1
        if not whole or (fewer and spent < SPENT[0]) or (more and spent > SPENT[1]):
            expected = f"samples that take about {BUDGET_MS:g} ms"
            raise ResultError(f"{_named(run, row)}: expected {expected}, found {_taken(row)}")
    return len(replayed)


def _named(run: Run, row: Row) -> str:
    label = row.case.contender.label
    return f"{run.path / bundle.ROWS}: problem {row.case.problem.id} {label}"


def _taken(row: Row) -> str:
    count, each = len(row.samples_us), row.samples_per_block
    return f"{count}, {each} a block, of {median(row.samples_us):g} µs"

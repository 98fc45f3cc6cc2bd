"""Is a bundle whole? From the hashes of its files to the plan that its suite asks for.

    files ─> rows ─> replicates ─> samples ─> operands ─> plan

The plan is checked where the suite can be expanded: its sources are at hand and its kernels
installed. A GPU is not needed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench.timing import possible
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Contest, Suite, read
from sparsebench.results import bundle, peers, store
from sparsebench.results.inspection import inspect
from sparsebench.results.record import Case
from sparsebench.results.store import Run


def validate(path: Path, data: Path | None = None, beside: Iterable[Path] = ()) -> Iterator[str]:
    """Check a bundle: a line for each thing checked; a ResultError at the first that is wrong.

    A warning is no error: who may not have been at their best, here or in the runs in `beside`.
    """
    yield f"files: {', '.join(bundle.verify(path))}: as they were sealed"
    run = store.read(path)
    yield from inspect(run)
    yield from peers.told(run, beside)
    try:
        suite = own_suite(run, data)
    except SuiteError as error:
        yield f"plan: not checked, the suite cannot be expanded here: {error}"
        return
    part = f" with --only {chosen!r}" if (chosen := run.state["flags"]["only"]) else ""
    count = require_planned(run, suite)
    yield f"plan: {count} rows a replicate, all that suite.yaml asks for{part}"


def data_of(run: Run, data: Path | None) -> Path | None:
    """Return where a run's sources are: as given now, else as given then."""
    recorded = run.state["flags"]["data"]
    return data or (Path(recorded) if recorded else None)


def own_suite(run: Run, data: Path | None) -> Suite:
    """Expand a run's own suite.yaml, under the name that it ran by.

    SuiteError where that cannot be done here, or where the sources are no longer the same files.
    """
    folder = data_of(run, data)
    suite = read(str(run.path / "suite.yaml"), folder)
    here = {s.sha256: s.path for c in _contests(run, suite) if (s := c.problem.source)}
    then = {s.sha256: s.path for row in run.rows if (s := row.case.problem.source)}
    for gone in then.keys() - here.keys():
        said = f"expected {then[gone]} with SHA-256 {gone}, found other files"
        raise SuiteError(f"{folder}: {said}")
    for added in here.keys() - then.keys():
        if run.state["status"] == "finished":
            said = f"expected the files that were measured, found {here[added]} beside them"
            raise SuiteError(f"{folder}: {said}")
    return replace(suite, name=run.state["suite"])


def require_planned(run: Run, suite: Suite) -> int:
    """Return how many rows the suite asks of each replicate; ResultError where others are there.

    A/A pairs are not the suite's, and are left out.
    """
    measures = possible(suite.measures, run.state["flags"]["device"])
    cases = [Case(c.problem, k) for c in _contests(run, suite) for k in c.contenders]
    expected = {(case.id, *measure): case for case in cases for measure in measures}
    rows = (row for row in run.rows if not row.case.contender.twin)
    found = {(row.case.id, row.scope, row.cache): row.case for row in rows}
    for key, case in {**expected, **found}.items():
        if (key in expected) != (key in found):
            wanted, had = ("a row", "none") if key in expected else ("none (suite.yaml)", "a row")
            where = f"problem {case.problem.id} {case.contender.label} {' '.join(key[1:])}"
            raise ResultError(f"{run.path / bundle.ROWS}: {where}: expected {wanted}, found {had}")
    return len(expected)


def _contests(run: Run, suite: Suite) -> list[Contest]:
    return only(suite.contests, run.state["flags"]["only"])

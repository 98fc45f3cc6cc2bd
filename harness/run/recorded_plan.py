"""A run's own suite, expanded again, and whether the run has what it asks for."""

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparsebench._discovery import modules
from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench.sampling import possible
from sparsebench.harness.inputs.sources import FILE
from sparsebench.harness.machine.code import code_sha256, plugins
from sparsebench.harness.plan.selection import planned
from sparsebench.harness.plan.suite import Contest, Suite, expand
from sparsebench.results import bundle
from sparsebench.results.record import Case
from sparsebench.results.store import Run


def own_suite(run: Run, data: Path | None) -> Suite:
    """Expand a run's own suite.yaml, under the name that it ran by, with sources below `data`.

    SuiteError where that cannot be done here, or where the sources are no longer the same files.
    """
    suite = expand(str(run.path / "suite.yaml"), run.suite_text, data, published=True)
    suite = replace(suite, name=run.state["suite"])
    here = {s.sha256: s.path for c in _contests(run, suite) if (s := c.problem.source)}
    then = {s.sha256: s.path for row in run.rows if (s := row.case.problem.source)}
    for gone in then.keys() - here.keys():
        said = f"expected {then[gone]} with SHA-256 {gone}, found other files"
        raise SuiteError(f"{data}: {said}")
    for added in here.keys() - then.keys():
        if run.state["status"] == "finished":
            said = f"expected the files that were measured, found {here[added]} beside them"
            raise SuiteError(f"{data}: {said}")
    return suite


def require_planned(run: Run, suite: Suite) -> int:
    """Return how many rows the suite asks of each replicate; ResultError where others are there.

    Twins are among them; the A/A pairs of the noise-floor contests are every run's own.
    """
    measures = possible(suite.measures, run.state["flags"]["device"])
    cases = [Case(c.problem, k) for c in _contests(run, suite) for k in c.contenders]
    expected = {(case.id, *measure): case for case in cases for measure in measures}
    found = {(row.case.id, row.scope, row.cache): row.case for row in run.rows}
    for key, case in {**found, **expected}.items():
        if (key in expected) != (key in found):
            wanted, had = ("a row", "none") if key in expected else ("none (suite.yaml)", "a row")
            where = f"problem {case.problem.id} {case.contender.label} {' '.join(key[1:])}"
            raise ResultError(f"{run.path / bundle.ROWS}: {where}: expected {wanted}, found {had}")
    return len(expected)


def _contests(run: Run, suite: Suite) -> list[Contest]:
    """Return what the suite asks for, twins included."""
    flags = run.state["flags"]
    asked = planned(suite, flags["device"], flags["only"], flags.get("shard", ""))
    return [contest for contest in asked if not contest.reference]


def code_of(contests: Iterable[Contest]) -> dict[str, Any]:
    """Return what environment.json says of the code that these contests run."""
    found = plugins(_modules(contests))
    return {"plugins": found, "code_sha256": code_sha256(found)}


def require_plugins(run: Run) -> None:
    """Raise SuiteError where a package that a run was measured with is not here."""
    for package, facts in run.environment.get("plugins", {}).items():
        if find_spec(package.partition(".")[0]) is None:
            name, version = facts.get("distribution") or package, facts.get("version")
            expected = f"expected the plug-in {name} {version or '(of no known version)'}"
            raise SuiteError(f"{run.path}: {expected}, which it was measured with; found none")


def _modules(contests: Iterable[Contest]) -> set[str]:
    named: set[tuple[str, str]] = set()
    for contest in contests:
        named |= {("harness.ops", contest.problem.op)}
        named |= {("harness.patterns", contest.problem["pattern"])}
        for contender in contest.contenders:
            named |= {("formats", contender.format), ("kernels", contender.kernel)}
    places = (modules(folder).get(name, name) for folder, name in named)
    return {place.partition(":")[0] for place in places if place != FILE}

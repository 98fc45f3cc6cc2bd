"""The packages of others that a run uses: recorded with the run, and asked for to repeat it.

contests ─> names that are not ours ─> packages ─> environment.json: plugins, code_sha256
"""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from sparsebench._discovery import modules
from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.sources import FILE
from sparsebench.harness.machine.code import code_sha256, plugins
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.store import Run


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

"""The plan that a recorded run followed: rebuilt from the run, and compared with this installation.

code_of           contests ─> names of other packages ─> environment.json: plugins, code_sha256
suite_of_run      suite.yaml of the run, expanded again
require_planned_rows   the rows of the run are those of its plan
completed_rows    rows of a stopped run, from the contests that it completed
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparsebench._discovery import modules
from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench.sampling import Measure, distinct_measures
from sparsebench.harness.catalog import load_op
from sparsebench.harness.machine.code import code_sha256, plugins
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import Contest, Suite, expand
from sparsebench.harness.run.run_json import Flags
from sparsebench.results.record import Case, Row
from sparsebench.results.run import bundle, provenance, store
from sparsebench.results.run.provenance import Choices, flat
from sparsebench.results.run.store import StoredRun


def code_of(contests: Iterable[Contest]) -> dict[str, Any]:
    """Return the part of environment.json that names the code which these contests run.

    A name without a place has none: the pattern of a file, or a kernel that is not installed.
    """
    names: set[tuple[str, str]] = set()
    for problem, contenders in ((contest.problem, contest.contenders) for contest in contests):
        names |= {("harness.ops", problem.op), ("harness.patterns", problem["pattern"])}
        names |= {("formats", k.format) for k in contenders}
        names |= {("kernels", k.kernel) for k in contenders}
    places = {modules(f).get(name, name if {*".:"} & {*name} else None) for f, name in names}
    packages = plugins({place.partition(":")[0] for place in places if place})
    return {"plugins": packages, "code_sha256": code_sha256(packages)}


def require_plugins(run: StoredRun) -> None:
    """Raise SuiteError if a package that the run was measured with is not installed."""
    for package, facts in run.environment.get("plugins", {}).items():
        if find_spec(package.partition(".")[0]) is None:
            name, version = facts.get("distribution") or package, facts.get("version")
            expected = f"expected the plug-in {name} {version or '(version unknown)'}"
            raise SuiteError(f"{run.path}: {expected}, which it was measured with; found none")


def suite_of_run(run: StoredRun, data: Path | None) -> Suite:
    """Expand a run's own suite.yaml under the name it had then, with sources below `data`.

    Raises SuiteError if it cannot be expanded here, or if the source files have changed.
    """
    suite = expand(str(run.path / "suite.yaml"), run.suite_text, data, published=True)
    suite = replace(suite, name=run.state["suite"])
    here = {s.sha256: s.path for c in _contests(run, suite) if (s := c.problem.source)}
    then = {s.sha256: s.path for row in run.rows if (s := row.case.problem.source)}
    for missing in then.keys() - here.keys():
        raise SuiteError(f"{data}: expected {then[missing]} with SHA-256 {missing}, found others")
    for added in here.keys() - then.keys() if run.state["status"] == "finished" else ():
        raise SuiteError(f"{data}: expected only files that were measured, found {here[added]} too")
    return suite


def require_planned_rows(run: StoredRun, suite: Suite) -> int:
    """Return how many rows the suite plans for each replicate, A/A twins included.

    Raises ResultError unless the run has exactly these, and those of the noise-floor contests,
    which every run has and the number leaves out. If the budget of a run ended, the problems that
    it reached count.
    """
    contests, every_row = _contests(run, suite), [*run.rows, *run.reference]
    if run.state.get("ended_by") == store.BUDGET:
        reached = {row.case.problem.id for row in every_row}
        contests = [contest for contest in contests if contest.problem.id in reached]
    device = run.state["flags"]["device"]
    expected = {
        (contest.reference, case.id, *measure): case
        for contest in contests
        for case in (Case(contest.problem, k) for k in contest.contenders)
        for measure in _measures(suite, case, device)
    }
    present = {(r.reference, r.case.id, r.scope, r.cache): r.case for r in every_row}
    for key, case in {**present, **expected}.items():
        if (key in expected) != (key in present):
            row = "a reference row" if key[0] else "a row"
            needed, had = (row, "none") if key in expected else ("none (suite.yaml)", row)
            where = f"problem {case.problem.id} {case.contender.label} {key[2]} {key[3]}"
            raise ResultError(f"{run.path / bundle.ROWS}: {where}: expected {needed}, found {had}")
    return sum(not reference for reference, *_ in expected)


def _measures(suite: Suite, case: Case, device: str) -> tuple[Measure, ...]:
    return distinct_measures(suite.measures, device, load_op(case.problem.op).readings)


def _contests(run: StoredRun, suite: Suite) -> list[Contest]:
    flags = Flags.from_state(run.state)
    if shard := run.state["flags"].get("shard"):
        expected = "the run of a whole plan, because --shard is gone since 0.4"
        raise SuiteError(f"{run.path}: expected {expected}; found shard {shard}")
    return planned_contests(suite, flags.device, flags.only, flags.unpruned)


def completed_rows(
    path: Path, suite: Suite, flags: Flags, contests: Iterable[Contest]
) -> list[Row]:
    """Return the rows of the contests that a stopped run completed.

    Raises SuiteError if the run has another suite or other flags.
    """
    run = store.read(path)
    if run.suite_text != suite.text:
        raise SuiteError(f"--resume {path}: expected the run's own suite.yaml, found another suite")
    if "ceilings" not in run.environment:
        raise SuiteError(f"--resume {path}: expected ceilings in environment.json, found none")
    before = run.state["flags"]
    for name, value in (("only", flags.only), ("replicates", flags.replicates)):
        if before[name] != value:
            raise SuiteError(f"--resume {path}: expected {name} {before[name]!r}, found {value!r}")
    expected = {
        c.problem.id: {
            (case.id, *measure)
            for case in (Case(c.problem, k) for k in c.contenders)
            for measure in _measures(suite, case, flags.device)
        }
        for c in contests
    }
    by_contest: dict[tuple[int, str], list[Row]] = {}
    for row in store.rows(path):
        by_contest.setdefault((row.replicate, row.case.problem.id), []).append(row)
    return [
        row
        for (_, problem), rows in by_contest.items()
        if {(row.case.id, row.scope, row.cache) for row in rows} == expected.get(problem)
        for row in rows
    ]


def require_same_machine(path: Path, here: Mapping[str, Any]) -> None:
    """Raise SuiteError if code, plug-ins, tables, libraries or the device have changed."""
    before, now = flat(store.read(path).environment), flat(here)
    plugin_names = {name for name in {*before, *now} if name.startswith(("plugins.", "tuned."))}
    device = "gpu.uuid", "gpu.driver", "gpu.spec_sha256", "cpu.name"
    versions = (f"versions.{name}" for name in here["versions"])
    for name in (*sorted(plugin_names), "code_sha256", *device, *versions):
        old, new = before.get(name), now.get(name)
        if old != new:
            raise SuiteError(f"--resume {path}: expected {name} {old}, found {new}")


def require_same_choices(path: Path, before: Mapping[str, Any], chosen_by: Choices) -> None:
    """Raise SuiteError if one session would search in another way than the one before."""
    if (chosen_before := provenance.choices_of(before)) is not chosen_by:
        expected = f"expected choices by {chosen_before}, found {chosen_by}"
        raise SuiteError(f"--resume {path}: {expected}")

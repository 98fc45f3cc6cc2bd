"""What a campaign will cost on one GPU, entry by entry, from rows that were published from it.

suite       as `check --gpu` estimates it (suite_estimates.py); where its source files are
            not here, a published run of the suite, process by process
confirm     its cells alone, with the noise floor that every run has
reproduce   as what it repeats, without a search
claims      what the entries above leave of their suites, and a confirming run a suite, but where
            an entry above confirms cells of that suite: most claims then need no other
energy      ENERGY_S a case and process, beside the rest
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparsebench.errors import SuiteError
from sparsebench.harness.claims.checking import evidence
from sparsebench.harness.claims.claim_catalog import chosen
from sparsebench.harness.claims.claim_plan import Part
from sparsebench.harness.costs.suite_estimates import Costs, plan_there
from sparsebench.harness.costs.suite_estimates import costs as known_costs
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.shared_runs.campaign_file import Campaign, Entry
from sparsebench.results import files
from sparsebench.results.record import Case

ENERGY_S = 2.0


@dataclass(frozen=True)
class Estimate:
    """What an entry takes in seconds; None where nobody knows. `how` says what it is taken from."""

    entry: Entry
    seconds: float | None
    how: str = ""


def estimates(campaign: Campaign, gpu: Path, data: Path | None = None) -> list[Estimate]:
    """Estimate every entry from the published runs of one GPU; ResultError where there is none."""
    there = known_costs(gpu)
    found: dict[str, Estimate] = {}
    for entry in campaign.entries:
        match entry.kind:
            case "suite":
                made = _of_suite(entry, there, gpu, data)
            case "confirm":
                made = _of_cells(entry, campaign, there, data)
            case "reproduce":
                made = _again(entry, campaign, found[entry.of], there, data)
            case _:
                made = _of_claims(entry, campaign, there, data)
        found[entry.name] = made
    return list(found.values())


def _of_suite(entry: Entry, there: Costs, gpu: Path, data: Path | None) -> Estimate:
    if not entry.known(data):
        return _of_runs(entry, gpu)
    planned = plan_there(entry.read(data), there, entry.only, entry.replicates)
    energy_s = ENERGY_S * planned["supported"] * entry.replicates if entry.energy else 0.0
    unknown = ", ".join(planned["unknown"])
    how = f"{unknown} never measured there, and taken as typical" if unknown else ""
    return Estimate(entry, planned["estimate_s"] + energy_s, how)


def _again(
    entry: Entry, campaign: Campaign, before: Estimate, there: Costs, data: Path | None
) -> Estimate:
    (of,) = campaign.above(entry)
    if not of.known(data):
        return Estimate(entry, before.seconds, f"as {entry.of}")
    suite, processes = of.read(data), of.replicates
    planned = plan_there(suite, there, of.only, processes, pinned=True)
    return Estimate(entry, planned["estimate_s"], f"as {entry.of}, without a search")


def _of_runs(entry: Entry, gpu: Path) -> Estimate:
    """Take what a process of a published run took: of the entry's name, or else of its suite."""
    for file in sorted(gpu.glob("*/run.json"), key=lambda file: file.parent.name != entry.name):
        state = files.from_json(file)
        if state["suite"] == entry.suite:
            each_s = state["seconds"] / state["flags"]["replicates"]
            return Estimate(entry, each_s * entry.replicates, f"as the run {file.parent.name}")
    return Estimate(entry, None, "no source files, and no run of this suite")


def _of_cells(entry: Entry, campaign: Campaign, there: Costs, data: Path | None) -> Estimate:
    (of,) = campaign.above(entry)
    if not of.known(data):
        return Estimate(entry, None, f"no suite of {of.name} here")
    suite = of.read(data)
    contests = only(suite.contests, f"{of.only} {entry.only}".strip())
    cases = [Case(c.problem, k).id for c in contests for k in c.contenders if not k.baseline]
    return Estimate(entry, _cases_s(suite, cases[: entry.cases], there, entry.replicates))


def _of_claims(entry: Entry, campaign: Campaign, there: Costs, data: Path | None) -> Estimate:
    parts = evidence(chosen(entry.claims or []), data=data).all_parts
    measured = set(_measured_above(entry, campaign, data))
    confirmed = {_confirmed_suite(e, campaign, data) for e in campaign.above(entry) if e.confirm}
    seconds = 0.0
    for text in {part.suite.text for part in parts}:
        own = [part for part in parts if part.suite.text == text]
        suite = own[0].suite
        left = _cases((part, part.problems - measured) for part in own)
        exist = [part for part in own if part.test.quantifier == "exists" and text not in confirmed]
        alone = [part.cases(part.problems)[:2] for part in exist]
        for cases in (left, alone[0] if alone else []):
            seconds += _cases_s(suite, cases, there, entry.replicates)
    return Estimate(entry, seconds)


def _confirmed_suite(entry: Entry, campaign: Campaign, data: Path | None) -> str:
    (of,) = campaign.above(entry)
    return of.read(data).text if of.known(data) else ""


def _cases(wanted: Iterable[tuple[Part, set[str]]]) -> list[str]:
    return [*dict.fromkeys(case for part, problems in wanted for case in part.cases(problems))]


def _cases_s(suite: Suite, cases: Iterable[str], there: Costs, replicates: int) -> float:
    if not (asked := [*cases]):
        return 0.0
    return float(plan_there(suite, there, f"case={'|'.join(asked)}", replicates)["estimate_s"])


def _measured_above(entry: Entry, campaign: Campaign, data: Path | None) -> Iterable[str]:
    """Yield the problems of all suites above an entry; without their files they are no claim's.

    Fewer processes than the claims ask for are taken, too.
    """
    for above in campaign.above(entry):
        if above.known(data):
            try:
                contests = only(above.read(data).contests, above.only)
            except SuiteError:
                continue
            yield from (contest.problem.id for contest in contests)

"""How long a suite, a survey, a check of claims and a campaign will take on one GPU.

    run      = ceilings + R x (start + contests + rows) + prepare in the first process and R - 1
               later ones + an energy window a case and process     (measured_times.py)
    survey   a run of as many problems as fit into the time that is left
    claims   a run for each suite that has cells to measure
    campaign entry by entry:
      suite      as above; without its source files, the published run of that suite or name
      confirm    its cells alone, without a search
      reproduce  as the run that it repeats, without a search
      claims     what the entries above leave, and a confirming run for each suite that needs one

A kernel without times is taken as typical, and named. Times of a suite that reads files from --data
are unknown while those files are missing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.operands import unusable
from sparsebench.harness.bench.prepare import unsupported_on
from sparsebench.harness.bench.sampling import distinct_measures
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.claims.checking import (
    Evidence,
    evidence,
    measures_energy,
    missing,
    runs_for,
)
from sparsebench.harness.claims.claim_plan import TestPlan, read_claims
from sparsebench.harness.costs.measured_times import (
    ENERGY_S,
    KernelTimes,
    MeasuredTimes,
    log_size,
    names,
    product,
    times_on,
    typical_times,
)
from sparsebench.harness.plan.selection import only, planned_contests
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.shared_runs.campaign_file import Campaign, Entry
from sparsebench.results import files
from sparsebench.results.formatting import amount, join_words
from sparsebench.results.record import Case, Contender, Problem
from sparsebench.results.run import store
from sparsebench.results.statistics.ratio import FEWEST

Reason = Callable[[Problem, Contender], str | None]
"""Says why a contender cannot run a problem, or returns None."""


def preview(
    suite: Suite,
    times: MeasuredTimes,
    condition: str = "",
    replicates: int = 3,
    *,
    pinned: bool = False,
    searched: bool = False,
    energy: bool = False,
    device: str = "cuda",
    reason: Reason | None = None,
) -> dict[str, Any]:
    """Return counts, an estimate in seconds and bytes, and the kernels without times.

    `pinned` if choices come from another run, without a search; `searched` if every process has the
    finalists of another run. Without a `reason` the device is not here, and a kernel runs if it is
    for such a device and the op. The estimate includes A/A twins and the noise floor; the counts
    are of the suite's own cases. References take no energy window.
    """

    def runs(contest: Contest, contender: Contender) -> bool:
        if reason:
            return not reason(contest.problem, contender)
        kernel = load_kernel(contender.kernel)
        return kernel.device in ("any", device) and kernel.op in ("any", contest.problem.op)

    selected = only(suite.contests, condition)
    measures = len(distinct_measures(suite.measures, device))
    process_s, windows = times.start_s, 0
    cases, seen = list[tuple[str, float, bool]](), set[tuple[Any, ...]]()
    for contest in planned_contests(suite, device, condition):
        running = [k for k in contest.contenders if runs(contest, k)]
        contest_s, row_s = times.contest_and_row_s(size := log_size(contest.problem))
        process_s += bool(running) * contest_s + len(running) * measures * row_s
        windows += len(running) * (not contest.reference)
        kernels = [names(contender) for contender in running if not contender.twin]
        for name in [label if label in times.first else kernel for label, kernel in kernels]:
            key = name, product(contest.problem)
            cases.append((name, size, key in seen))
            seen.add(key)
    first = times.later if pinned else times.searching if searched else times.first
    later = times.searching if replicates >= FEWEST and not pinned else times.later
    seconds = times.ceilings_s + replicates * (process_s + energy * windows * ENERGY_S)
    seconds += _prepare_s(cases, first) + (replicates - 1) * _prepare_s(cases, later)
    every = [(contest, contender) for contest in selected for contender in contest.contenders]
    supported = Counter(
        contender.kernel for contest, contender in every if runs(contest, contender)
    )
    largest = max((load_op(c.problem.op).held_bytes(c.problem) for c in selected), default=0)
    why = Counter((k.label, reason(c.problem, k)) for c, k in every) if reason else Counter()
    return {
        "suite": suite.name,
        "title": suite.title,
        "device": times.gpu,
        "problems": len(selected),
        "cases": len(every),
        "supported": supported.total(),
        "replicates": replicates,
        "estimate_s": round(seconds),
        "largest_bytes": largest,
        "memory_bytes": times.memory_bytes,
        "unknown": [] if reason else sorted(supported.keys() - times.first.keys()),
        "unsupported": [
            {"contender": label, "reason": text, "cases": count}
            for label, text, count in sorted((*key, n) for key, n in why.items() if key[1])
        ],
    }


def preview_here(
    suite: Suite, device: str, condition: str, replicates: int, data: Path | None
) -> dict[str, Any]:
    """Return a preview for a device of this machine, by typical times, with what cannot run there.

    The values of source files below `data` are read.
    """
    of_files = dict[str, str]()

    def reason(problem: Problem, contender: Contender) -> str | None:
        if data and problem.id not in of_files:
            of_files[problem.id] = unusable(problem, load_op(problem.op), data)
        return unsupported_on(device, problem, contender) or of_files.get(problem.id) or None

    times = typical_times(device)
    return preview(suite, times, condition, replicates, device=device, reason=reason)


def _prepare_s(
    cases: Sequence[tuple[str, float, bool]], kernels: Mapping[str, KernelTimes]
) -> float:
    """Return what preparing cases (kernel, size, whether its product was met) takes."""
    if not kernels:
        return 0.0
    typical = KernelTimes(
        median(kernel.once_s for kernel in kernels.values()),
        [case for kernel in kernels.values() for case in kernel.cases],
    )
    once_s = sum(kernels.get(name, typical).once_s for name in {case[0] for case in cases})
    each_s = (kernels.get(name, typical).case_s(size, again) for name, size, again in cases)
    return once_s + sum(each_s)


def affordable(
    suite: Suite,
    times: MeasuredTimes,
    candidates: Mapping[str, Sequence[str]],
    left_s: float,
    replicates: int,
    device: str = "cuda",
    *,
    searched: bool = False,
) -> dict[str, Sequence[str]]:
    """Return those candidate problems, with their case ids, that fit into the time left.

    Problems are tried in the order given; one that does not fit leaves room for those after it.
    """
    fitting: dict[str, Sequence[str]] = {}
    for problem, cases in candidates.items():
        more = fitting | {problem: cases}
        ids = "|".join(dict.fromkeys(case for each in more.values() for case in each))
        run = preview(suite, times, f"case={ids}", replicates, device=device, searched=searched)
        if run["estimate_s"] <= left_s:
            fitting = more
    return fitting


@dataclass(frozen=True)
class PlannedRun:
    """A run that a check of claims has left to make; `seconds` is None without measured times."""

    suite: str
    claims: tuple[str, ...]
    contests: int
    cases: int
    seconds: float | None
    unknown: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Describe it: `announced: 18 contests, 90 cases, about 32 s; for blast-2025`."""
        time = f", about {self.seconds:.0f} s" if self.seconds is not None else ""
        typical = f" ({how})" if (how := _assumed(self.unknown)) else ""
        counts = f"{amount(self.contests, 'contest')}, {amount(self.cases, 'case')}"
        return f"{self.suite}: {counts}{time}{typical}; for {', '.join(self.claims)}"


def planned_runs(
    result: Evidence, device: str, replicates: int, times: MeasuredTimes | None
) -> list[PlannedRun]:
    """Return the runs that a check will make before any confirming run."""
    runs = []
    for gap in missing(result, device, replicates):
        claims = tuple(dict.fromkeys(plan.written.name for plan, _ in gap.gaps))
        contests = len({problem for _, problems in gap.gaps for problem in problems})
        run = PlannedRun(gap.suite.name, claims, contests, len(gap.cases), None)
        if times:
            only_these = f"case={'|'.join(gap.cases)}"
            costs = preview(gap.suite, times, only_these, gap.replicates, energy=gap.energy)
            run = replace(run, seconds=costs["estimate_s"], unknown=tuple(costs["unknown"]))
        runs.append(run)
    return runs


def left_out(result: Evidence) -> list[str]:
    """Return a line for each suite that is not measured because its source files are missing."""
    by_suite: dict[str, list[str]] = {}
    for plan in result.all_plans:
        if not plan.contests:
            by_suite.setdefault(plan.suite.name, []).append(plan.written.name)
    return [
        f"{suite}: left out, because its problems are files below --data; for {', '.join(claims)}"
        for suite, claims in by_suite.items()
    ]


@dataclass(frozen=True)
class EntryEstimate:
    """The GPU time of a campaign's entry; None if unknown. `how` names what it is taken from."""

    entry: Entry
    seconds: float | None
    how: str = ""


def campaign_estimates(
    campaign: Campaign, gpu: Path, data: Path | None = None
) -> list[EntryEstimate]:
    """Estimate every entry from the published runs of one GPU. Raises ResultError without any."""
    times = times_on(gpu)
    suites, unreadable = dict[str, Suite](), dict[str, str]()
    for entry in campaign.entries:
        try:
            suites |= {entry.name: entry.read(data)} if entry.suite else {}
        except SuiteError as error:  # the source files are missing
            unreadable[entry.name] = f"; {error}" if data else ""
    plans = {
        entry.name: evidence(read_claims(entry.claims or [])).all_plans
        for entry in campaign.entries
        if entry.kind == "claims"
    }
    estimates: dict[str, EntryEstimate] = {}
    for entry in campaign.entries:
        above = campaign.above(entry)
        if entry.kind == "claims":
            estimate = _claims_estimate(entry, above, times, suites, plans)
        elif entry.kind == "suite":
            reason = unreadable.get(entry.name, "")
            estimate = _suite_estimate(entry, times, gpu, suites.get(entry.name), reason)
        elif above[0].name not in suites:
            reproduced = entry.kind == "reproduce"
            before = estimates[entry.of].seconds if reproduced else None
            how = f"as {entry.of}" if reproduced else f"no suite of {entry.of} here"
            estimate = EntryEstimate(entry, before, how)
        elif entry.kind == "reproduce":
            suite, of = suites[above[0].name], above[0]
            run = preview(suite, times, of.only, of.replicates, pinned=True)
            estimate = EntryEstimate(entry, run["estimate_s"], f"as {of.name}, without a search")
        else:
            suite, both = suites[above[0].name], f"{above[0].only} {entry.only}".strip()
            chosen_cases = [
                Case(contest.problem, contender).id
                for contest in only(suite.contests, both)
                for contender in contest.contenders
                if not contender.baseline
            ][: entry.cases]
            seconds = _cases_s(suite, chosen_cases, times, entry.replicates, pinned=True)
            estimate = EntryEstimate(entry, seconds)
        estimates[entry.name] = estimate
    return list(estimates.values())


def _assumed(kernels: Sequence[str]) -> str:
    """Say for which kernels no time is known; "" if there are none."""
    return f"assuming a typical time for {', '.join(kernels)}" if kernels else ""


def _suite_estimate(
    entry: Entry, times: MeasuredTimes, gpu: Path, suite: Suite | None, reason: str
) -> EntryEstimate:
    if suite:
        run = preview(suite, times, entry.only, entry.replicates, energy=entry.energy)
        how = _assumed(run["unknown"])
        return EntryEstimate(entry, run["estimate_s"], how)
    for path in sorted(store.runs_in(gpu), key=lambda path: path.name != entry.name):
        result = files.from_json(path / "run.json")
        if result["suite"] == entry.suite:
            process_s = result["seconds"] / result["flags"]["replicates"]
            how = f"as the run {path.name}{reason}"
            return EntryEstimate(entry, process_s * entry.replicates, how)
    return EntryEstimate(entry, None, f"no source files, and no run of this suite{reason}")


def _claims_estimate(
    entry: Entry,
    above: Sequence[Entry],
    times: MeasuredTimes,
    suites: Mapping[str, Suite],
    of_claims: Mapping[str, Sequence[TestPlan]],
) -> EntryEstimate:
    plans = of_claims[entry.name]
    earlier = [plan for each in above for plan in of_claims.get(each.name, ())]
    measured = {problem for plan in earlier for problem in plan.problems}
    with_energy = {p for plan in earlier if measures_energy(plan) for p in plan.problems}
    confirmed = {plan.suite.text for plan in earlier}
    for each in above:
        if each.name in suites:
            contests = only(suites[each.name].contests, each.only)
            problems = {contest.problem.id for contest in contests}
            measured |= problems
            with_energy |= problems if each.energy else set()
            if any(other.confirm == each.name for other in above):
                confirmed.add(suites[each.name].text)
    gaps = [(p, p.problems - (with_energy if measures_energy(p) else measured)) for p in plans]
    runs = runs_for(gaps, entry.replicates)
    seconds = sum(
        _cases_s(run.suite, run.cases, times, run.replicates, energy=run.energy) for run in runs
    )
    for text in {plan.suite.text for plan in plans}:
        tests = [plan for plan in plans if plan.suite.text == text]
        suite = tests[0].suite
        exist = [plan for plan in tests if plan.test.quantifier == "exists"]
        if exist and text not in confirmed:
            best = exist[0].cases(exist[0].problems)[:2]
            seconds += _cases_s(suite, best, times, entry.replicates, pinned=True)
    problems = {problem for run in runs for _, ids in run.gaps for problem in ids}
    suites_above = {each.suite for each in above}
    unknown = {p.written.name for p in plans if not p.contests and p.suite.name not in suites_above}
    parts = {
        f"{amount(len(problems), 'contest')} that no entry above has": bool(problems),
        "confirms cells of the runs above": bool(seconds and not problems),
        "judges the runs above": not (seconds or unknown),
        f"no source files for {join_words(sorted(unknown))}": bool(unknown),
    }
    how = "; ".join(text for text, applies in parts.items() if applies)
    return EntryEstimate(entry, None if unknown and not seconds else seconds, how)


def _cases_s(
    suite: Suite,
    cases: Sequence[str],
    times: MeasuredTimes,
    replicates: int,
    *,
    pinned: bool = False,
    energy: bool = False,
) -> float:
    if not cases:
        return 0.0
    only_these = f"case={'|'.join(cases)}"
    run = preview(suite, times, only_these, replicates, pinned=pinned, energy=energy)
    return float(run["estimate_s"])

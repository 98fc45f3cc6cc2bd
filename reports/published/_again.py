"""What was measured more than once: headlines alone, plans on two cards; and the energy of a call.

alone      a headline's case in the run that confirms it (harness/run/repeat.py)
elsewhere  a line a plan, or a part of it, that two cards measured: how far speed-ups are apart
twins      a line a GPU: how many pairs of the same kernel came out different
energy     a line a case of a run with `--energy`: mJ a call, and how much less than dense
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from sparsebench.reports.published._runs import Published
from sparsebench.reports.published._table import PROBLEM, Table, markdown, matched
from sparsebench.results import bundle
from sparsebench.results.comparison import agreement
from sparsebench.results.noise import Reliability
from sparsebench.results.provenance import Choices
from sparsebench.results.record import Case, Status

SEARCHED = {Choices.BUNDLE: "those of the first run"}
OWN = "its own search"


def alone(case: Mapping[Any, Any], runs: Mapping[str, Published]) -> str:
    """Return the speed-up of a case in the run that confirms its own; "" where none has it.

    It says where the A/A pairs of that run came out different.
    """
    screened = bundle.identity(runs[case["run"]].run.path)
    for run in runs.values():
        if run.run.state.get("confirms", {}).get("manifest_sha256") != screened:
            continue
        same = (run.cases[name] == case[name] for name in ("label", *PROBLEM) if name != "run")
        if np.logical_and.reduce([*same]).any():
            where = f"problem_id == '{case['problem_id']}'"
            ours = f"label == '{case['label']}'"
            (line,) = matched(Table("", "", (run.name,), ours, (), (), where), runs).figure
            doubtful = run.noise.reliability[0] is Reliability.UNRELIABLE
            return f"{line}, {Reliability.UNRELIABLE}" if doubtful else str(line)
    return ""


def elsewhere(runs: Mapping[str, Published]) -> str:
    """Return a line a pair of runs of one plan on two cards; "" where there is none."""
    header = ["run", "again", "on", "configurations", "cells", "ratio of speed-ups: mean"]
    header += ["least", "most", "is"]
    lines = []
    for first, second in _pairs(runs):
        found = agreement(first.run, second.run)
        cells = found.comparison.cases[found.comparison.cases.agree.notna()]
        ratios = cells.speedup_b_over_a.dropna()
        figures = np.exp(np.log(ratios).mean()), ratios.min(), ratios.max()
        lines.append(
            [
                *(f"[{run.name}](/{run.home})" for run in (first, second)),
                str(found.place),
                SEARCHED.get(found.choices, OWN),
                str(len(ratios)),
                *(f"{value:.3f}" for value in figures),
                "reproduced" if found.reproduced else "not reproduced",
            ]
        )
    return markdown(header, lines) if lines else ""


def _pairs(runs: Mapping[str, Published]) -> Iterator[tuple[Published, Published]]:
    """Yield runs of one plan, or of it and a part, the earlier first, where no card is in both."""
    known = sorted(runs.values(), key=lambda run: str(run.run.state["started"]))
    for first, second in combinations(known, 2):
        one, other = _asked(first), _asked(second)
        part = one <= other or other <= one
        if part and _plan(first) == _plan(second) and not _cards(first) & _cards(second):
            yield first, second


def _cards(run: Published) -> set[str]:
    return {row.device for row in run.run.rows}


def _asked(run: Published) -> set[str]:
    """Return the ids of the cases that a run was asked for; its twins are drawn among them."""
    return {row.case.id for row in run.run.rows if not row.case.contender.twin}


def _plan(run: Published) -> tuple[object, ...]:
    """Return what runs of one plan have in common; a run that confirms another has its own."""
    flags, confirms = run.run.state["flags"], str(run.run.state.get("confirms"))
    return run.run.suite_text, flags["replicates"], flags["energy"], confirms, run.gpu


def twins(runs: Mapping[str, Published]) -> str:
    """Return a line a GPU: A/A pairs of the verdicts on it; "" where there is none."""
    lines = []
    for gpu in dict.fromkeys(run.gpu for run in runs.values()):
        known = [run.noise.pairs.different.dropna() for run in runs.values() if run.gpu == gpu]
        known = [pairs for pairs in known if len(pairs)]
        count, found = sum(map(len, known)), sum(int(pairs.sum()) for pairs in known)
        if count:
            share = f"{100 * found / count:.1f} %"
            lines.append([gpu, str(len(known)), str(count), str(found), share])
    header = ["GPU", "verdicts", "A/A pairs", "came out different", "share"]
    return markdown(header, lines) if lines else ""


def energy(runs: Mapping[str, Published]) -> str:
    """Return a line a case whose energy was measured; "" where there is none.

    In brackets are the least and the greatest of its processes.
    """
    header = ["op", "dtype", "tokens", "n × k", "contender", "mJ a call", "less than dense, %"]
    lines = [line for run in runs.values() for line in _of_run(run)]
    return markdown([*header, "run"], lines) if lines else ""


def _of_run(run: Published) -> Iterator[list[str]]:
    cases: dict[str, Case] = {}
    contests: dict[str, dict[str, dict[int, float]]] = {}
    for row in run.run.rows:
        if row.status is Status.OK and row.energy_j and not row.case.contender.twin:
            cases[row.case.id] = row.case
            contest = contests.setdefault(row.case.problem.id, {})
            contest.setdefault(row.case.id, {})[row.replicate] = 1e3 * row.energy_j
    for contest in contests.values():
        dense = [used for case, used in contest.items() if cases[case].contender.baseline]
        least = min(dense, key=lambda used: float(np.median([*used.values()])), default={})
        for case, used in contest.items():
            problem, who = cases[case].problem, cases[case].contender
            fields, both = problem.fields, () if who.baseline else used.keys() & least.keys()
            layers = f"{fields.get('layers')} layers"
            shape = f"{fields['n']} × {fields['k']}" if "n" in fields else layers
            yield [
                *map(str, (problem.op, fields["dtype"], fields["m"], shape)),
                f"`{who.label}`",
                _ends([*used.values()]),
                _ends([100 * (1 - used[p] / least[p]) for p in both]),
                f"[{run.name}](/{run.home}), {run.processes} processes",
            ]


def _ends(values: Sequence[float]) -> str:
    """Write a median with its least and greatest value; "" where there is none."""
    if not values:
        return ""
    ends = (f"{value:.4g}" for value in (np.median(values), min(values), max(values)))
    return "{} [{}, {}]".format(*ends)

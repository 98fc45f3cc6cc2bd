"""Cases that two cards measured: how often they agree, and how far cards differ.

    repeat   a case in two runs on different cards of one kind, 6 processes or more each, which ran
             the same kernel; `a` is the earlier run
    d        difference of the mean log speedups, b minus a
    s²       variance of d by the processes of both runs (Welch 1947)

    d² - s²  has the mean    v / cards of a + v / cards of b      both runs searched
                             v / cards of a + w / cards of b      b inherited its configurations

Each variance is the sum of d² - s² over its repeats, divided by the sum of their factors. The one
of `free` comes from repeats whose cards were not limited, the one of `limited` from repeats with a
limited card, and w, the one of `inherited`, from the rest. The cases of one pair of runs are not
independent, since they share cards and sessions. So the degrees of freedom come from the scatter
over pairs of runs, as 2 v² / var(v) (Satterthwaite 1946).

Two runs of one version of the code ran the same kernel. So did runs of different versions if they
have compiled code of the case in common, or if a library is the kernel. Their difference includes
that of days, hosts and versions of the harness: repeats of one version on two days gave a standard
deviation of only 0.30 %, instead of 0.97 %.

`coverage` counts the repeats in which the interval of the difference contains 0, so that no change
is settled. No pair of runs is tested with an estimate that it contributed to: for the published
repeats, the variation comes from all other pairs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import hypot
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.comparison.sides import cells
from sparsebench.results.record import Status
from sparsebench.results.statistics.between_cards import (
    SCHEMA,
    State,
    Variation,
    from_json,
    packaged_variation,
    state_of,
)
from sparsebench.results.statistics.ratio import FEWEST, welch
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.cases import has_baseline
from sparsebench.results.tables.frame import KEYS, records

LABELS = ["label", "baseline_label"]
PAIR = ["run_a", "run_b"]
COLUMNS = [*PAIR, *KEYS, *LABELS, "state_a", "state_b", "cards_a", "cards_b"]
COLUMNS += ["d", "half", "excess"]
COUNTS = ["repeats", "covers", "covers_cards"]

LIBRARIES = "torch", "cuda", "triton"

Line = Mapping[Any, Any]


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a run, as plain data.

    run      its name            ran    what repeats share: device, libraries
    started  its date            code   digest of the code
    cases    KEYS, the labels, cards, compiled code, speedups and the state of each case
    """

    run: str
    started: str
    ran: Sequence[str]
    code: str
    cases: Sequence[Mapping[str, Any]]


def verdicts(analysis: Analysis, name: str = "") -> Verdicts:
    """Return the verdicts of a run, by default named by its folder.

    Only cases that run on known cards count, so a CPU has none.
    """
    run, cases = analysis.run, cells(analysis)
    enough = has_baseline(cases) & (cases.status == Status.OK) & (cases.processes >= FEWEST)
    cases = cases[enough & cases.speedup.notna() & (cases.on_cards > 0)]
    lines = [
        {name: line[name] for name in (*KEYS, *LABELS, "cards")}
        | {"compiled": line["codes"]}
        | {"speedups": [round(value, 6) for value in line["speedups"]]}
        | {"state": str(state_of(line["limited"], not line["searched"]))}
        for line in records(cases)
    ]
    versions = run.environment.get("versions", {})
    ran = [analysis.device, *(str(versions.get(name)) for name in LIBRARIES)]
    code = str(run.environment.get("code_sha256"))
    return Verdicts(name or run.path.name, str(run.state.get("started", "")), ran, code, lines)


def repeats(runs: Iterable[Verdicts]) -> pd.DataFrame:
    """Return a line per repeat; see the docstring of this file."""
    ordered = sorted((run for run in runs if run.cases), key=lambda run: run.started)
    pairs = [(a, b) for a, b in combinations(ordered, 2) if a.ran == b.ran]
    return pd.DataFrame([line for pair in pairs for line in _of_pair(*pair)], columns=COLUMNS)


def variation(repeats: pd.DataFrame) -> dict[State, Variation]:
    """Return the variation between cards of each state.

    A state with fewer than two pairs of runs gets the variation of all repeats that searched. No
    state varies less than the ones before it.
    """
    inherited = repeats.state_b == State.INHERITED
    limited = (repeats[["state_a", "state_b"]] == State.LIMITED).any(axis=1)
    searched, result = _variation(repeats[~inherited], {}), dict[State, Variation]()
    for state, which in (
        (State.FREE, ~inherited & ~limited),
        (State.LIMITED, ~inherited & limited),
        (State.INHERITED, inherited),
    ):
        estimate = _variation(repeats[which], result)
        estimate = estimate if estimate.pairs > 1 else searched
        result[state] = max([estimate, *result.values()], key=Variation.half)
    return result


def coverage(repeats: pd.DataFrame, published: bool = False) -> pd.DataFrame:
    """Return each pair of runs with its number of repeats, and how many have no settled change.

    covers        by the processes alone
    covers_cards  with the variation between cards: that of all other pairs if the repeats are those
                  that were `published`, else the packaged one
    """
    lines = []
    for (run_a, run_b), group in repeats.groupby(PAIR, sort=False):
        other_pairs = repeats[(repeats.run_a != run_a) | (repeats.run_b != run_b)]
        by_state = variation(other_pairs) if published else packaged_variation()
        between = [
            hypot(*(by_state[line[f"state_{end}"]].half(line[f"cards_{end}"]) for end in "ab"))
            for line in records(group)
        ]
        covers = [(group.d.abs() <= np.hypot(group.half, wider)).sum() for wider in (0, between)]
        inherited = bool((group.state_b == State.INHERITED).any())
        lines.append([run_a, run_b, inherited, len(group), *map(int, covers)])
    return pd.DataFrame(lines, columns=[*PAIR, "inherited", *COUNTS])


def are_published(repeats: pd.DataFrame) -> bool:
    """Return whether these are the repeats from which the packaged variation comes."""
    return from_json(json.loads(text_of(repeats))) == packaged_variation()


def text_of(repeats: pd.DataFrame) -> str:
    """Return the text of between_cards.json."""
    by_state = {
        state: replace(entry, sd=round(entry.sd, 6), freedom=round(entry.freedom, 3))
        for state, entry in variation(repeats).items()
    }
    return json.dumps({"schema": SCHEMA, "variation": by_state}, default=asdict, indent=1) + "\n"


def _of_pair(a: Verdicts, b: Verdicts) -> list[dict[Any, Any]]:
    """Return the repeats of two runs on different cards; a run that inherits is never the first."""
    ids = [{case["case_id"] for case in side.cases} for side in (a, b)]
    if ids[0].isdisjoint(ids[1]):
        return []
    tables = [pd.DataFrame([*side.cases]).assign(run=side.run) for side in (a, b)]
    both = tables[0].merge(tables[1], on=[*KEYS, *LABELS], suffixes=("_a", "_b"))
    lines: list[dict[Any, Any]] = []
    for line in records(both[both.state_a != State.INHERITED]):
        if {*line["cards_a"]} & {*line["cards_b"]} or not (a.code == b.code or _same_kernel(line)):
            continue
        logs = [np.log(line[f"speedups_{end}"]) for end in "ab"]
        d, half = welch(*logs)
        within = sum(float(side.var(ddof=1)) / side.size for side in logs)
        counts = {f"cards_{end}": len(line[f"cards_{end}"]) for end in "ab"}
        lines.append(line | counts | {"d": d, "half": half, "excess": d**2 - within})
    return lines


def _same_kernel(line: Line) -> bool:
    """Return whether both runs have compiled code in common; True if a library is the kernel."""
    compiled = [{*line[f"compiled_{end}"]} for end in "ab"]
    return not compiled[0].isdisjoint(compiled[1]) or not any(compiled)


def _variation(repeats: pd.DataFrame, earlier: Mapping[State, Variation]) -> Variation:
    """Return the variation that repeats show at each end whose state has no `earlier` one."""
    excess, weights = [], []
    for line in records(repeats):
        ends = [(line[f"state_{end}"], line[f"cards_{end}"]) for end in "ab"]
        inherited = ends[1][0] == State.INHERITED
        rest = earlier[ends[0][0]].sd ** 2 / ends[0][1] if inherited else 0.0
        excess.append(line["excess"] - rest)
        weights.append(sum(1 / cards for _, cards in (ends[1:] if inherited else ends)))
    table = repeats[PAIR].assign(excess=excess, weight=weights)
    total = float(table.weight.sum())
    variance = max(0.0, float(table.excess.sum()) / total) if total else 0.0
    scatter = (table.excess - variance * table.weight).groupby([table[n] for n in PAIR]).sum()
    pairs = len(scatter)
    error = float((scatter**2).sum()) / total**2 * pairs / (pairs - 1) if pairs > 1 else 0.0
    freedom = max(1.0, 2 * variance**2 / error) if error else 1.0
    return Variation(variance**0.5, freedom, len(table), pairs)

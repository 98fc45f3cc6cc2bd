"""The answer of a run in a sentence or two, and each format once. Pure functions of its cases.

    bsr_wgmma is 5.58 ± 0.02 times as fast as cuBLAS at 90 %, blocks of 128 (linear, bf16, ...):
    29.3 µs against 164 µs; best peer: torch_bsr tuned=True, 3.9 times.

Of each op and pattern it takes the level nearest to LEVEL, and of that the largest speed-up of
anything but a dense kernel. Where nothing is faster than the baseline, that is the sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparsebench.reports._words import (
    FORMATS,
    OURS,
    duration,
    family,
    format_of,
    kernel,
    percent,
    plus_minus,
    significant,
    winner,
)
from sparsebench.results.environment import flat
from sparsebench.results.frame import fields
from sparsebench.results.noise import Noise, Reliability
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run

LEVEL = 0.9  # that answers speak of, where it was measured
SENTENCES = 4
CONTEST = ["problem_id", "scope", "cache"]


@dataclass(frozen=True)
class Format:
    """A format's best case at the level that answers speak of; or why it has none."""

    name: str
    best: Mapping[Any, Any] | None
    why: str = ""


def with_formats(cases: pd.DataFrame) -> pd.DataFrame:
    """Return cases with a column `ran_as`, the format of what ran."""
    return cases.assign(ran_as=[format_of(case) for case in cases.to_dict("records")])


def sentences(cases: pd.DataFrame) -> list[str]:
    """Return the answers, one for each op and pattern, the largest speed-up first."""
    best = [_best(group) for _, group in _raced(cases).groupby(["op", "pattern"], sort=False)]
    if not best:
        return []
    best.sort(key=lambda case: -case["speedup"])
    said = [_sentence(case, cases) for case in best[:SENTENCES]]
    return [*said, f"(±: {best[0]['interval']})"]


def formats(cases: pd.DataFrame) -> list[Format]:
    """Return each format of a run once, the dense baseline first."""
    cases = with_formats(cases[~cases.twin.astype(bool)])
    raced = _raced(cases)
    best = {name: _best(group) for name, group in raced.groupby("ran_as", sort=False)}
    found = []
    for name in sorted({*cases.ran_as}, key=lambda n: [*FORMATS, n].index(n)):
        own = cases[cases.ran_as == name]
        shown = FORMATS.get(name, name)
        if name == "dense":
            found.append(Format(shown, _baseline(cases, best)))
        elif name in best:
            found.append(Format(shown, best[name]))
        else:
            reasons = own.detail[own.status != Status.OK].mode()
            found.append(Format(shown, None, str(reasons.iloc[0]) if len(reasons) else "no time"))
    return found


def badges(run: Run, cases: pd.DataFrame, noise: Noise) -> list[str]:
    """Return what a reader must know before any number: VERDICT or LOOK, and what is wrong."""
    processes = int(cases.processes.max()) if len(cases) else 0
    counted = f"{processes} process{'es' if processes != 1 else ''}"
    found = [f"{'VERDICT' if processes >= FEWEST else 'LOOK'}: {counted}"]
    if str(flat(run.environment).get("device", "")).startswith("sim"):
        found.append("SIMULATED")
    if noise.reliability[0] is Reliability.UNRELIABLE:
        found.append("UNRELIABLE")
    if unfit(run):
        found.append("BUSY MACHINE")
    if run.state.get("status") not in ("finished", None):
        found.append(str(run.state["status"]).upper())
    return found


def unfit(run: Run) -> list[str]:
    """Return what made the machine unfit before or after the run, as the run recorded it."""
    told = run.state.get("fitness", {})
    return [
        f"{when} the run {finding['found']} ({finding['check']})"
        for when in ("before", "during")
        for finding in told.get(when, [])
        if finding["level"] == "warning"
    ]


def beyond(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the sparse weights faster by more than 1 / (1 - sparsity): the baseline was slow."""
    sparse = _raced(cases)
    sparse = sparse[sparse["format"] != "dense"]
    sparse = sparse[(sparse.level > 0) & (sparse.level < 1)]
    return sparse[sparse.speedup_low > 1 / (1 - sparse.level)]


def condition(case: Mapping[Any, Any]) -> str:
    """Say how sparse a case is: `90 %, blocks of 128`; `29 of 5632 units on`."""
    block = str(case.get("block", ""))
    said = [percent(case["level"])] if case["level"] > 0 else []
    said += [f"blocks of {block}"] if block not in ("", "1", "nan") else []
    if pd.notna(case.get("active")):
        said.append(f"{case['active']:g} of {case['n']} units on")
    if pd.notna(case.get("source")):
        said.append(str(case["source"]).rpartition("/")[2])
    return ", ".join(said)


def where(case: Mapping[Any, Any], names: list[str]) -> str:
    """Say what a case is about: `at 90 %, blocks of 128 (linear, m = n = k = 4096, bf16)`."""
    said = condition(case)
    sizes = {name: case[name] for name in ("m", "n", "k") if name in names}
    text = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    if len(set(sizes.values())) == 1:
        text = f"{' = '.join(sizes)} = {case['m']}"
    problem = ", ".join(filter(None, [str(case["op"]), text, str(case["dtype"])]))
    return f"at {said} ({problem})" if said else f"in {problem}"


def sparse_format(cases: pd.DataFrame) -> pd.Series:
    """Say which cases ask for sparse weights, or for the sparsity of activations."""
    of_activations = cases.kernel.map(family) == "sparse_activations"
    return (cases["format"] != "dense") | of_activations


def _raced(cases: pd.DataFrame) -> pd.DataFrame:
    """Return what ran in no dense format and has a speed-up."""
    raced = with_formats(cases[(cases.status == Status.OK) & cases.speedup.notna()])
    raced = raced[~raced.twin.astype(bool) & ~raced.baseline.astype(bool)]
    return raced[raced.ran_as != "dense"]


def _best(group: pd.DataFrame) -> dict[Any, Any]:
    """Return the fastest case at the level nearest to LEVEL."""
    away = (group.level - LEVEL).abs().fillna(1).round(6)
    near = group[away == away.min()]
    return dict(near.loc[near.speedup.idxmax()])


def _baseline(cases: pd.DataFrame, best: Mapping[Any, Mapping[Any, Any]]) -> Mapping[Any, Any]:
    """Return the baseline of the largest of the formats' answers; else the fastest dense case."""
    dense = cases[(cases.ran_as == "dense") & (cases.status == Status.OK)]
    if best:
        top = max(best.values(), key=lambda case: case["speedup"])
        same = dense[(dense[CONTEST] == pd.Series(top)[CONTEST]).all(axis=1)]
        dense = same[same.label == top["baseline_label"]]
    return dict(dense.sort_values("median_us").iloc[0]) if len(dense) else {}


def _sentence(case: Mapping[Any, Any], cases: pd.DataFrame) -> str:
    here = cases[(cases[CONTEST] == pd.Series(case)[CONTEST]).all(axis=1)]
    here = here[(here.status == Status.OK) & ~here.twin.astype(bool)]
    base_us = here[here.label == case["baseline_label"]].median_us
    base, name, place = kernel(case["baseline_label"]), winner(case), where(case, fields(cases))
    against = f"{duration(case['median_us'])} against {duration(base_us.median())}"
    ratio = plus_minus(case["speedup"], case["speedup_low"], case["speedup_high"])
    peers = here[~here.kernel.map(family).isin(OURS) & here.speedup.notna()]
    peer = ""
    others = peers.label != case["baseline_label"]
    if others.any() and family(case["kernel"]) in OURS:
        best = peers.sort_values("speedup", kind="stable").iloc[-1]
        peer = f"; best peer: {winner(best)}, {significant(best.speedup)} times"
        if best.label == case["baseline_label"]:
            peer = "; no peer is faster"
    doubt = {"inconclusive": " (inconclusive)", "no_difference": " (no difference)"}
    if case["speedup"] > 1:
        said = f"{name} is {ratio} times as fast as {base}{doubt.get(case['outcome'], '')} {place}"
    else:
        slower = f"the best of the others, {name}, is {ratio} times as fast"
        said = f"Nothing sparse is faster than {base} {place}: {slower}"
    return f"{said}: {against}{peer}." if case["speedup"] > 1 else f"{said}, {against}{peer}."

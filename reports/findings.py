"""The findings of a run: what each format shows, and the fastest kernel of each op and dtype.

    Faster than dense: blocks of 64 from 50 % to 95 % sparsity, up to 7.1× [7.0, 7.3].
    4.8× [4.7, 4.9] as fast as cublas (163 µs): bsr_wgmma 34.2 µs, 50 % of the hardware limit
      linear, bf16, m 4096, 4096 × 4096, 90 %, 64 × 64 blocks
      1.14× [1.11, 1.16] as fast as bsr_strips; users get bsr_wgmma by default (34.2 µs)
      one card, not limited by power or heat

What users get (`default`) is no rival of the kernel that it runs: a winner that was also measured
by its name has that name and that time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pandas as pd

from sparsebench.reports.figures.requests import per_second
from sparsebench.reports.grids import doubt, on_same_zeros, sentences
from sparsebench.results.formatting import between, conditions, duration, percent, times
from sparsebench.results.problem_names import problem_name
from sparsebench.results.record import UNPRUNED
from sparsebench.results.statistics.ratio import ratio_over
from sparsebench.results.tables import calls, cliffs, grid, untimed_peers
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.cases import DENSE
from sparsebench.results.tables.contests import STORED, in_chain, selects, stored_name, usual
from sparsebench.results.tables.families import DEFAULT
from sparsebench.results.tables.frame import fields, records
from sparsebench.results.tables.grid import EVERY, Case, Finding, View, outcome_of

TOPIC = ("op", "pattern")
USUAL = 0.9  # the winner is the fastest case at the measured sparsity nearest to this
MOST = 4  # ops and patterns with findings
LEAST = 0.01  # relative uncertainty that a lead shows


def findings(analysis: Analysis) -> list[str]:
    """Return the findings of a run in lines; those of details are indented."""
    winners = [
        line
        for finding in headlines(analysis)
        for line in (" ".join(headline_text(finding)), *(f"  {text}" for text in finding.details))
    ]
    return [*general(analysis), *winners, *remarks(analysis)]


def general(analysis: Analysis) -> list[str]:
    """Return what each format shows, for the first view of each op, pattern and dtype."""
    return [
        f"{topic}: {text}" if (topic := topic_of(view)) else text
        for view in first_views(analysis)
        for text in sentences(grid.findings(view.grid))
    ]


def first_views(analysis: Analysis) -> list[View]:
    """Return the first view of each dtype, for at most MOST pairs of op and pattern."""
    first: dict[tuple[str, ...], dict[str, View]] = {}
    for view in analysis.views:
        topic = tuple(view.choice.get(name, "") for name in TOPIC)
        first.setdefault(topic, {}).setdefault(view.choice.get("dtype", ""), view)
    return [view for by_dtype in [*first.values()][:MOST] for view in by_dtype.values()]


def topic_of(view: View) -> str:
    """Name what a view has chosen: the fields in which other views differ."""
    return problem_name(view.choice, [name for name in view.choice if view.choice[name] != EVERY])


def headline(analysis: Analysis) -> dict[str, Any]:
    """Return the first headline and `others`; nothing if a run has none.

    gain, rest  the text of the first headline
    case        its case
    others      the gain and the rest of each other headline, and remarks without a gain
    """
    every = headlines(analysis)
    if not every:
        return {}
    first, *others = every
    gain, rest = headline_text(first)
    texts = ((headline_text(other), other.group) for other in others)
    lines = [(of_other, f"{text}; {group}.") for (of_other, text), group in texts]
    lines += [("", remark) for remark in remarks(analysis)]
    rest = f"{'; '.join([rest, *first.details])}."
    return {"gain": gain, "rest": rest, "case": first.best["case_id"], "others": lines}


def remarks(analysis: Analysis) -> list[str]:
    """Return sentences about calls, cliffs, and kernels of others that could not run."""
    timed = analysis.timed
    texts = [calls.sentence(timed), cliffs.sentence(usual(timed))] if len(timed) else []
    return [*filter(None, [*texts, untimed_peers.sentence(analysis.run.rows)])]


@lru_cache(1)  # the card, the report and its evidence of a run begin with it
def headlines(analysis: Analysis) -> Sequence[Finding]:
    """Return the finding of the fastest case of each op, pattern and dtype near USUAL.

    A case with a gain over dense comes before one without.
    """
    timed = analysis.timed
    if timed.empty:
        return []
    first = usual(timed)
    sparse = first[first.side != "dense"]
    topics = [group for _, group in sparse.groupby([*TOPIC], sort=False)][:MOST]
    best = [
        fastest(cases, timed) for group in topics for _, cases in group.groupby("dtype", sort=False)
    ]
    best = [case for case in best if pd.notna(case["gain"])] or best
    best.sort(key=lambda case: (case["op"] != "linear", case["dtype"] != "bf16"))
    return [finding_of(case, timed) for case in best]


def headline_text(finding: Finding) -> tuple[str, str]:
    """Return the gain of a headline, and the rest of its sentence without the details."""
    case = finding.best
    who = f"{finding.contender} {duration(case['median_us'])}"
    if case["of_bound"] > 0:
        who += f", {percent(round(case['of_bound'], 2))} of the hardware limit"
    if pd.isna(case["gain"]):
        return "", f"{who}, without a dense time"
    word = f", {reason}" if (reason := doubt(case)) else ""
    format_of = "dense, " if _runs_dense_too(case) else ""
    dense = f"{case['dense_name']} ({format_of}{duration(case['dense_us'])})"
    gain = between(*(case[end] for end in ("gain", "low", "high", "half")))
    beside = "".join(f", {text}" for text in (on_same_zeros(case), _under_load(case)) if text)
    return gain, f"as fast as {dense}{word}{beside}: {who}"


def _runs_dense_too(case: Mapping[Any, Any]) -> bool:
    return bool(case["name"] == str(case.get("dense_name")).removesuffix(UNPRUNED))


def _under_load(case: Case) -> str:
    """Write the speedups half loaded and back to back, if the run measured energy."""
    half, full = (case.get(f"{load}_speedup", float("nan")) for load in ("half", "full"))
    if pd.isna(full):
        return ""
    return f"{times(half, half / 100)} half loaded and {times(full, full / 100)} back to back"


def finding_of(case: Case, timed: pd.DataFrame) -> Finding:
    """Return the finding of a case, with its problem, its lead and its conditions as details."""
    isolated = by_name(case, timed)
    best = in_chain(isolated, timed)
    names = ["op", *(name for name in fields(timed) if name != "sparsity"), "level", "source"]
    names += ["scope", "cache"]
    place = problem_name(best, names)
    contest = timed[timed.place == best["place"]]
    rivals = contest[(contest.side != "dense") & (contest.label != best["label"])]
    rivals = rivals.sort_values("median_us")
    alike = rivals.choice.map(selects) == selects(best["choice"])
    lead = _lead(best, rivals[alike]) if alike.any() or rivals.empty else ()
    details = [place, _rates(best, contest), _other_call(best, rivals[~alike]), "; ".join(lead)]
    if best["scope"] != isolated["scope"]:
        gain = times(isolated["gain"], isolated["half"])
        details.append(f"isolated {duration(isolated['median_us'])}, {gain}")
    details.append(conditions(best))
    return Finding(contender_name(best), place, outcome_of(best), best, [*filter(None, details)])


def _rates(best: Case, contest: pd.DataFrame) -> str:
    """Write the requests per second of a server and of the fastest dense one, or "".

    Their attention follows: with 128 requests, a step takes twice as long in sdpa as in FA3.
    """
    if (best["op"], best["scope"]) != ("serving", "op"):
        return ""
    dense = records(contest[contest.side == "dense"].sort_values("median_us"))[:1]
    texts = [per_second(best), *(f"dense {per_second(line)}" for line in dense)]
    by = json.loads(best["choice"] or "{}").get("attention")
    return f"requests per second: {', '.join(texts)}{f', both with {by}' if by else ''}"


def _other_call(best: Case, others: pd.DataFrame) -> str:
    """Write the fastest call that selects its blocks, or that is given them if the best selects."""
    if (others := others[others.gain.notna()]).empty:
        return ""
    call = dict(others.iloc[0])
    gain = between(*(call[end] for end in ("gain", "low", "high", "half")))
    who = f"{contender_name(call)} {duration(call['median_us'])}"
    how = "is given" if selects(best["choice"]) else "also selects"
    return f"{gain} if the call {how} its blocks: {who}"


def _lead(best: Case, rivals: pd.DataFrame) -> Iterator[str]:
    """Yield the lead over the next sparse kernel, and what users get."""
    runs_best = (rivals.kernel == DEFAULT) & _runs_as(best, rivals)
    same, rest = rivals[runs_best], rivals[~runs_best]
    users = rest[rest.kernel == DEFAULT]
    if rest.empty:
        yield "no other sparse kernel has a time"
    else:
        following = dict(rest.iloc[0])
        yield f"{_ratio(best, following)} as fast as {contender_name(following)}"
    if len(same):
        time = duration(same.iloc[0]["median_us"])
        yield f"users get {contender_name(best)} by default ({time})"
    elif len(users) and users.index[0] != rest.index[0]:
        default = dict(users.iloc[0])
        yield f"users get {contender_name(default)}, {duration(default['median_us'])}"


def _ratio(best: Case, following: Case) -> str:
    """Write how many times as fast a case is; with an interval if both ran in one process."""
    if lead := ratio_over(best["blocks"], following["blocks"], best["between"]):
        half = max(LEAST * lead.value, lead.high - lead.value, lead.value - lead.low)
        return between(lead.value, lead.low, lead.high, half)
    ratio = following["median_us"] / best["median_us"]
    return times(ratio, LEAST * ratio)


def by_name(best: Case, timed: pd.DataFrame) -> Case:
    """Return the case of the kernel that `default` ran, if that was measured too; else `best`."""
    named = timed[(timed.place == best["place"]) & (timed.side == "ours")]
    named = named[named.kernel != DEFAULT]
    named = named[_runs_as(best, named)].sort_values("median_us")
    return dict(named.iloc[0]) if best["kernel"] == DEFAULT and len(named) else best


def _runs_as(case: Case, others: pd.DataFrame) -> "pd.Series[bool]":
    """Return which others run the kernel of a case on the same blocks; none if it ran several."""
    alike = [
        bool(kernel_that_ran(case))
        and (kernel_that_ran(other), other["tile"]) == (kernel_that_ran(case), case["tile"])
        for other in records(others)
    ]
    return pd.Series(alike, others.index, dtype=bool)


def kernel_that_ran(case: Mapping[Any, Any]) -> str:
    """Return the kernel that a case runs: of `default` the chosen one, "" for a whole layer.

    A layer's gradient names the kernel of its product: bsr_small for bsr_small_dgrad.
    """
    chosen = json.loads(case["choice"] or "{}").get("kernel", "")
    return str(chosen if case["kernel"] == DEFAULT else case["kernel"]).removesuffix("_dgrad")


def contender_name(case: Mapping[Any, Any]) -> str:
    """Name a case as every sentence does.

    A dense kernel that a portfolio chose has the portfolio's name beside it, and a kernel that runs
    dense weights too has the format.
    """
    name = str(case["name"])
    if str(case["chosen"]).startswith(DENSE):
        return f"{name} (by {case['kernel']})"
    if not _runs_dense_too(case) or case["side"] == "dense":
        return name
    return f"{name} ({stored_name(*(str(case[field]) for field in STORED))})"


def fastest(group: pd.DataFrame, timed: pd.DataFrame) -> Case:
    """Return the fastest case at the sparsity nearest to USUAL, short ones inside a chain.

    If some calls select their blocks, it is one of them, because the others do less.
    """
    selecting = group[group.choice.map(selects)]
    group = selecting if len(selecting) else group
    away = (group.level - USUAL).abs().fillna(1).round(3)  # levels of files differ
    near = group[away == away.min()]
    gains = [in_chain(case, timed)["gain"] for case in records(near)]
    near = near.assign(chained=gains, haste=-near.median_us)
    return dict(near.sort_values(["chained", "haste"], na_position="first").iloc[-1])

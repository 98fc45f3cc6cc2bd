"""Cases that two cards measured: how often they agree, and how far cards differ.

    repeat   a case in two runs on different cards of one kind, 6 processes or more each, which ran
             the same kernel and searched for its configuration; `a` is the earlier run
    d        difference of the mean log speedups, b minus a
    s²       variance of d by the processes of both runs (Welch 1947)
    w        1 / cards of a + 1 / cards of b

    v   =  Σ (d² - s²) / Σ w                       variance between cards; d² - s² has mean v w
    f   =  2 v² / var(v), at most cards - 1        its degrees of freedom (Satterthwaite 1946)
    var(v) = (n - 1) / n Σ (v_c - mean v_c)²       jackknife: v_c leaves out the repeats of card c

They are estimated for each class of times and for each stratum, a kernel in a class of times.
between_cards.py pools the two. Repeats are not independent: 17 cards measured the first 503, some
in several runs. Over pairs of runs they seem to have 34 degrees of freedom, over cards 7.5.

Speedups are over dense on the same zeros here, which earlier runs and later ones have.

Two runs of one version of the code ran the same kernel. So did runs of different versions if they
have compiled code of the case in common, or if a library is the kernel. Their difference includes
that of days, hosts and versions of the harness: repeats of one version on two days gave a standard
deviation of only 0.30 %, instead of 1.1 %.

Each repeat tests the intervals:

    inside        the speedup of b lies inside the interval of a; expected of INSIDE
    covers        the interval of the difference, by the processes alone, contains 0
    covers_cards  the same with the variation between cards; expected of 95 %

INSIDE is below 95 % because a second card differs from its kind's mean just as the first does. No
repeat is tested with an estimate that its cards contributed to: for the published repeats, the
variation comes from those that neither card measured.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import scipy

from sparsebench.results.comparison.sides import cells
from sparsebench.results.record import Status
from sparsebench.results.statistics.between_cards import (
    CHAIN,
    CLASSES,
    SCHEMA,
    BetweenCards,
    Variation,
    from_json,
    packaged_variation,
    stratum,
    time_class,
)
from sparsebench.results.statistics.ratio import FEWEST, Floats, hodges_lehmann, welch
from sparsebench.results.tables.analysis import Analysis, analyse, has_unpruned, on_same_zeros
from sparsebench.results.tables.cases import has_baseline
from sparsebench.results.tables.frame import KEYS, records

LABELS = ["label", "baseline_label"]
PAIR = ["run_a", "run_b"]
SHARED = [*KEYS, *LABELS, "op", "kernel"]
NUMBERS = ["us_a", "us_b", "d", "half", "excess", "gap", "reach"]
COLUMNS = [*PAIR, *SHARED, "cards_a", "cards_b", *NUMBERS]
TESTS = ["inside", "covers", "covers_cards"]
INSIDE = 0.85

LIBRARIES = "torch", "cuda", "triton"

Line = Mapping[Any, Any]


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a run, as plain data.

    run      its name            ran    what repeats share: device, libraries
    started  its date            code   digest of the code
    cases    SHARED, time in µs, cards, compiled code and speedups of each case
    """

    run: str
    started: str
    ran: Sequence[str]
    code: str
    cases: Sequence[Mapping[str, Any]]


def verdicts(analysis: Analysis, name: str = "") -> Verdicts:
    """Return the verdicts of a run, by default named by its folder.

    Only cases that run on known cards count, so a CPU has none. Neither has a run that inherited
    its configurations: they were the fastest on another card.
    """
    run = analysis.run
    cases = cells(analyse(on_same_zeros(run)) if has_unpruned(run) else analysis)
    enough = has_baseline(cases) & (cases.status == Status.OK) & (cases.processes >= FEWEST)
    cases = cases[enough & cases.speedup.notna() & (cases.on_cards > 0) & cases.searched]
    lines = [
        {name: line[name] for name in (*SHARED, "cards")}
        | {"us": round(line["median_us"], 3), "compiled": line["codes"]}
        | {"speedups": [round(value, 6) for value in line["speedups"]]}
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
    table = pd.DataFrame([line for pair in pairs for line in _of_pair(*pair)], columns=COLUMNS)
    return table.astype(dict.fromkeys(NUMBERS, float))


def variation(repeats: pd.DataFrame) -> BetweenCards:
    """Return the variation between cards, of each class of times and of each stratum.

    A class without a repeat has the variation of all repeats.
    """
    names = [stratum(*line) for line in zip(repeats.kernel, repeats.us_a, strict=True)]
    chains = sorted({*repeats.kernel[repeats.scope == CHAIN]})
    (every,) = _variations(repeats, [""] * len(repeats)).values() or [Variation(0.0, 1.0, 0, 0)]
    classes = dict.fromkeys(CLASSES, every)
    classes |= _variations(repeats, [time_class(us) for us in repeats.us_a])
    classes = {n: replace(each, freedom=max(1.0, each.freedom)) for n, each in classes.items()}
    return BetweenCards(classes, _variations(repeats, names), chains)


def with_tests(repeats: pd.DataFrame, published: bool = False) -> pd.DataFrame:
    """Return the repeats with a column for each of TESTS.

    The variation is that of all repeats that neither card measured if the repeats are those that
    were `published`, else the packaged one.
    """
    lines = records(repeats)
    cards = [frozenset([*line["cards_a"], *line["cards_b"]]) for line in lines]
    by_cards = {
        both: variation(repeats[[both.isdisjoint(each) for each in cards]])
        if published
        else packaged_variation()
        for both in {*cards}
    }
    halves = np.array(
        [
            by_cards[both].of(line["kernel"], line[f"us_{end}"]).half(len(line[f"cards_{end}"]))
            for both, line in zip(cards, lines, strict=True)
            for end in "ab"
        ]
    ).reshape(-1, 2)
    away = repeats.d.abs()
    return repeats.assign(
        inside=repeats.gap.abs() <= np.hypot(repeats.reach, halves[:, 0]),
        covers=away <= repeats.half,
        covers_cards=away <= np.hypot(repeats.half, np.hypot(*halves.T)),
    )


def coverage(repeats: pd.DataFrame) -> pd.DataFrame:
    """Return how many repeats of each pair of runs pass each of TESTS, and how many it has."""
    pairs = repeats.groupby(PAIR, sort=False)[TESTS]
    return pairs.sum().assign(repeats=pairs.size()).reset_index()


def strata(repeats: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of `coverage` for each op and each class of times, and a p-value.

    p is that of the binomial test that INSIDE or more of the repeats of a stratum are inside, over
    all strata of the table (Holm 1979).
    """
    times = repeats.us_a.map(time_class).astype(pd.CategoricalDtype([*CLASSES], ordered=True))
    parts = [repeats.groupby(names, observed=True)[TESTS] for names in (repeats.op, times)]
    table = pd.concat([part.sum().assign(repeats=part.size()) for part in parts])
    table = table.rename_axis("stratum").reset_index()
    return table.assign(p=_holm(scipy.stats.binom.cdf(table.inside, table.repeats, INSIDE)))


def are_published(repeats: pd.DataFrame) -> bool:
    """Return whether these are the repeats from which the packaged variation comes."""
    return from_json(json.loads(text_of(repeats))) == packaged_variation()


def text_of(repeats: pd.DataFrame) -> str:
    """Return the text of between_cards.json."""
    data = {"schema": SCHEMA, **asdict(variation(repeats))}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _of_pair(a: Verdicts, b: Verdicts) -> list[dict[Any, Any]]:
    """Return the repeats of two runs on different cards."""
    ids = [{case["case_id"] for case in side.cases} for side in (a, b)]
    if ids[0].isdisjoint(ids[1]):
        return []
    tables = [pd.DataFrame([*side.cases]).assign(run=side.run) for side in (a, b)]
    both = tables[0].merge(tables[1], on=SHARED, suffixes=("_a", "_b"))
    lines: list[dict[Any, Any]] = []
    for line in records(both):
        if {*line["cards_a"]} & {*line["cards_b"]} or not (a.code == b.code or _same_kernel(line)):
            continue
        logs = [np.log(line[f"speedups_{end}"]) for end in "ab"]
        d, half = welch(*logs)
        within = sum(float(side.var(ddof=1)) / side.size for side in logs)
        first, second = map(hodges_lehmann, logs)
        gap = float(second.estimate - first.estimate)
        reach = float(first.high - first.estimate if gap > 0 else first.estimate - first.low)
        numbers = {"d": d, "half": half, "excess": d**2 - within, "gap": gap, "reach": reach}
        lines.append(line | numbers)
    return lines


def _same_kernel(line: Line) -> bool:
    """Return whether both runs have compiled code in common; True if a library is the kernel."""
    compiled = [{*line[f"compiled_{end}"]} for end in "ab"]
    return not compiled[0].isdisjoint(compiled[1]) or not any(compiled)


def _variations(repeats: pd.DataFrame, names: Sequence[str]) -> dict[str, Variation]:
    """Return the variation of the repeats of each name."""
    sides = list(zip(repeats.cards_a, repeats.cards_b, strict=True))
    table = pd.DataFrame(
        {
            "cards": [{*a, *b} for a, b in sides],
            "excess": repeats.excess.to_numpy(dtype=float),
            "weight": [1 / len(a) + 1 / len(b) for a, b in sides],
        }
    )
    return {str(name): _variation(group) for name, group in table.groupby([*names])}


def _variation(repeats: pd.DataFrame) -> Variation:
    """Return the variation of some repeats, with the freedom of its jackknife over cards."""
    cards = sorted(set[str]().union(*repeats.cards))
    of_card = np.array([[card in each for card in cards] for each in repeats.cards])
    sums = repeats[["excess", "weight"]].to_numpy()
    rest = sums.sum(axis=0) - of_card.T @ sums  # [cards, 2], without each card
    estimates = np.divide(*rest[rest[:, 1] > 1e-9].T)  # a card may be in all repeats
    excess, weight = sums.sum(axis=0)
    variance = max(0.0, excess / weight)
    error = (len(estimates) - 1) * np.var(estimates) if len(estimates) else 0.0
    freedom = min(2 * variance**2 / error, len(cards) - 1) if error else 0.0
    return Variation(
        round(float(variance**0.5), 6), round(float(freedom), 3), len(repeats), len(cards)
    )


def _holm(p: Floats) -> Floats:
    """Return p-values that hold for all of them together."""
    order = np.argsort(p)
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(1, adjusted)[np.argsort(order)]

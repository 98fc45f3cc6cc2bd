"""Runs over commits: how the headline of each run changed since it was first measured.

    is / first │            ┌── attention, H100     a line per run that a newer one replaced
    speedup, × │   ─────────┼────────────           named: the interval is beyond 1 %
               └─84a765b──f74262e──ea55be3          commits, by the day of their first run

Every point is the speedup over dense on the same zeros of the fastest sparse contender, in the
problem of today's headline. A version without that problem has no point. A look changes nothing:
only between two verdicts is a difference settled.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._svg import ROLES
from sparsebench.reports.site.cards import Card
from sparsebench.results.comparison.compare import difference
from sparsebench.results.comparison.sides import short_name
from sparsebench.results.formatting import amount, between, join_words
from sparsebench.results.statistics.outcome import DIFFERENT, outcome

SIZE = (640, 230)
QUIET = ROLES["dense"].but(marker="o", size=3.2, width=0.8, alpha=0.45)
GAIN = "zeros_gain", "zeros_low", "zeros_high"


@dataclass(frozen=True)
class Series:
    """A run over commits: its name, and each version with its speedup over the first one's."""

    name: str
    points: Sequence[tuple[Card, float, float, float]]

    @property
    def has_changed(self) -> bool:
        (first, *_), (last, _, low, high) = self.points[0], self.points[-1]
        return first.verdict and last.verdict and outcome(low, high) in DIFFERENT


def series(cards: Iterable[Card]) -> list[Series]:
    """Return the runs that were measured at several commits, by their name and GPU."""
    runs: dict[tuple[str, str], dict[str, Card]] = {}
    for card in sorted(cards, key=lambda card: card.started):
        runs.setdefault((card.name, card.gpu), {})[_commit(card)] = card
    return [
        Series(f"{name}, {short_name(gpu)}", points)
        for (name, gpu), versions in sorted(runs.items())
        if len(points := _points([*versions.values()])) > 1
    ]


def chart(every: Sequence[Series]) -> tuple[str, Markup]:
    """Return a sentence and the chart of the runs with versions."""
    versions = sorted((v for line in every for v, *_ in line.points), key=lambda v: v.started)
    commits = [*dict.fromkeys(_commit(version) for version in versions)]
    drawing = Chart(SIZE, "commit, by its first run", "speedup / that of the first run, ×", "y")
    drawing.ticks["x"] = [*enumerate(commits)]
    drawing.rule("y", 1)
    for line in sorted(every, key=lambda line: line.has_changed):
        look = ROLES["ours"] if line.has_changed else QUIET
        places = [commits.index(_commit(card)) for card, *_ in line.points]
        titles = [f"{line.name}, {_commit(c)}: {between(a, b, d)}" for c, a, b, d in line.points]
        ratios = [ratio for _, ratio, *_ in line.points]
        drawing.line(places, ratios, look, titles, line.name * line.has_changed)
    texts = [f"{e.name} {between(*e.points[-1][1:])}" for e in every if e.has_changed]
    head = f"{len(texts)} of {amount(len(every), 'headline')} changed by more than 1 %"
    sentence = ": ".join(filter(None, [head, join_words(texts)]))
    return f"{sentence}.", drawing.svg("Speedup of each headline over commits")


def _points(versions: Sequence[Card]) -> list[tuple[Card, float, float, float]]:
    """Return the versions with a speedup in the last one's problem, as ratios to the first."""
    case = versions[-1].headline.get("case")
    problems = {line["problem_id"] for line in versions[-1].lines if line["case_id"] == case}
    gains = [(card, gain) for card in versions if (gain := _gain(card.lines, problems))]
    return [(card, *difference((*gains[0][1], 0.0), (*gain, 0.0))) for card, gain in gains]


def _gain(lines: Sequence[Mapping[str, Any]], problems: Collection[str]) -> tuple[float, ...]:
    """Return the largest speedup of a sparse contender in a problem, with its interval, or ()."""
    sparse = [x for x in lines if x["problem_id"] in problems and x["side"] != "dense"]
    gains = (tuple(line[name] for name in GAIN) for line in sparse)
    return max((gain for gain in gains if all(gain)), default=())


def _commit(card: Card) -> str:
    return card.commit[:7] or card.started[:10]

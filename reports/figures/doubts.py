"""Times that may come from a bad choice of configuration, in a line each.

badly tuned    a tuned contender is slower than its defaults (results/tables/tuning_doubts.py)
cliffs         fewer tokens take longer than more (results/tables/cliffs.py)
"""

from collections.abc import Iterator

from markupsafe import Markup

from sparsebench.reports.figures._figure import Frames, describe_line
from sparsebench.reports.figures._html import note
from sparsebench.results.formatting import duration
from sparsebench.results.tables import cliffs
from sparsebench.results.tables.tuning_doubts import doubts

TITLE = "Badly tuned contenders, and cliffs in the number of tokens"
ORDER = 76


def draw(frames: Frames) -> Markup:
    """Write one line for each doubt."""
    tuned = [f"Slower than with its defaults: {doubt}." for doubt in doubts(frames.rows)]
    return Markup("").join(map(note, [*tuned, *_cliffs(frames)]))


def _cliffs(frames: Frames) -> Iterator[str]:
    if not (count := cliffs.sentence(frames.first)):
        return
    yield count
    every = cliffs.ratios(frames.first)
    for _, line in every[every.ratio > cliffs.LIMIT].iterrows():
        where = describe_line(line, [*cliffs.key(frames.first), "m"])
        more = f"m {line.more} takes {duration(line.least_us)}"
        yield f"{where}: {duration(line.median_us)}, and {more}."

"""Speedup over the baseline against the swept field."""

from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, swept
from sparsebench.reports.figures._sweep import Sweep
from sparsebench.reports.figures._verdict import intervals, meaning
from sparsebench.results.formatting import join_words, significant

TITLE = "Speedup against the baseline"
ORDER = 20

SPEEDUP = Sweep("speedup", "speedup, ×", 1, ideal=lambda level: 1 / (1 - level).clip(1e-6))


def draw(frames: Frames) -> Markup:
    """Draw one panel per shape and block."""
    cases = frames.contenders[frames.contenders.speedup.notna()]
    if cases.empty:
        return NOTHING
    bases = sorted(cases.baseline_label.unique())
    times = frames.first.median_us[frames.first.label.isin(bases)]
    words = (
        f"The line at 1 is the baseline, {join_words(bases)}, which takes "
        f"{significant(times.min())} to {significant(times.max())} µs. The dotted line is "
        "1 / (1 − sparsity): time proportional to the non-zeros. "
        f"Hollow: {meaning(cases)[1]}. {intervals(cases)}"
    )
    return SPEEDUP.draw(cases, swept(cases), words)

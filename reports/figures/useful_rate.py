"""Rate per useful FLOP of attention, as a fraction of the dense baseline's, against the sparsity.

    100 % x speedup x (FLOPs of allowed elements / FLOPs of all elements)

100 % means that the time is proportional to the elements that the mask allows. The rest is lost to
short lists, partial blocks, and loads that dense attention shares over more queries.
"""

from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._sweep import Sweep

TITLE = "Fraction of the dense rate"
ORDER = 25

RATE = Sweep("rate", "dense rate per useful FLOP, %", 100)
READ = (
    "FLOPs per second of the elements that the mask allows, as a percentage of those of the dense "
    "baseline."
)


def draw(frames: Frames) -> Markup:
    """Draw one panel per shape and block; NOTHING for other ops than attention."""
    cases = frames.contenders
    if cases.empty:
        return NOTHING
    cases = cases[cases.speedup.notna() & cases.level.notna() & (cases.side != "dense")]
    cases = cases[cases.op.astype(str).str.startswith("attention")]
    if cases.empty:
        return NOTHING
    useful = 100 * cases.tflops / cases.dense_tflops
    ends = {f"rate{end}": useful * cases[f"speedup{end}"] for end in ("", "_low", "_high")}
    return RATE.draw(cases.assign(**ends), "level", READ)

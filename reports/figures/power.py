"""Time, speedup, energy and clock of every case under three loads, if the run measured energy.

    contender    speedup: contest   half loaded   back to back    µs    mJ    MHz
    dense        1                  1             1
    bsr          5.12×              5.28×         5.54×

A speedup under load is over the baseline under the same load, process by process; the table shows
the median over processes.
"""

from markupsafe import Markup

from sparsebench.reports.figures._html import NOTHING, note
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.formatting import significant, times
from sparsebench.results.problem_names import problem_namer
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import usual
from sparsebench.results.tables.frame import fields, records

TITLE = "Under load"
ORDER = 52

READ = (
    "In a contest, calls are timed in turn, and the GPU rests between them. Half loaded, batches "
    "of one call alternate with pauses as long, for 3 s; back to back, nothing pauses for 3 s. "
    "Speedups are over {}, under the same load. The energy of a call half loaded includes that of "
    "its pause, and calls under load find their operands in the L2 cache."
)
HEADS = ["problem", "contender", ">speedup, contest", ">half loaded", ">back to back"]
HEADS += [">time, µs, contest", ">half loaded", ">back to back"]
HEADS += [">energy, mJ, half loaded", ">back to back"]
HEADS += [">SM clock, MHz, contest", ">half loaded", ">back to back"]
SPEEDUPS = "speedup", "half_speedup", "full_speedup"


def draw(analysis: Analysis) -> Markup:
    """Show a line per case with a time under load; NOTHING if the run has none."""
    timed = usual(analysis.timed) if len(analysis.timed) else analysis.timed
    loaded = timed[timed.full_us.notna()] if len(timed) else timed
    if loaded.empty:
        return NOTHING
    bases = ", ".join(sorted({*loaded.baseline_label.dropna()})) or "no baseline"
    name_of, shared = problem_namer(loaded, [*fields(loaded), "source"])
    lines = [
        [
            name_of(line) or "–",
            str(line["label"]),
            *(times(line[name], line[name] / 100) for name in SPEEDUPS),
            *(significant(line[name]) for name in ("median_us", "half_us", "full_us")),
            *(significant(1e3 * line[name]) for name in ("half_j", "full_j")),
            *(significant(line[name], 4) for name in ("sm_mhz", "half_mhz", "full_mhz")),
        ]
        for line in records(loaded)
    ]
    return note(f"{READ.format(bases)} {shared}") + html_table(*without_dashes(HEADS, lines))

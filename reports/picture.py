"""Draw the README's figure from a run.

    one panel per block size    speedup over the baseline (logarithmic) against the sparsity s
                                dotted: 1 / (1 - s)

Our line is the fastest of our kernels at each sparsity. Bands are the intervals of the run.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from sparsebench._writing import replacing
from sparsebench.results.formatting import blocks_text
from sparsebench.results.tables.frame import records

APART = 1.5  # least ratio of the heights of two labels
OURS = "sparsebench"
SERIES = {
    "torch_bsr": "PyTorch BSR, tuned",
    "stk": "STK",
    "cusparse_bell": "cuSPARSE Blocked-ELL",
    "cusparse_csr": "cuSPARSE CSR",
}


def with_series(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases of the figure with their `series`."""
    cases = cases[cases.speedup.notna() & ~cases.twin & (cases.op == "linear")]
    shipped = cases.options.astype(str).str.contains("False")
    named = cases.assign(series=cases.kernel.map(SERIES))[~shipped]
    ours = cases[cases.kernel.str.match("bsr_(triton|wgmma|small|strips)")]
    fastest = ours.loc[ours.groupby(["block", "level"]).speedup.idxmax()].assign(series=OURS)
    return pd.concat([fastest, named[named.series.notna()]])


def picture(cases: pd.DataFrame, out_path: Path) -> None:
    """Draw the summarised cases of a sweep of sparsity and block, with labels beside the lines."""
    shown = with_series(cases)
    sns.set_theme(style="whitegrid", context="paper")
    mpl.rcParams["svg.hashsalt"] = "sparsebench"  # the same bytes for the same rows
    blocks = sorted(shown.block.unique(), key=float)
    figure, axes = plt.subplots(1, len(blocks), figsize=(11, 3.1), sharey=True, layout="tight")
    palette = dict(zip([OURS, *SERIES.values()], sns.color_palette("colorblind"), strict=False))
    for block, axis in zip(blocks, axes, strict=True):
        _panel(axis, shown[shown.block == block], palette, blocks_text(block))
    axes[0].set_ylabel("speedup over cuBLAS dense")
    _label(axes[-1], shown[shown.block == blocks[-1]], palette)
    with replacing(out_path) as fresh:
        figure.savefig(fresh, format="svg", metadata={"Date": None})


def _panel(axis: Axes, cases: pd.DataFrame, palette: dict[str, Any], title: str) -> None:
    for name, line in cases.groupby("series"):
        line, look = line.sort_values("level"), {"color": palette[str(name)]}
        axis.plot(line.level, line.speedup, "o-", ms=3, lw=1.2, **look)
        axis.fill_between(line.level, line.speedup_low, line.speedup_high, alpha=0.25, lw=0, **look)
    levels = sorted(cases.level.unique())
    axis.plot(levels, [1 / (1 - level) for level in levels], ":", color="0.6", lw=1)
    axis.axhline(1, color="0.3", lw=0.8)
    axis.set(title=title, xlabel="sparsity, %", yscale="log", ylim=(0.05, 20))
    axis.set_xticks(levels, [f"{100 * level:g}" for level in levels], fontsize=7)
    ticks = [0.1, 0.3, 1, 3, 10]
    axis.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])


def _label(axis: Axes, cases: pd.DataFrame, palette: dict[str, Any]) -> None:
    """Write the name of each line right of its last point, at least APART apart."""
    ends = cases.sort_values("level").groupby("series").tail(1).sort_values("speedup")
    lowest = 0.0
    for end in records(ends):
        lowest = max(float(end["speedup"]), lowest * APART)
        axis.annotate(
            str(end["series"]),
            (end["level"], lowest),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=palette[end["series"]],
            annotation_clip=False,
        )

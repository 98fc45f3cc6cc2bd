"""The README's figure, from a published run: python -m sparsebench.reports.picture RUN FILE.svg

    one panel per block size    speed-up over the baseline (logarithmic) against the sparsity s
                                dotted: 1 / (1 - s)

Our line is the fastest of our kernels at each level. Bands are the intervals of the run.
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sparsebench.results import store
from sparsebench.results.analysis import analyse

OURS = "sparsebench, the fastest kernel"
SERIES = {
    "torch_bsr": "PyTorch BSR, tuned",
    "stk": "STK",
    "cusparse_bell": "cuSPARSE Blocked-ELL",
    "cusparse_csr": "cuSPARSE CSR",
}


def drawn(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases that the figure shows, with their `series`."""
    cases = cases[cases.speedup.notna() & ~cases.twin & (cases.op == "linear")]
    shipped = cases.options.astype(str).str.contains("False")
    named = cases.assign(series=cases.kernel.map(SERIES))[~shipped]
    ours = cases[cases.kernel.str.startswith(("bsr_triton", "bsr_wgmma", "bsr_small"))]
    fastest = ours.loc[ours.groupby(["block", "level"]).speedup.idxmax()].assign(series=OURS)
    return pd.concat([fastest, named[named.series.notna()]])


def picture(cases: pd.DataFrame, out_path: Path) -> None:
    """Draw the summarised cases of a sweep of sparsity and block."""
    shown = drawn(cases)
    sns.set_theme(style="whitegrid", context="paper")
    mpl.rcParams["svg.hashsalt"] = "sparsebench"  # the same bytes for the same rows
    blocks = sorted(shown.block.unique(), key=float)
    figure, axes = plt.subplots(1, len(blocks), figsize=(11, 3.1), sharey=True, layout="tight")
    palette = dict(zip([OURS, *SERIES.values()], sns.color_palette("colorblind"), strict=False))
    for block, axis in zip(blocks, axes, strict=True):
        _panel(axis, shown[shown.block == block], palette, f"blocks of {block}")
    axes[0].set_ylabel("speed-up over cuBLAS dense, ×")
    handles = [Line2D([], [], color=color, marker="o", ms=4) for color in palette.values()]
    figure.legend(handles, palette, loc="lower center", ncols=len(palette), frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(out_path, metadata={"Date": None})


def _panel(axis: Axes, cases: pd.DataFrame, palette: dict[str, object], title: str) -> None:
    for name, line in cases.groupby("series"):
        line = line.sort_values("level")
        axis.plot(line.level, line.speedup, "o-", ms=3, lw=1.2, color=palette[str(name)])
        axis.fill_between(
            *(line.level, line.speedup_low, line.speedup_high),
            color=palette[str(name)],
            alpha=0.25,
            lw=0,
        )
    levels = sorted(cases.level.unique())
    axis.plot(levels, [1 / (1 - level) for level in levels], ":", color="0.6", lw=1)
    axis.axhline(1, color="0.3", lw=0.8)
    axis.set(title=title, xlabel="sparsity", yscale="log", ylim=(0.05, 20))
    axis.set_xticks(levels, [f"{100 * level:g}" for level in levels], fontsize=7)
    axis.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])


if __name__ == "__main__":
    picture(analyse(store.read(Path(sys.argv[1]))).cases, Path(sys.argv[2]))

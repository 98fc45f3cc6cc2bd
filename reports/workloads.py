"""Two GPUs in one table: what a workload takes on each, and what sparsity gains there.

    lines of cards ─> cells that both GPUs have, by problem and row of a grid ─> WORKLOADS

                          time, dense          time, sparse       gain on H100  gain on H200  cells
    decoding, 8B model    0.78× (0.77–0.80)    0.85× (0.80–0.92)  1.28×         1.19×         8 of 8

A number is a geometric mean over cells, with its range. A cell is the fastest kernel of a format in
a problem, from the run that counts on each GPU. Formats slower than dense on both GPUs are counted,
but not averaged, because dense is the better choice there. If only one GPU multiplied unpruned
weights, both are compared with dense on the same zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsebench.reports.cells import that_count
from sparsebench.reports.tables import Table
from sparsebench.results.comparison.sides import short_name
from sparsebench.results.formatting import amount, capital, number, percent
from sparsebench.results.statistics.outcome import Outcome, outcome

LAYERS = "op in ['linear', 'ffn', 'mlp', 'linear_active']"
WORKLOADS = {
    "decoding, 8B model": "op == 'decoder' and shape.str.contains('8B')",
    "layer, 64 tokens or fewer": f"{LAYERS} and m <= 64",
    "layer, prefill of 1,024 tokens or more": f"{LAYERS} and m >= 1024",
    "attention, 16k tokens": "op == 'attention' and m == 16384",
    "attention, decoding": "op == 'attention' and m == 1",
    "training: gradients and steps": "op.str.contains('_backward|_dgrad|_wgrad|_step')",
    "experts": "op.str.contains('expert')",
}


@dataclass(frozen=True)
class Workload:
    """The cells of a line of WORKLOADS: times of b over those of a, and the gain on each."""

    title: str
    dense: Sequence[float]
    sparse: Sequence[float]
    gains: tuple[Sequence[float], Sequence[float]]
    every: int

    @property
    def line(self) -> list[str]:
        if not len(self.dense):
            count = f"none of {self.every} gains" if self.every else "not measured on both"
            return [self.title, "–", "–", "–", "–", count]
        texts = map(mean_text, (self.dense, self.sparse, *self.gains))
        return [self.title, *texts, f"{len(self.dense)} of {self.every}"]


@dataclass(frozen=True)
class TwoGpus:
    """GPU b against GPU a, by name, in each of WORKLOADS that one of them measured."""

    a: str
    b: str
    workloads: Sequence[Workload]

    @property
    def table(self) -> Table:
        heads = ["workload", f"dense time, {self.b} / {self.a}", "sparse time"]
        heads += [f"gain on {self.a}", f"gain on {self.b}", "cells averaged"]
        lines = [workload.line for workload in self.workloads]
        title = f"{self.b} against {self.a}: geometric means, and ranges over cells"
        return Table(columns=heads, lines=lines, title=title, words=[heads[0], heads[-1]])

    @property
    def sentence(self) -> str:
        """Say which GPU is faster, and where sparsity gains more."""
        measured = [each for each in self.workloads if len(each.dense)]
        if not measured:
            return f"{self.a} and {self.b} share no cell that gains."
        first = measured[0]
        dense, sparse = (_mean(ratios) for ratios in (first.dense, first.sparse))
        word = outcome(dense / sparse, dense / sparse)
        more = {Outcome.FASTER: "more", Outcome.SLOWER: "less", Outcome.EQUAL: "as much"}[word]
        faster = sum(max(each.dense) < 1 for each in measured)
        slower = sum(min(each.dense) > 1 for each in measured)
        return (
            f"{capital(first.title)}: compared with {self.a}, {self.b} takes {_change(dense)} "
            f"dense and {_change(sparse)} sparse, so sparsity gains {more} there. Dense, it is "
            f"faster in every cell of {faster} of {amount(len(measured), 'workload')}, and slower "
            f"in every cell of {slower}."
        )


def two_gpus(lines: pd.DataFrame, a: str, b: str) -> TwoGpus:
    """Return GPU b against GPU a from lines of cards (site/cards.py), whose `gpu` names them."""
    return of_cells(that_count(lines[lines.gpu.isin([a, b])]), a, b)


def of_cells(best: pd.DataFrame, a: str, b: str) -> TwoGpus:
    """Return the same from the lines that count, with the columns of `cells.NUMBERS`."""
    best = best[best.gain.notna()].assign(m=pd.to_numeric(best.m))
    sides = [best[best.gpu == gpu] for gpu in (a, b)]
    both = sides[0].merge(sides[1], on=["problem_id", "row"], suffixes=("", "_b"))
    short = short_name(a), short_name(b)
    names = short if short[0] != short[1] else (a, b)
    workloads = [_workload(*each, best, both) for each in WORKLOADS.items()]
    return TwoGpus(*names, [each for each in workloads if each])


def _workload(title: str, query: str, best: pd.DataFrame, both: pd.DataFrame) -> Workload | None:
    if best.query(query, engine="python").empty:
        return None
    cells = both.query(query, engine="python")
    same = cells.over == cells.over_b
    gains = [cells[f"gain{b}"].where(same, cells[f"zeros_gain{b}"]) for b in ("", "_b")]
    dense = [cells[f"median_us{b}"] * gain for b, gain in zip(("", "_b"), gains, strict=True)]
    gaining = np.maximum(gains[0], gains[1]) > 1
    ratios = dense[1] / dense[0], cells.median_us_b / cells.median_us
    shown = [list(values[gaining]) for values in (*ratios, *gains)]
    return Workload(title, shown[0], shown[1], (shown[2], shown[3]), len(cells))


def mean_text(ratios: Sequence[float]) -> str:
    """Write a geometric mean with its range: `0.85× (0.80–0.92)`."""
    low, high = min(ratios), max(ratios)
    texts = [number(each, max(0.01, each / 100)) for each in (_mean(ratios), low, high)]
    return f"{texts[0]}× ({texts[1]}–{texts[2]})" if texts[1] != texts[2] else f"{texts[0]}×"


def _mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


def _change(ratio: float) -> str:
    """Write a ratio of times: `13 % less time`, `2.5 times as long`."""
    if ratio >= 2:
        return f"{number(ratio, ratio / 100)} times as long"
    share = round(abs(1 - ratio), 2)
    return f"{percent(share)} {'less' if ratio < 1 else 'more'} time" if share else "as much time"

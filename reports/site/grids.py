"""The grids of a site: how fast each format is over dense, by sparsity, on each number of tokens.

If several runs have a problem, cells.py decides which one a cell shows. A cell shows only verdicts
if there are any; otherwise it is marked as a look. The numbers and the findings are those of
results/tables/grid.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports import grids
from sparsebench.reports.cells import best_lines
from sparsebench.results.formatting import (
    FORMATS,
    amount,
    between,
    duration,
    join_words,
    percent,
    plain,
)
from sparsebench.results.tables.contests import sort_values_of
from sparsebench.results.tables.families import QUANTISED
from sparsebench.results.tables.frame import records
from sparsebench.results.tables.grid import EVERY, Case, Grid, findings, grid

LEVELS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # the preferred columns
COLUMNS = 7
EVEN = "iid"  # the skew of active units of a problem without another one
TOKENS = (1, 16, 64, 4096)  # the preferred choices of the first page
OP, DTYPE = "linear", "bf16"  # op and dtype of a grid, if they were measured
PROBLEM = ["op", "dtype", "pattern", "m", "shape", "level", "block"]
BESIDE = {"decoder": "Model, decoding", "attention": "Attention, blocks given"}  # ops of no grid


@dataclass(frozen=True)
class SiteGrid:
    """A grid of a GPU with one op, dtype and number of tokens, and what its problems share.

    shape  of its weights, or EVERY
    """

    gpu: str
    op: str
    dtype: str
    tokens: int
    shape: str
    about: str
    grid: Grid

    @property
    def finding(self) -> str:
        return " ".join(grids.sentences(findings(self.grid)))

    @property
    def top(self) -> Case:
        """Return the case of the largest gain."""
        return max(self.grid.cases, key=lambda case: float(case["gain"]))

    def html(self, root: str) -> Markup:
        """Return the grid; `root` is the path from the page to the first page of the site."""
        data = {"grid": "gains", "gpu": self.gpu, "op": self.op, "dtype": self.dtype}
        data["tokens"] = str(self.tokens)
        return grids.html(self.grid, lambda case: link(case, root), "", data)


def link(case: Case, root: str) -> str:
    """Return the address of a case on the page of its run."""
    return f"{root}{case['run']}/index.html#case-{case['case_id']}"


def format_name(kind: str) -> str:
    """Return the name of a format for readers."""
    return FORMATS.get(kind, kind)


def site_grids(lines: pd.DataFrame, *, each_shape: bool = False) -> list[SiteGrid]:
    """Return a grid for each of the usual numbers of tokens that was measured, most tokens last.

    A grid compares sparse formats with dense weights of the same bits, so QUANTISED are left out.
    With `each_shape`, one of each shape follows that of EVERY one, if there are several.
    """
    sparse = lines[(lines.side != "dense") & ~lines.kind.isin(QUANTISED)]
    for column, preferred in (("op", OP), ("dtype", DTYPE)):
        values = sparse[column].value_counts()
        if len(values):
            value = preferred if preferred in values else values.index[0]
            sparse = sparse[sparse[column] == value]
    sparse = sparse[sparse.level.notna() & sparse.gain.notna() & sparse.m.notna()]
    sparse = sparse.assign(level=sparse.level.round(2), m=sparse.m.astype(int))
    return [
        _site_grid(part, int(m), shape)
        for m in _most(sparse.m, TOKENS, len(TOKENS))
        for shape, part in _parts(sparse[sparse.m == m], each_shape=each_shape)
    ]


def _parts(sparse: pd.DataFrame, *, each_shape: bool) -> list[tuple[str, pd.DataFrame]]:
    """Return all lines, and those of each shape if there are several and they are wanted."""
    shapes = [(str(shape), of_shape) for shape, of_shape in sparse.groupby("shape")]
    return [(EVERY, sparse), *(shapes if each_shape and len(shapes) > 1 else [])]


def _site_grid(sparse: pd.DataFrame, tokens: int, shape: str) -> SiteGrid:
    levels = _most(sparse.level, LEVELS, COLUMNS)
    shown = that_count(sparse[sparse.level.isin(levels)])
    first = shown.iloc[0]
    count = f"{tokens:,} token{'' if tokens == 1 else 's'} at once"
    about = grids.about(shown, ["op", "dtype", "shape", "cache"])
    gpu, op, dtype = (str(first[name]) for name in ("gpu", "op", "dtype"))
    return SiteGrid(gpu, op, dtype, tokens, shape, f"{count} · {about}", grid(shown, "level"))


def that_count(sparse: pd.DataFrame) -> pd.DataFrame:
    """Return the best case of each row in each problem, from the run that counts.

    A look counts only if no verdict has its row and level. Active units that are spread evenly come
    before others, so that no cell is of the spread that suits a format best.
    """
    even = [fields.get("skew", EVEN) == EVEN for fields in sparse.fields]
    best = best_lines(sparse.assign(even=even), ["row", *PROBLEM], ["even"])
    return best[best.verdict | ~best.groupby(["row", "level"]).verdict.transform("any")]


def beside(every: pd.DataFrame) -> dict[str, list[tuple[str, str, str]]]:
    """Return the head, the finding and the run of each op of BESIDE that was measured, by GPU.

    Of its runs, verdicts come first, then the one with the most cells that another GPU has too, so
    that GPUs show the same problems; then the one with the most cells, the most processes, the
    latest. A cell is a problem and a row.
    """
    cell = ["problem_id", "row"]
    sparse = every[(every.side != "dense") & every.gain.notna()]
    sparse = sparse.assign(shared=sparse.groupby(cell).gpu.transform("nunique") > 1)
    texts: dict[str, list[tuple[str, str, str]]] = {}
    for op, head in BESIDE.items():
        for gpu, of_op in sparse[sparse.op == op].groupby("gpu"):
            runs = of_op.drop_duplicates(["run", *cell]).assign(cells=1).groupby("run")
            ranks = {"verdict": "max", "shared": "sum", "cells": "sum"}
            ranks |= {"processes": "max", "day": "max"}
            run = runs.agg(ranks).sort_values([*ranks]).index[-1]
            of_run = of_op[of_op.run == run]
            shown = grid(of_run, "level" if of_run.level.nunique() > 1 else "m")
            finding = " ".join(grids.sentences(findings(shown)))
            shapes = sorted({*of_run["shape"]})  # a single one is in what the problems share
            on = f" with {join_words(shapes)}" * (1 < len(shapes) < 4)
            text = f"{finding} Measured{on}: {grids.about(of_run, PROBLEM)}."
            texts.setdefault(str(gpu), []).append((head, text, str(run)))
    return texts


def cases(lines: pd.DataFrame) -> list[dict[str, str | bool]]:
    """Return a line per case, the largest gain first."""
    ranked = lines.sort_values("gain", ascending=False, na_position="last", kind="stable")
    return [
        {
            **{name: str(line[name]) for name in ("gpu", "run", "name_of_run", "name", "over")},
            **{name: _text(line[name]) for name in ("op", "dtype", "shape", "pattern", "block")},
            "m": "" if pd.isna(line["m"]) else str(int(line["m"])),
            "level": percent(line["level"]),
            "time": duration(line["median_us"]),
            "gain": between(line["gain"], line["low"], line["high"]),
            "wins": bool(line["wins"]),
            "mark": line["mark"],
            "of": grids.evidence(line),
        }
        for line in records(ranked)
    ]


def wins(lines: pd.DataFrame) -> list[str]:
    """Return a sentence per GPU: how many contests these lines win."""
    return [
        f"{gpu}: nothing, dense or sparse, was faster in {len(group[group.wins])} of "
        f"{amount(len(group.drop_duplicates(['run', 'place'])), 'contest')}."
        for gpu, group in lines.groupby("gpu", sort=False)
    ]


def _text(value: Any) -> str:
    text = plain(value)
    return "" if text in ("nan", "None") else text


def _most(values: "pd.Series[Any]", preferred: Sequence[float], count: int) -> list[float]:
    """Return the preferred values, or if there is none the most frequent ones, in order."""
    usual = [value for value in preferred if value in set(values)]
    often = [] if usual else list(values.value_counts().index)
    return sort_values_of(pd.Series([*usual, *often][:count]))

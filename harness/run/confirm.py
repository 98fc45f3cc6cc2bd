"""A headline that is not luck: chosen in one run, measured in another.

    a screening of N cells ─> those with the largest speed-ups ─> measured again, alone, in fresh
    processes ─> the headline, with the interval of the new run

The largest of many noisy numbers is larger than what it estimates (the winner's curse). So the
screening only chooses: none of its numbers is in the headline. On a device of the same kind its
configurations are taken without a search, so a headline is about them (results/provenance.py).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.harness.plan.selection import meets
from sparsebench.harness.run.measure import RunOptions, measure
from sparsebench.harness.run.reproduce import Engine, again, whole
from sparsebench.results import bundle
from sparsebench.results.analysis import analyse, compared
from sparsebench.results.comparison import KEYS
from sparsebench.results.frame import fields
from sparsebench.results.noise import Reliability
from sparsebench.results.provenance import device_name
from sparsebench.results.record import Status
from sparsebench.results.statistics import Outcome
from sparsebench.results.store import Run


@dataclass(frozen=True)
class Headline:
    """What a confirming run says of one chosen case: confirmed means faster than its baseline."""

    case_id: str
    confirmed: bool
    sentence: str


def confirm(
    path: Path,
    device: str,
    data: Path | None,
    out: Path | None,
    options: RunOptions,
    *,
    cases: int,
    replicates: int,
    condition: str = "",
    engine: Engine = measure,
) -> Path:
    """Measure the cases with the largest speed-ups in `path` again; return the new run.

    They are among those that meet a `condition`, written as for --only.
    """
    identity = bundle.identity(path)
    run = whole(path)
    raced = analyse(run).cases
    asked = {
        row.case.id for row in run.rows if meets(row.case.problem, row.case.contender, condition)
    }
    raced = raced[compared(raced) & (raced.status == Status.OK) & raced.case_id.isin(asked)]
    if raced.empty:
        raise ResultError(f"{path}: expected a case with a speed-up to confirm, found none")
    best = raced.sort_values("speedup", ascending=False).drop_duplicates("case_id")[:cases]
    chosen = best[KEYS].to_dict("records")
    about = {"manifest_sha256": identity, "cells": chosen, "screened": len(raced)}
    ids = f"case={'|'.join(best.case_id)}"
    options = replace(options, origin={"confirms": about})
    return again(run, device, data, out, options, engine, only=ids, replicates=replicates)


def headlines(run: Run) -> list[Headline]:
    """Return the sentence of each cell that a confirming run was made for.

    An unreliable run (results/noise.py) confirms nothing.
    """
    found = analyse(run)
    lines = found.cases.set_index(KEYS, drop=False)
    cells = [tuple(cell[key] for key in KEYS) for cell in run.state["confirms"]["cells"]]
    reliable = found.noise.reliability[0] is not Reliability.UNRELIABLE
    names = [name for name in [*fields(found.cases), "source"] if name != "pattern"]
    return [_headline(run, lines.loc[cell].to_dict(), names, reliable) for cell in cells]


def _headline(run: Run, cell: dict[str, Any], names: list[str], reliable: bool) -> Headline:
    confirmed = reliable and cell["outcome"] == Outcome.FASTER
    why = (cell["outcome"] or cell["status"]) if reliable else "unreliable run"
    word = "Confirmed" if confirmed else f"Not confirmed ({why.replace('_', ' ')})"
    if cell["status"] == Status.OK:
        interval = f"{cell['speedup_low']:.3g} to {cell['speedup_high']:.3g}, {cell['interval']}"
        said = f"is {cell['speedup']:.3g} times as fast as {cell['baseline_label']} ({interval})"
    else:
        said = f"gave no time: {cell['detail']}"
    known = [f"{name}={cell[name]}" for name in names if not pd.isna(cell[name])]
    place = f"{cell['scope']} time, {cell['cache']} cache, {device_name(run.environment)}"
    what = f"{cell['op']} {cell['pattern']} {' '.join(known)}; {place}"
    return Headline(cell["case_id"], confirmed, f"{word}: {cell['label']} {said}: {what}.")

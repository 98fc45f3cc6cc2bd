"""The cells of a test about a whole model (results/whole.py): one a file.

ways of a file ─> the test's subjects and baselines, by the kernel of the MLP ─> fastest of each
               ─> log (baseline / subject): a file is one process
"""

from collections.abc import Iterator, Sequence
from math import log
from typing import Any

import numpy as np

from sparsebench.results.claims.cells import Cell, valued
from sparsebench.results.claims.metrics import METRICS
from sparsebench.results.claims.schema import Chosen, Test
from sparsebench.results.whole import Way, Whole

COLUMNS = {"time": "time_us", "peak_bytes": "peak_bytes", "energy_j": "energy_j"}


def whole(test: Test, found: Whole, name: str) -> Iterator[Cell]:
    """Yield the cell of a test; `name` is the file's."""
    if test.whole is None:
        return
    ways = [way for way in found.ways if way.what == test.whole]
    sides = [_those(chosen, ways) for chosen in (test.subject, test.baseline)]
    if all(sides):
        yield _cell(test, sides[0], sides[1], found, name)


def _cell(test: Test, subjects: list[Way], bases: list[Way], found: Whole, name: str) -> Cell:
    model = {field: value for field, value in found.model.items() if field != "active"}
    tokens = {"dtype": found.dtype, "m": subjects[0].tokens}
    about: dict[str, Any] = {
        "problem": f"{test.whole} {sorted(model.items())} {tokens}",
        "run": name,
        "device": found.device,
        "simulated": False,
        "confirms": False,
        "reliable": True,
        "commit": "",
        "fields": {"op": test.whole, **tokens, **model, "active": round(found.active, 1)},
        "case_ids": (),
    }
    column = COLUMNS[METRICS[test.metric].column]
    ran = [[way for way in side if _value(way, column)] for side in (subjects, bases)]
    for who, side, all_of in (("subject", ran[0], subjects), ("baseline", ran[1], bases)):
        if not side:
            why = "; ".join(f"{way.mlp}: {way.detail or 'not measured'}" for way in all_of)
            return Cell(test=test.name, **about, reason=f"no {who} ran: {why}")
    subject, base = (min(side, key=lambda way: way.time_us) for side in ran)
    cell = Cell(test=test.name, **about, reason="", subject=subject.mlp, baseline=base.mlp)
    return valued(test, cell, [np.array([log(_value(base, column) / _value(subject, column))])])


def _value(way: Way, column: str) -> float:
    """Return a quantity; 0 where it was not measured."""
    return float(getattr(way, column) or 0.0) if way.times_us else 0.0


def _those(chosen: Chosen, ways: Sequence[Way]) -> list[Way]:
    return [way for way in ways if way.mlp.split()[0] in chosen.kernels]

"""The cells of a test about training: block-sparse models beside dense ones (results/widths.py).

    file of trainings ─> sparse models at the test's fields ─> each seed: log(dense / sparse)

A seed is what a process is elsewhere: the same bytes in the same order for both sides.
"""

from collections.abc import Iterator
from math import log
from typing import Any

import numpy as np

from sparsebench.results.claims.cells import Cell, valued
from sparsebench.results.claims.metrics import METRICS
from sparsebench.results.claims.schema import Test
from sparsebench.results.widths import DENSE, Width, Widths

COLUMNS = {"time": "step_us", "peak_bytes": "peak_bytes", "loss": "loss"}


def trained(test: Test, found: Widths, name: str) -> Iterator[Cell]:
    """Yield the cell of every sparse model that a test is about; `name` is the file's."""
    if test.trained is None:
        return
    for model in dict.fromkeys(one.model for one in found.trained if one.pattern != DENSE):
        own = [one for one in found.trained if one.model == model]
        if all(_has(own[0], field, value) for field, value in test.at.items()):
            yield _cell(test, own, found, name)


def _cell(test: Test, own: list[Width], found: Widths, name: str) -> Cell:
    assert test.trained
    column = COLUMNS[METRICS[test.metric].column]
    first, pairs = own[0], [(one, found.beside(one, test.trained)) for one in own]
    both = [(getattr(d, column), getattr(s, column)) for s, d in pairs if d]
    logs = [np.array([log(base / subject)]) for base, subject in both if base and subject]
    asked = {"op": "train-lm", "weights": first.pattern, "block": first.block}
    blank: dict[str, Any] = {
        "problem": " ".join(map(str, first.model)),
        "run": name,
        "device": found.device,
        "simulated": False,
        "confirms": False,
        "reliable": True,
        "commit": "",
        "fields": {**asked, "level": first.sparsity, "width": first.width},
        "case_ids": (),
        "reason": "" if logs else f"no dense model of equal {test.trained}",
    }
    cell = Cell(test=test.name, **blank)
    if not logs:
        return cell
    dense = next(d for _, d in pairs if d)
    sides = {"subject": "BlockSparseLinear", "baseline": f"dense, {dense.width} wide"}
    return valued(test, Cell.from_json({**cell.to_json(), **sides}), logs)


def _has(one: Width, field: str, value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return getattr(one, field) in values

"""The cells of tests about models, from the files that `train-lm --pattern` and `whole` write.

    trained   file of trainings ─> sparse models at the test's fields
                                ─> log(dense / sparse) for each seed
    whole     file of timings   ─> the test's subjects and baselines, by the kernel of the MLP
                                ─> the fastest of each ─> log(baseline / subject)

A seed counts as a process: both sides train on the same bytes in the same order. A file of `whole`
counts as one process.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.errors import ResultError
from sparsebench.results.claims.cells import Cell, with_value
from sparsebench.results.claims.metrics import METRICS
from sparsebench.results.claims.schema import Chosen, Test
from sparsebench.results.files import JSON_BYTES, content
from sparsebench.results.model_files import (
    DENSE,
    WHOLE_SCHEMA,
    WIDTHS_SCHEMA,
    MlpTiming,
    ModelTimings,
    PatternTraining,
    PatternTrainings,
    read_whole,
    read_widths,
)

ModelFile = PatternTrainings | ModelTimings
READERS: dict[str, Callable[[Path], ModelFile]] = {
    WIDTHS_SCHEMA: read_widths,
    WHOLE_SCHEMA: read_whole,
}
COLUMNS = {"time": "step_us", "peak_bytes": "peak_bytes", "loss": "loss"}
WHOLE_COLUMNS = {"time": "time_us", "peak_bytes": "peak_bytes", "energy_j": "energy_j"}


def read_model_file(path: Path) -> ModelFile:
    """Read a file by its schema; raises ResultError if it is invalid."""
    text = content(path, JSON_BYTES)
    try:
        data = json.loads(text)
        schema = str(data["schema"]) if isinstance(data, dict) else ""
    except (ValueError, KeyError):
        schema = ""
    if schema not in READERS:
        actual = repr(schema[:60]) if schema else "no schema"
        raise ResultError(f"{path}: expected {' or '.join(READERS)}; found {actual}")
    return READERS[schema](path)


def model_cells(test: Test, file: ModelFile, name: str) -> Iterator[Cell]:
    """Yield the cells of a test in a file; `name` is the file's."""
    if isinstance(file, PatternTrainings):
        yield from trained(test, file, name)
    else:
        yield from whole(test, file, name)


def trained(test: Test, file: PatternTrainings, name: str) -> Iterator[Cell]:
    """Yield a cell for every sparse model that a test is about."""
    if test.trained is None:
        return
    for model in dict.fromkeys(one.model for one in file.trained if one.pattern != DENSE):
        seeds = [one for one in file.trained if one.model == model]
        facts = {"data": file.data, **asdict(seeds[0])}
        if all(_is(facts[field], value) for field, value in test.at.items()):
            yield _trained_cell(test, test.trained, seeds, file, name)


def whole(test: Test, file: ModelTimings, name: str) -> Iterator[Cell]:
    """Yield the cell of a test; none if the file lacks its subject or its baseline."""
    if test.whole is None:
        return
    timings = [timing for timing in file.ways if timing.what == test.whole]
    subjects, baselines = (_select_timings(side, timings) for side in (test.subject, test.baseline))
    if subjects and baselines:
        yield _whole_cell(test, subjects, baselines, file, name)


def _trained_cell(
    test: Test, equal: str, seeds: list[PatternTraining], file: PatternTrainings, name: str
) -> Cell:
    column = COLUMNS[METRICS[test.metric].column]
    first, pairs = seeds[0], [(one, file.dense_match(one, equal)) for one in seeds]
    values = [(getattr(dense, column), getattr(one, column)) for one, dense in pairs if dense]
    logs = [np.array([log(base / subject)]) for base, subject in values if base and subject]
    named = {"op": "train-lm", "data": file.data, "weights": first.pattern, "block": first.block}
    width = next((dense.width for _, dense in pairs if dense), 0)
    cell = Cell(
        test=test.name,
        problem=" ".join(map(str, first.model)),
        run=name,
        device=file.device,
        fields={**named, "level": first.sparsity, "width": first.width},
        reason="" if logs else f"no dense model of equal {equal}",
        subject="BlockSparseLinear" if logs else "",
        baseline=f"dense, {width} wide" if logs else "",
    )
    return with_value(test, cell, logs) if logs else cell


def _whole_cell(
    test: Test, subjects: list[MlpTiming], baselines: list[MlpTiming], file: ModelTimings, name: str
) -> Cell:
    model = {field: value for field, value in file.model.items() if field != "active"}
    tokens = {"dtype": file.dtype, "m": subjects[0].tokens}
    column = WHOLE_COLUMNS[METRICS[test.metric].column]
    fastest, reason = [], ""
    for side, timings in (("subject", subjects), ("baseline", baselines)):
        timed = [timing for timing in timings if _value(timing, column)]
        if not timed and not reason:
            why = "; ".join(f"{each.mlp}: {each.detail or 'not measured'}" for each in timings)
            reason = f"no {side} ran: {why}"
        fastest.append(min(timed or timings, key=lambda timing: _value(timing, "time_us")))
    subject, base = fastest
    cell = Cell(
        test=test.name,
        problem=f"{test.whole} {sorted(model.items())} {tokens}",
        run=name,
        device=file.device,
        fields={"op": test.whole, **tokens, **model, "active": round(file.active, 1)},
        reason=reason,
        subject="" if reason else subject.mlp,
        baseline="" if reason else base.mlp,
    )
    if reason:
        return cell
    return with_value(test, cell, [np.array([log(_value(base, column) / _value(subject, column))])])


def _is(fact: Any, value: Any) -> bool:
    return fact in (value if isinstance(value, list) else [value])


def _value(timing: MlpTiming, column: str) -> float:
    """Return a quantity; 0 if it was not measured."""
    return float(getattr(timing, column) or 0.0) if timing.times_us else 0.0


def _select_timings(chosen: Chosen, timings: Sequence[MlpTiming]) -> list[MlpTiming]:
    return [timing for timing in timings if timing.mlp.split()[0] in chosen.kernels]

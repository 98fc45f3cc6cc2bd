"""The cells of tests about models, from the files that the scripts in experiments write.

    trained   file of train_lm.py --pattern ─> sparse models at the test's fields
                                            ─> log(dense / sparse) for each seed
    whole     file of whole_model.py        ─> the test's subjects and baselines, by kernel
                                            ─> the fastest of each ─> log(baseline / subject)

A seed counts as a process: both sides train on the same bytes in the same order. A file of a whole
model counts as one process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.errors import ResultError
from sparsebench.results.claims.cells import ClaimCell, with_value
from sparsebench.results.claims.metrics import METRICS
from sparsebench.results.claims.schema import Test
from sparsebench.results.files import from_json
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


def read_model_file(path: Path) -> ModelFile:
    """Read a file by its schema; raises ResultError if it is invalid."""
    schema = from_json(path).get("schema")
    if schema == WIDTHS_SCHEMA:
        return read_widths(path)
    if schema == WHOLE_SCHEMA:
        return read_whole(path)
    actual = f"{schema!r:.60}" if schema else "no schema"
    raise ResultError(f"{path}: expected {WIDTHS_SCHEMA} or {WHOLE_SCHEMA}; found {actual}")


def model_cells(test: Test, file: ModelFile, name: str) -> Iterator[ClaimCell]:
    """Yield a cell for each sparse model, or for the whole model; `name` is the file's.

    A file that lacks the subject or the baseline of a test has no cell.
    """
    if isinstance(file, PatternTrainings) and test.trained:
        for model in dict.fromkeys(one.model for one in file.trained if one.pattern != DENSE):
            seeds = [one for one in file.trained if one.model == model]
            facts = {"data": file.data, **asdict(seeds[0])}
            if all(_is(facts[field], value) for field, value in test.at.items()):
                yield _trained_cell(test, test.trained, seeds, file, name)
    if isinstance(file, ModelTimings) and test.whole:
        timings = [timing for timing in file.ways if timing.what == test.whole]
        subjects, baselines = (
            [timing for timing in timings if timing.mlp.split()[0] in side.kernels]
            for side in (test.subject, test.baseline)
        )
        if subjects and baselines:
            yield _whole_cell(test, subjects, baselines, file, name)


def _trained_cell(
    test: Test, equal: str, seeds: Sequence[PatternTraining], file: PatternTrainings, name: str
) -> ClaimCell:
    column = METRICS[test.metric].column.replace("time", "step_us")
    first, pairs = seeds[0], [(one, file.dense_match(one, equal)) for one in seeds]
    values = [(getattr(dense, column), getattr(one, column)) for one, dense in pairs if dense]
    logs = [np.array([log(base / subject)]) for base, subject in values if base and subject]
    named = {"op": "train-lm", "data": file.data, "weights": first.pattern, "block": first.block}
    width = next((dense.width for _, dense in pairs if dense), 0)
    cell = ClaimCell(
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
    test: Test,
    subjects: Sequence[MlpTiming],
    baselines: Sequence[MlpTiming],
    file: ModelTimings,
    name: str,
) -> ClaimCell:
    model = {field: value for field, value in file.model.items() if field != "active"}
    tokens = {"dtype": file.dtype, "m": subjects[0].tokens}
    column = METRICS[test.metric].column.replace("time", "time_us")
    sides = {"subject": subjects, "baseline": baselines}
    measured = {side: [t for t in ts if t.quantity(column)] for side, ts in sides.items()}
    reason = ""
    if absent := [side for side, timings in measured.items() if not timings]:
        why = (f"{each.mlp}: {each.detail or 'not measured'}" for each in sides[absent[0]])
        reason = f"no {absent[0]} ran: {'; '.join(why)}"
    cell = ClaimCell(
        test=test.name,
        problem=f"{test.whole} {sorted(model.items())} {tokens}",
        run=name,
        device=file.device,
        fields={"op": test.whole, **tokens, **model, "active": round(file.active, 1)},
        reason=reason,
        subject="" if reason else fastest(measured["subject"]).mlp,
        baseline="" if reason else fastest(measured["baseline"]).mlp,
    )
    if reason:
        return cell
    subject, base = (fastest(timings).quantity(column) for timings in measured.values())
    return with_value(test, cell, [np.array([log(base / subject)])])


def fastest(timings: Sequence[MlpTiming]) -> MlpTiming:
    return min(timings, key=lambda timing: timing.time_us)


def _is(fact: Any, value: Any) -> bool:
    return fact in (value if isinstance(value, list) else [value])

"""The contract of a pattern: the level that it promises is the fraction of pruned elements."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.inputs.grid import ValueGrid
from sparsebench.harness.patterns._mask import derived, level, mask
from sparsebench.harness.testing.contract import Check, checker, expect

FIELDS = {"n": 120, "k": 240, "block": [12, 24]}  # blocks that divide both
LEVELS = 0.0, 0.25, 1 / 3, 0.375, 0.5, 0.7, 0.72, 0.75, 0.8, 0.9, 0.95
CPU = torch.device("cpu")

Levels = Callable[[], list[dict[str, Any]]]


def pattern_checks(name: str, **fields: Any) -> list[Check]:
    """Return the contract of a pattern, sentence by sentence.

    `name` is the pattern's name in a suite. `fields` of a problem replace FIELDS: n and k, block,
    and sparsity, without which the checks try those of LEVELS that the pattern has.
    """
    problem = {"pattern": name, **FIELDS, **fields}
    levels = [problem["sparsity"]] if "sparsity" in problem else LEVELS

    def possible() -> list[dict[str, Any]]:
        fields_at, refused = [], ""
        for sparsity in levels:
            at = {**problem, "sparsity": sparsity}
            try:
                level(at)
            except SuiteError as error:
                refused = str(error)
            else:
                fields_at.append(at)
        expect(fields_at, f"expected a level that it has, found none: {refused}")
        return fields_at

    about: dict[str, Callable[[Levels], None]] = {
        "prunes the fraction that its level promises": _exact,
        "is the same for equal seeds": _repeats,
        "names the values that follow from it": _derives,
    }
    return [
        Check(f"{name} {sentence}", partial(holds, possible)) for sentence, holds in about.items()
    ]


check_pattern = checker(pattern_checks)


def hashed(grid: ValueGrid, seed: int = 0) -> Tensor:
    """Return the score of drawn weights."""
    return scores(seed, "w", grid.cells, CPU)


def chosen(fields: Mapping[str, Any]) -> Tensor:
    """Return the mask of a weight [n, k]: True where an element is kept."""
    return mask(fields, ("n", "k"), hashed, CPU)


def _exact(levels: Levels) -> None:
    for fields in levels():
        stays, n, k = chosen(fields), fields["n"], fields["k"]
        expect(stays.shape == (n, k), f"expected a mask {[n, k]}, found {list(stays.shape)}")
        promised, actual = level(fields), 1 - float(stays.double().mean())
        message = f"sparsity {fields['sparsity']}: expected {promised:.6g}, found {actual:.6g}"
        expect(abs(actual - promised) < 1e-12, f"{message} as the fraction of pruned elements")
        expect(stays.any(), f"sparsity {fields['sparsity']}: expected an element that is kept")


def _repeats(levels: Levels) -> None:
    for fields in levels():
        same = torch.equal(chosen(fields), chosen(fields))
        expect(same, f"sparsity {fields['sparsity']}: expected one mask, found two")


def _derives(levels: Levels) -> None:
    for fields in levels():
        actual = derived(fields)
        named = isinstance(actual, dict) and all(isinstance(name, str) for name in actual)
        expect(named, f"expected values by name, found {actual!r}")

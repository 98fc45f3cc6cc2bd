"""The contract of a pattern: the level that it promises is the part of the elements left out."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.inputs.grid import Grid
from sparsebench.harness.patterns._mask import derived, level, mask
from sparsebench.harness.testing.contract import Check, every, expect

FIELDS = {"n": 120, "k": 200, "block": [12, 20]}  # blocks that divide both
LEVELS = 0.0, 0.25, 0.375, 0.5, 0.7, 0.72, 0.75, 0.8, 0.9, 0.95
CPU = torch.device("cpu")

Met = Callable[[], list[dict[str, Any]]]


def check_pattern(name: str, **fields: Any) -> None:
    """Raise AssertionError where a pattern does not keep its contract; see `pattern_checks`."""
    every(pattern_checks(name, **fields))


def pattern_checks(name: str, **fields: Any) -> list[Check]:
    """Return the contract of a pattern, sentence by sentence.

    `name` is what a suite writes, `fields` are a problem's, in place of FIELDS: n and k, block, and
    the sparsity, without which every one of LEVELS is tried that the pattern has.
    """
    asked = {"pattern": name, **FIELDS, **fields}
    levels = [asked["sparsity"]] if "sparsity" in asked else LEVELS

    def met() -> list[dict[str, Any]]:
        """Return the fields of each level that the pattern has."""
        found, refused = [], ""
        for sparsity in levels:
            at = {**asked, "sparsity": sparsity}
            try:
                level(at)
            except SuiteError as error:
                refused = str(error)
            else:
                found.append(at)
        expect(found, f"expected a level that it has, found none: {refused}")
        return found

    about: dict[str, Callable[[Met], None]] = {
        "leaves out what its level says": _exact,
        "is the same for a seed": _repeats,
        "says what follows from it, by name": _derives,
    }
    return [Check(f"{name} {said}", partial(holds, met)) for said, holds in about.items()]


def hashed(grid: Grid, seed: int = 0) -> Tensor:
    """Return the score of drawn weights."""
    return scores(seed, "w", grid.cells, CPU)


def chosen(asked: Mapping[str, Any]) -> Tensor:
    """Return the mask of a weight [n, k]: True where an element is kept."""
    return mask(asked, ("n", "k"), hashed, CPU)


def _exact(met: Met) -> None:
    for asked in met():
        kept, n, k = chosen(asked), asked["n"], asked["k"]
        expect(kept.shape == (n, k), f"expected a mask {[n, k]}, found {list(kept.shape)}")
        promised, found = level(asked), 1 - float(kept.double().mean())
        said = f"sparsity {asked['sparsity']}: expected {promised:.6g}, found {found:.6g}"
        expect(abs(found - promised) < 1e-12, f"{said} of the elements left out")
        expect(kept.any(), f"sparsity {asked['sparsity']}: expected an element that is kept")


def _repeats(met: Met) -> None:
    for asked in met():
        same = torch.equal(chosen(asked), chosen(asked))
        expect(same, f"sparsity {asked['sparsity']}: expected one mask, found two")


def _derives(met: Met) -> None:
    for asked in met():
        found = derived(asked)
        named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
        expect(named, f"expected values by name, found {found!r}")

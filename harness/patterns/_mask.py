"""Build the mask of a pattern (_pattern.py).

level     the sparsity that a problem's pattern will have, computed without the mask
mask      True where an element is kept
derived   values that follow from the pattern, for a suite's `$name`
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebench._discovery import load, modules, unknown
from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.formats._format import sides_of
from sparsebench.harness.inputs.grid import Score, Stack, best
from sparsebench.harness.inputs.sources import FILE
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight

TOLERANCE = 0.05
"""Largest relative difference of the density from the requested one."""


def derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that follow from a problem's pattern (Pattern.derived)."""
    return {} if fields["pattern"] == FILE else _pattern(fields["pattern"]).derived(fields)


def level(fields: Mapping[str, Any], shape: tuple[str, str] = ("n", "k")) -> float:
    """Return the fraction of cells that will be pruned, without building the mask.

    `shape` names the fields that are the weight's sizes. Raises SuiteError, with the nearest level,
    if the requested density cannot be met. Blocks that are cut off at the edge count as whole; the
    exact sparsity is counted once the operands exist.
    """
    requested: float = fields["sparsity"]
    if fields["pattern"] == FILE:
        return requested
    rule = _rule(fields, shape)
    rows, columns = _prunable_sides(rule, requested)
    part = rows * columns / rule.grid.cells
    of = rule.of or rule.group
    nearest = part * (of - _count(rule, requested)) / of
    if abs(requested - nearest) > TOLERANCE * (1 - requested):
        masks: Stack | None = fields.get("masks")
        r, c = masks.block if masks else (rule.grid.r, rule.grid.c)
        grid = f"{rule.grid.rows}x{rule.grid.columns} grid of {r}x{c} blocks"
        request = f"pattern {fields['pattern']}: sparsity {requested:g}"
        raise SuiteError(f"{request} is impossible in a {grid}: the nearest level is {nearest:.6g}")
    return nearest


def mask(
    fields: Mapping[str, Any], shape: tuple[str, str], score: Score, device: torch.device
) -> Tensor:
    """Return a bool matrix, True where an element is kept. Raises SuiteError as `level` does."""
    level(fields, shape)
    rule = _rule(fields, shape)
    grid = rule.grid
    count = _count(rule, fields["sparsity"])
    scores = rule.score(grid, count, score) if rule.score else score(grid)
    chosen = best(scores.to(device), rule.group, count)
    cells = chosen.view(grid.rows, 1, grid.columns, 1).expand(-1, grid.r, -1, grid.c)
    whole = cells.reshape(grid.rows * grid.r, grid.columns * grid.c)
    rows, columns = _prunable_sides(rule, fields["sparsity"])
    whole[rows * grid.r :] = True
    whole[:, columns * grid.c :] = True
    return whole[: grid.n, : grid.k]


def _rule(fields: Mapping[str, Any], sizes: tuple[str, str]) -> Rule:
    block, (n, k) = fields["block"], (fields[size] for size in sizes)
    pattern, masks = _pattern(fields["pattern"]), fields.get("masks")
    if masks:
        block = 1
        if masks.causal and not (pattern.causal or fields["sparsity"] == 0):
            raise SuiteError(f"pattern {fields['pattern']}: expected a pattern that can be causal")
    r, c = sides_of(block)
    expected = f"{fields['pattern']}: expected a Rule of a weight"
    try:
        rule = pattern.rule(Weight(n, k, r, c, sizes, masks))
    except SparsebenchError:
        raise
    except Exception as error:
        if modules("harness.patterns").get(fields["pattern"], "").startswith("sparsebench."):
            raise
        raise SuiteError(f"{expected}, found {type(error).__name__}: {error}") from error
    if not isinstance(rule, Rule):
        raise SuiteError(f"{expected}, found {rule!r}")
    return rule


def _pattern(name: str) -> Pattern:
    names = [*modules("harness.patterns"), FILE]
    if name not in names and "." not in name and ":" not in name:
        raise SuiteError(f"pattern: {unknown('a known pattern', name, names)}")
    pattern = load("harness.patterns", name)
    if not isinstance(pattern, Pattern):
        raise SuiteError(f"{name}: expected PATTERN to be a Pattern, found {pattern!r}")
    return pattern


def _count(rule: Rule, sparsity: float) -> int:
    requested = (rule.of or rule.group) * (1 - sparsity)
    if rule.counts is None:
        return max(1, round(requested))
    if isinstance(rule.counts, range):
        return min(max(round(requested), rule.counts.start), rule.counts.stop - 1)
    return min(rule.counts, key=lambda count: abs(count - requested))


def _prunable_sides(rule: Rule, sparsity: float) -> tuple[int, int]:
    return rule.front(sparsity) if rule.front else (rule.grid.rows, rule.grid.columns)

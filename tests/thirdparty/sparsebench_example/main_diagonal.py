"""The element of each row that is on the main diagonal."""

import torch
from torch import Tensor

from sparsebench.harness.inputs.grid import Score, ValueGrid
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    return Rule(weight.elements, group=weight.k, counts=(1,), score=_on_diagonal)


def _on_diagonal(grid: ValueGrid, kept: int, own: Score) -> Tensor:
    return torch.eye(grid.rows, grid.columns, dtype=torch.int32).flatten()


PATTERN = Pattern(rule)

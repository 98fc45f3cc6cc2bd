"""A linear layer and its activation: Y[m, n] = max(X[m, k] @ W[n, k].T, 0)."""

from dataclasses import replace

from torch import Tensor

from sparsebench.harness.ops import linear


def definition(w: Tensor, x: Tensor) -> Tensor:
    return linear.definition(w, x).relu()


OP = replace(linear.OP, definition=definition)

"""A gate product that says which units are on, as _packed_gate.py and _twell_gate.py launch it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsebench.kernels._common.cuda import BoundKernel
from sparsebench.kernels._common.search import search

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Gate:
    """Gates as one of the two describes them, and the kernel that writes them.

    values  [m, n]: the gates, as far as they are written
    on      the bitmap, or the words
    config  of the kernel
    """

    values: Tensor
    on: Tensor
    program: BoundKernel
    config: "DataclassInstance"
    candidates: tuple[Mapping[str, Any], ...] = ()  # as of a Launch

    @property
    def choice(self) -> dict[str, Any]:
        """Return the configuration, as a row holds it."""
        return asdict(self.config)

    def __call__(self) -> Tensor:
        """Enqueue the product on the current stream."""
        return self.program()


def fastest(gates: Sequence[Gate], device: torch.device) -> Gate:
    """Return the fastest, and what was found of each. Raises Unsupported."""
    found = search(gates, device)
    told = found.lines([gate.choice for gate in gates])
    return replace(gates[found.best], candidates=tuple(told))

"""A kernel in CUDA C++ among the programs of a Template (triton.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsebench.kernels._common.cuda import Arguments, Loaded


@dataclass(frozen=True)
class BoundLaunch:
    """A kernel, its grid, its tensors, and its arguments by their addresses.

    A tensor on the device meta stands for one that each call has, or allocates.
    """

    loaded: Loaded
    args: tuple[Tensor, ...]
    arguments: Callable[..., Arguments]
    before: None = None  # no program of its own runs before it (BoundKernel)

    def bind(self, place: Mapping[int, int]) -> Callable[[object, Sequence[int]], None]:
        """Return the launch by addresses; `place` has the index of each tensor, by id."""
        holes = [(place.get(id(x)), 0 if x.is_meta else x.data_ptr()) for x in self.args]

        def enqueue(_: object, addresses: Sequence[int]) -> None:
            at = (fixed if hole is None else addresses[hole] for hole, fixed in holes)
            self.loaded.enqueue(self.arguments(*at))

        return enqueue

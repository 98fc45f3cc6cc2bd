"""The launch of a weight gradient: the kernel writes blocks, and the output is a matrix."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparsebench.formats.bsr import Bsr

if TYPE_CHECKING:
    from sparsebench.kernels._common import cuda, triton


@dataclass(frozen=True)
class Gradient:
    """A kernel that computes the blocks of dW: call it for dW, packed like `pattern`."""

    kernel: "cuda.BoundKernel | triton.BoundKernel"
    pattern: Bsr
    matrix: Bsr = field(init=False)

    def __post_init__(self) -> None:
        """Build the matrix once: the kernel writes into the same blocks in every launch."""
        object.__setattr__(self, "matrix", replace(self.pattern, values=self.kernel.out))

    def __call__(self) -> Bsr:
        self.kernel()
        return self.matrix

    @property
    def code(self) -> str | None:
        return self.kernel.code

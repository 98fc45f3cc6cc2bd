"""The contract of every file in formats/, and the tensor helpers that they share.

A format file defines one frozen dataclass and sets FORMAT to it. The harness finds it by file name.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from sparsebench.errors import FormatError

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by the size of an element in bytes."""


class Format(ABC):
    """A matrix [rows, columns] in one storage format, on one device.

    `operand` says which operand of an op the format is for. If it is "activations", the kernels
    build the layout from the hidden activations at every call, and receive dense weights. If it is
    "masks", the matrix has only ones and zeros, and the op instead of the suite determines the
    parameters of `from_dense`.
    """

    operand: ClassVar[Literal["weights", "activations", "masks"]] = "weights"
    shape: tuple[int, int]

    @classmethod
    @abstractmethod
    def from_dense(cls, dense: Tensor, /, *_: Any, **params: Any) -> Self:
        """Convert a matrix [rows, columns] on its own device, vectorised. Raises FormatError."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the converted matrix, bit for bit except for the sign of zeros."""

    @abstractmethod
    def arrays(self) -> dict[str, Tensor]:
        """Return every array that a kernel reads, by name. Their total size is `stored_bytes`."""

    @classmethod
    def examples(cls) -> Sequence[Tensor]:
        """Return matrices for the tests of this contract, if not every 2:4 matrix can be stored."""
        return ()

    def sample(self, dense: Tensor) -> Self:
        """Return the elements of another matrix at the positions that this one stores.

        A weight gradient has this layout. The result's `values` have the dtype of the other matrix,
        and it shares the other arrays. Raises FormatError if the format does not have this
        operation or the sizes differ.
        """
        name = type(self).__name__.lower()
        raise FormatError(f"{name} cannot store the values of another matrix: it has no `sample`")

    def __repr__(self) -> str:
        """Name the arrays with their dtypes and sizes; their values would fill screens."""
        arrays = [
            f"{name}: {str(array.dtype).removeprefix('torch.')} {list(array.shape)}"
            for name, array in self.arrays().items()
        ]
        return f"{type(self).__name__}({', '.join([f'shape: {list(self.shape)}', *arrays])})"

    @property
    def stored_bytes(self) -> int:
        """Return the size of the format's arrays in bytes."""
        return sum(a.numel() * a.element_size() for a in self.arrays().values())


def require(condition: bool, message: str) -> None:
    """Raise FormatError unless the condition holds."""
    if not condition:
        raise FormatError(message)


def describe(x: object) -> str:
    """Describe what was found in place of a tensor of another layout."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def require_matrix(dense: object, *, integers: bool = False) -> None:
    """Raise FormatError unless this is a contiguous floating-point matrix of at least 1x1.

    With `integers`, int8 values from -127 to 127 are right, too: -128 has the bits of fp8's -0.0.
    """
    if not isinstance(dense, Tensor):
        raise FormatError(f"expected a matrix as a torch.Tensor, found {type(dense).__name__}")
    require(dense.layout is torch.strided, f"expected a dense matrix, found {dense.layout}")
    shape = list(dense.shape)
    require(dense.dim() == 2 and 0 not in shape, f"expected [n, k] of 1x1 or more, found {shape}")
    right = dense.is_floating_point() or (integers and dense.dtype == torch.int8)
    require(right, f"expected a floating-point matrix, found {dense.dtype}")
    require(dense.is_contiguous(), f"expected a contiguous matrix, found strides {dense.stride()}")
    if dense.dtype == torch.int8:
        least = int(dense.amin())
        require(least > -128, f"expected int8 values from -127 to 127, found {least}")


def require_whole(name: str, value: object) -> None:
    """Raise FormatError unless the value of a parameter is an integer of at least 1."""
    right = type(value) is int and value > 0
    require(right, f"{name}: expected an integer of at least 1, found {value!r}")


def sides_of(block: object) -> tuple[int, int]:
    """Return the rows and columns of a block. Raises FormatError."""
    sides: list[Any] = list(block) if isinstance(block, list | tuple) else [block, block]
    right = len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
    expected = "expected an integer of at least 1, or [rows, columns] of them"
    require(right, f"block: {expected}; found {block!r}")
    return sides[0], sides[1]


def require_size(dense: Tensor, shape: tuple[int, int]) -> None:
    """Raise FormatError unless the matrix has this shape."""
    require(dense.shape == shape, f"expected {list(shape)}, found {list(dense.shape)}")


def is_stored(dense: Tensor) -> Tensor:
    """Return a mask of the elements that are not zero. NaN is a value; -0.0 and -128 are zero.

    Multiplying weights by a mask leaves -0.0 where they are negative.
    """
    return has_value(dense.view(BITS[dense.element_size()]))


def has_value(bits: Tensor) -> Tensor:
    """Return a mask of the elements, given as integers of their bits, that are not zero.

    torch cannot compare fp8 values, so test every bit except the sign.
    """
    return (bits & torch.iinfo(bits.dtype).max) != 0


def offsets_of(rows: Tensor, count: int) -> Tensor:
    """Return where each of `count` rows starts in sorted row numbers, int32 [count + 1]."""
    counts = torch.bincount(rows, minlength=count)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def rows_of(offsets: Tensor, stored: int | None = None) -> Tensor:
    """Return the row number of each stored element or block, int64 [stored].

    stored  the last offset, if the caller knows it; otherwise the host waits for the GPU, which
            breaks a capture
    """
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return rows.repeat_interleave(offsets.diff(), output_size=stored)

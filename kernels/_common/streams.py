"""Streams of memory in Triton: read, write or copy a tensor as fast as the device can.

    program p    chunk p, of 128 x WARPS x WORDS elements of 4 bytes
    read         sums[p] = the sum of the chunk, modulo 2^32
    write        every element = 1
    copy         every element to its place

The rate depends on the loads that a thread has in flight and on the size of a chunk. So there are
several shapes, and the fastest gives the ceiling. NOTES.md has the rate of each, and of other ways.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.triton import BoundKernel

WARP_ELEMENTS = 128  # 32 threads with a word of 16 bytes each


@dataclass(frozen=True)
class StreamShape:
    """Words of 16 bytes that a thread has in flight, and warps of a program."""

    words: int
    warps: int

    @property
    def chunk(self) -> int:
        return self.words * self.warps * WARP_ELEMENTS

    @property
    def label(self) -> str:
        return f"stream, {self.words} x 16 bytes a thread, {self.warps} warps"


SHAPES = StreamShape(1, 8), StreamShape(2, 8), StreamShape(4, 8), StreamShape(4, 4)


def readers(source: Tensor) -> Iterator[tuple[str, BoundKernel]]:
    """Yield each shape's label and the kernel that reads an int32 tensor and returns its sums."""
    for shape in SHAPES:
        sums = source.new_empty(_chunks(source, shape))
        yield shape.label, _bound(_read, shape, (source, sums), sums)


def writers(target: Tensor) -> Iterator[tuple[str, BoundKernel]]:
    """Yield each shape's label and the kernel that writes ones into an int32 tensor."""
    for shape in SHAPES:
        yield shape.label, _bound(_write, shape, (target,), target)


def copiers(source: Tensor, target: Tensor) -> Iterator[tuple[str, BoundKernel]]:
    """Yield each shape's label and the kernel that copies one int32 tensor into another."""
    for shape in SHAPES:
        yield shape.label, _bound(_copy, shape, (source, target), target)


def _bound(kernel: Any, shape: StreamShape, args: tuple[Tensor, ...], out: Tensor) -> BoundKernel:
    constants = {"CHUNK": shape.chunk, "num_warps": shape.warps}
    return BoundKernel(kernel, (_chunks(args[0], shape),), args, constants, out)


def _chunks(tensor: Tensor, shape: StreamShape) -> int:
    """Return how many chunks a tensor has. Raises ValueError unless they are whole."""
    chunks, rest = divmod(tensor.numel(), shape.chunk)
    if rest or tensor.dtype != torch.int32:
        expected = f"int32 in whole chunks of {shape.chunk}"
        raise ValueError(f"expected {expected}, found {tensor.numel()} of {tensor.dtype}")
    return chunks


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, sums, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.cast(tl.program_id(0), tl.int64) * CHUNK + tl.arange(0, CHUNK)
    elements = tl.load(source + at, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(elements, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _write(target, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.cast(tl.program_id(0), tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(target + at, tl.full([CHUNK], 1, tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.cast(tl.program_id(0), tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(target + at, tl.load(source + at))

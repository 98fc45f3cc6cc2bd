"""Streams of memory: read, write or copy a tensor as fast as the device does it. In Triton.

    program p of P    chunks p, p + P, p + 2 P, ...    of THREADS x WORDS x 16 bytes
    read              sums[p] = the sum of the program's elements, modulo 2^32
    write             every element = 1
    copy              every element to its place

What a kernel can reach depends on the loads in flight and on the order of chunks. So there are
several shapes; whoever looks for a ceiling takes the fastest. NOTES.md has what each reached.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.triton import BoundKernel

LANES, ELEMENTS = 32, 4  # threads of a warp; int32 in a word of 16 bytes


@dataclass(frozen=True)
class Shape:
    """Words of 16 bytes that a thread has in flight, warps of a program, programs of an SM.

    per_sm  0: a program for each chunk
    """

    words: int
    warps: int
    per_sm: int

    @property
    def chunk(self) -> int:
        """Return the elements of a chunk."""
        return self.words * self.warps * LANES * ELEMENTS

    @property
    def label(self) -> str:
        """Name the shape for a reader."""
        programs = f"{self.per_sm} programs an SM" if self.per_sm else "a program a chunk"
        return f"{self.words} words a thread, {self.warps} warps, {programs}"


SHAPES = (
    *(Shape(words, 4, 0) for words in (4, 8)),
    *(Shape(words, 8, per_sm) for words in (2, 4) for per_sm in (0, 2, 8)),
)


def readers(source: Tensor) -> Iterator[tuple[str, BoundKernel]]:
    """Yield each shape's label and the kernel that reads an int32 tensor; it returns the sums."""
    for shape in SHAPES:
        chunks, programs = _split(source, shape)
        sums = source.new_empty(programs)
        yield shape.label, _bound(_read, shape, (source, sums, chunks), sums)


def writers(target: Tensor) -> Iterator[tuple[str, BoundKernel]]:
    """Yield each shape's label and the kernel that writes ones into an int32 tensor."""
    for shape in SHAPES:
        yield shape.label, _bound(_write, shape, (target, _split(target, shape)[0]), target)


def copiers(source: Tensor, target: Tensor) -> Iterator[tuple[str, BoundKernel]]:
    """Yield each shape's label and the kernel that copies one int32 tensor into another."""
    for shape in SHAPES:
        chunks, _ = _split(source, shape)
        yield shape.label, _bound(_copy, shape, (source, target, chunks), target)


def _bound(kernel: object, shape: Shape, args: tuple[object, ...], out: Tensor) -> BoundKernel:
    constants = {"CHUNK": shape.chunk, "num_warps": shape.warps}
    _, programs = _split(args[0], shape)  # type: ignore[arg-type]
    return BoundKernel(kernel, (programs,), args, constants, out)


def _split(tensor: Tensor, shape: Shape) -> tuple[int, int]:
    """Return the chunks of a tensor, which it must fill, and the programs that share them."""
    chunks, rest = divmod(tensor.numel(), shape.chunk)
    if rest or tensor.dtype != torch.int32:
        expected = f"int32 in whole chunks of {shape.chunk}"
        raise ValueError(f"expected {expected}, found {tensor.numel()} of {tensor.dtype}")
    return chunks, min(chunks, shape.per_sm * _sms(tensor.device)) if shape.per_sm else chunks


def _sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, sums, chunks, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([CHUNK], tl.int32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        at = tl.cast(chunk, tl.int64) * CHUNK + tl.arange(0, CHUNK)
        total += tl.load(source + at, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _write(target, chunks, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    ones = tl.full([CHUNK], 1, tl.int32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        at = tl.cast(chunk, tl.int64) * CHUNK + tl.arange(0, CHUNK)
        tl.store(target + at, ones)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, chunks, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        at = tl.cast(chunk, tl.int64) * CHUNK + tl.arange(0, CHUNK)
        tl.store(target + at, tl.load(source + at, eviction_policy="evict_first"))

"""Products of the CUDA kernels of this family, and how their weights are packed.

bsr_small and bsr_strips read W packed in the order of their steps (pack.cu); bsr_wgmma and bsr_fp32
read it as stored. A plan for M tokens also multiplies fewer: the maps of X and Y end at the last
token, so the tiles beyond it read zeros and write nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Self

import torch
from torch import Tensor

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.work_list import Ints, uploaded
from sparsebench.kernels._kernel import output_dtype
from sparsebench.kernels.bsr._call import LARGEST, BsrCall

PACK_THREADS, PACK_PIECES = 256, 4  # threads of a CTA; pieces of a thread (pack.cu)


@dataclass(frozen=True)
class Packing:
    """Copies blocks into the order in which a kernel multiplies them.

    source  int32, on the device: the position in the blocks of each piece of the packed W, or -1
            for zeros
    order   digest of the order
    turned  `source` counts the pieces of transposed blocks
    piece   elements of a piece
    """

    source: Tensor
    order: bytes
    turned: bool = False
    piece: int = 8

    @classmethod
    def of(cls, source: Ints, device: torch.device, turned: bool = False, piece: int = 8) -> Self:
        """Upload the order."""
        order = sha256(source.tobytes() + bytes([turned])).digest()
        return cls(uploaded(source, device).view(torch.int32), order, turned, piece)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the pieces of blocks [blocks, r, c]: [pieces, piece]."""
        if not self.turned:
            return packed(values, self.source, self.piece)
        transposed = values.transpose(1, 2).contiguous()
        cuda.on_tape(transposed, call=cuda.TransposedCopy(values, transposed))
        return packed(transposed, self.source, self.piece)


def product_of(
    call: BsrCall,
    loaded: cuda.Loaded,
    arguments: Callable[..., cuda.Arguments],
    lists: tuple[Tensor, ...],
    stored: int,
    packing: Packing | None = None,
) -> Product:
    """Return the product Y or dX of a kernel.

    arguments  (tokens, address of x, strides of x, address of W's values, address of y)
    lists      on the device: what the kernel reads beside its operands
    stored     number of blocks; without any, the kernel reads a block of zeros
    packing    None if the kernel reads the blocks as stored
    """
    kind = output_dtype(call.dtype)

    def run(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(x.shape[0], call.width, dtype=kind) if out is None else out
        at = x.shape[0], x.data_ptr(), x.stride(), w.data_ptr(), y.data_ptr()
        return cuda.launch(loaded, arguments(*at), y, lists, w)

    if packing is not None:
        return Product(run, loaded.code, packing, packing.order)
    return Product(run, loaded.code) if stored else Product(run, loaded.code, no_block, "zeros")


def no_block(values: Tensor) -> Tensor:
    """Return a block of zeros, for a weight without blocks: the address must be of memory."""
    cuda.on_tape(complete=False)
    return values.new_zeros(1, *values.shape[1:])


def packed(blocks: Tensor, source: Tensor, size: int = 8) -> Tensor:
    """Return the pieces of blocks [blocks, r, c] in the order of `source`: [pieces, size].

    A piece -1 is zeros. Without blocks, return one block of zeros.
    """
    if not blocks.shape[0]:
        return no_block(blocks)
    pieces = source.shape[0]
    if not blocks.is_cuda:  # the reference of pack.cu
        return blocks.view(-1, size)[source.clamp(0)].masked_fill_(source[:, None] < 0, 0)
    out = blocks.new_empty(pieces, size)
    loaded, arguments = _pack_kernel(blocks.device, pieces, size * blocks.itemsize)
    args = arguments(blocks.data_ptr(), source.data_ptr(), out.data_ptr())
    return cuda.launch(loaded, args, out, source)


@lru_cache(256)
def _pack_kernel(
    device: torch.device, pieces: int, piece_bytes: int
) -> tuple[cuda.Loaded, Callable[..., cuda.Arguments]]:
    """Return pack.cu for so many pieces, and its arguments by the addresses, which it keeps."""
    constants = (("PIECE_BYTES", piece_bytes),)
    kernel = cuda.load("pack", "gather_pieces", constants, 0, device, cuda.target_of(device))
    grid = -(-pieces // (PACK_THREADS * PACK_PIECES))
    arguments = lru_cache(cuda.ADDRESSES)(lambda *addresses: kernel.arguments(*addresses, pieces))
    return kernel.on(grid, PACK_THREADS), arguments


def unsupported_product(
    call: BsrCall, pieces: int, dtypes: tuple[torch.dtype, ...] = cuda.HALVES
) -> str | None:
    """Return why no CUDA kernel with TMA can compute Y or dX of W in `pieces` of 16 bytes, or None.

    Rows of both activations are multiples of 16 bytes.
    """
    step, names = 16 // call.dtype.itemsize, [str(d).removeprefix("torch.") for d in dtypes]
    if call.dtype not in dtypes:
        return f"expected operands of one dtype of {', '.join(names)}; found {call.dtype}"
    if call.width % 8 or call.depth % step:
        actual = f"found {call.depth} and {call.width}"
        return f"expected a multiple of {step} columns to read and of 8 to write, {actual}"
    if max(call.shape) > 2**20 or max(pieces, call.m) > LARGEST - 256:
        n, k = call.shape
        expected = "less than 2^31 tokens and pieces of 16 bytes and at most 2^20 columns"
        return f"expected {expected}, found {pieces} pieces, {call.m} tokens, W of {n}x{k}"
    return None

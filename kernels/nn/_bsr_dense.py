"""A dense product with a copy of a small frozen weight in blocks.

In small layers, launches and loads of X take more time than W. The copy has MOST_BYTES at most, and
is packed once, like other frozen values. A search times it beside the kernels of blocks, which
reached these parts of the searched cuBLAS' speed on an H200:

    1000 x 1000, blocks of 10, 80 % zeros, 64, 100 and 1,024 tokens    0.86, 0.79, 0.69    2 MB
    5000 x 3000, blocks of 8, 90 %, 300 tokens                         0.74               30 MB
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.cuda import HALVES, on_tape
from sparsebench.kernels._common.operator import Engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.bsr._call import BsrCall, bind

MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Config:
    """The layout of the copy: `columns` stores it column by column, which cuBLAS often prefers."""

    columns: bool = True


def unsupported_call(call: BsrCall) -> str | None:
    """Return why a call takes no dense copy, or None."""
    size = call.shape[0] * call.shape[1] * call.dtype.itemsize
    if call.live:
        return "dense copy: expected frozen values, found values that train"
    fits = call.dtype in HALVES and size <= MOST_BYTES
    expected = f"dense copy: expected fp16 or bf16, up to {MOST_BYTES} bytes"
    return None if fits else f"{expected}, found {call.dtype} and {size}"


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return both layouts. Raises Unsupported."""
    refuse(unsupported_call(call))
    return [Config(), Config(columns=False)]


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Plan torch's product with the copy, which `pack` makes. Raises Unsupported."""
    refuse(unsupported_call(call))

    def pack(values: Tensor) -> Tensor:
        dense = replace(w, values=values).to_dense()
        return dense.T.contiguous().T if config.columns else dense

    def run(x: Tensor, dense: Tensor, out: Tensor | None = None) -> Tensor:
        on_tape(dense=dense)
        return torch.mm(x, dense.T, out=out)

    return Product(run, pack=pack, order=("dense", config))


KERNEL = Engine(
    op="linear",
    consumes="bsr",
    device="any",
    name="dense",
    config=Config,
    choices=choices,
    plan=plan,
    bind=bind,
)

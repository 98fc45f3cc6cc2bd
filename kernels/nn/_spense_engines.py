"""The engines of a 2:4 hybrid weight, and the plans that layers share.

    GPU of compute capability 9.0              spense_wgmma: fp16, bf16 and fp8, also act(G) * U
    GPU of compute capability 8.0 and newer    spense_mma: fp16 and bf16
    CPU                                        a dense product in torch, as a reference

All layers of a layout share their plans, because a plan does not depend on the values of W.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense, tile_shapes
from sparsebench.kernels._common.operator import Engine, NoConfig, Operator
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import HOPPER
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.spense import spense_mma, spense_wgmma
from sparsebench.kernels.spense._call import NAMES, SpenseCall, bind, problem_of
from sparsebench.kernels.spense.spense_ffn import parted
from sparsebench.results.record import Problem

Layout = tuple[int, int, int, int, str | None]
"""n and k of W, rows and columns of its sparse part, and the activation."""

ENGINES = spense_wgmma.KERNEL, spense_mma.KERNEL
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


def call_of(layout: Layout, dtype: torch.dtype, m: int) -> SpenseCall:
    """Return the call of a layer for m tokens; with an activation, W is gate and up."""
    n, k, rows, columns, activation = layout
    return SpenseCall(m, (n, k), (rows, columns), dtype, activation)


@lru_cache(256)
def operator_of(layout: Layout, dtype: torch.dtype, device: torch.device) -> Operator:
    """Return the plans of all layers with this layout and dtype on a device."""

    def weight(call: SpenseCall) -> Spense:
        shapes = tile_shapes(call.shape, call.sparse_shape, call.dtype.itemsize)
        byte = torch.empty((), dtype=torch.uint8, device=device)  # never read
        tiles = [byte.expand(shape) for shape in shapes]
        return Spense(call.shape, call.dtype, call.sparse_shape, *tiles)

    return Operator(ENGINES, weight, problem_of, device, partial(likeliest, device=device))


def likeliest(call: SpenseCall, device: torch.device) -> Sequence[Engine]:
    """Return the engine that runs a call on a device. Raises Unsupported."""
    if device.type == "cpu":
        return [_IN_TORCH]
    if call.dtype not in NAMES:
        raise Unsupported(f"expected {', '.join(NAMES.values())} on a GPU, found {call.dtype}")
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    engine = spense_wgmma.KERNEL if hopper else spense_mma.KERNEL
    refuse(engine.unsupported(Problem("linear", {"dtype": NAMES[call.dtype]}), device))
    return [engine]


def _in_torch(w: Spense, call: SpenseCall, config: NoConfig) -> Product:
    """Plan a dense product in torch, which sums fp8 in fp32."""

    def run(
        x: Tensor,
        sparse: Tensor,
        dense: Tensor,
        features: Tensor | None = None,
        tokens: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        weight = Spense(call.shape, call.dtype, call.sparse_shape, sparse, dense).to_dense()
        if call.dtype.itemsize == 1:
            x, weight = x.float(), weight.float()
        with torch.autocast("cpu", enabled=False):
            y = x @ weight.T
        y = y if features is None else y * features
        y = y if tokens is None else y * tokens[:, None]
        if call.activation is not None:
            gate, up = parted(y.T)
            y = (ACTIVATIONS[call.activation](gate) * up).T.contiguous()
        if call.kind.itemsize == 1:
            y = y.clamp(-torch.finfo(call.kind).max, torch.finfo(call.kind).max)
        return y.to(call.kind) if out is None else out.copy_(y)

    return Product(run)


def _one_choice(w: Any, call: SpenseCall) -> list[NoConfig]:
    return [NoConfig()]


_IN_TORCH = Engine(
    op="linear",
    consumes="spense",
    device="cpu",
    name="torch",
    choices=_one_choice,
    plan=_in_torch,
    bind=bind,
)

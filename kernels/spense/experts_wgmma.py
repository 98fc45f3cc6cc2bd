"""Products of routed rows with 2:4 hybrid experts in one launch on Hopper: Y_e = X_e @ W_e.T.

    experts_wgmma.cu    the kernel: the tiles and pipelines of spense_wgmma, and a work list that
                        each CTA makes of the experts' ends, which stay on the device
    this file           chooses configurations and plans
    experts_dense.py    the same kernel for dense experts, whose tiles are all dense

    W       the experts one below the other [experts n, k], split by columns or not at all
    dtype   fp16, bf16, or fp8 (e4m3) with Y in bf16
    sizes   any rows of X; n a multiple of 64; k of 8 (16 bits) or 16 (8 bits)
    ends    int32 [experts] on the device, any values (harness/ops/experts.py)

    product.run(x, ends, sparse, dense, features=None, out=None)

With an `activation` W has gate and up of each expert, 8 rows of each in turn (spense_ffn.py), and
the launch writes H[rows, n / 2] = act(X Wg.T) * (X Wu.T).
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.formats.spense import ROWS, Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, Operator, OperatorCall, bucket
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense._call import ALIGNMENT, NAMES, SpenseCall, weight_of
from sparsebench.kernels.spense._stream_k import tiles_of

FEWEST_EXPERTS, MOST_EXPERTS = 256, 1024  # that a kernel lists: a lane has 8 to 32 of them
SHARED_BYTES = 226 * 1024  # for the pipelines and for the lists, of 8 bytes for each expert
TOKENS = 16, 32, 64, 128  # 256 leave no registers for three warpgroups
NEAREST = 3  # numbers of tokens that are timed
SHAPES = (3, 4), (2, 5), (1, 6)  # warpgroups, and tiles of W in flight for each


class ExpertsCall(NamedTuple):
    """Products of up to m rows in all. It determines the plan on a device.

    shape         n and k of each of the experts
    sparse_shape  rows and columns of the sparse part of W
    dtype         of X and W
    activation    if set, W is gate and up, and the result is H
    """

    m: int
    experts: int
    shape: tuple[int, int]
    sparse_shape: tuple[int, int]
    dtype: torch.dtype
    activation: str | None = None

    @property
    def of_expert(self) -> SpenseCall:
        """Return the call of one expert's matrix, whose result is as wide."""
        return SpenseCall(self.m, self.shape, self.sparse_shape, self.dtype, self.activation)


@dataclass(frozen=True)
class ExpertsConfig:
    """One way to run the kernel.

    tokens      rows of X in a work item
    warpgroups  rows of tiles of W that share them
    ahead       most tiles of W in flight for a warpgroup
    """

    tokens: int
    warpgroups: int
    ahead: int

    @property
    def tiles(self) -> spense_wgmma.Config:
        """Return the configuration of the pipelines."""
        return spense_wgmma.Config(self.tokens, 1, self.ahead, self.warpgroups)


def choices(w: Spense, call: ExpertsCall) -> list[ExpertsConfig]:
    """Return configurations, the likeliest first: about as many tokens as an expert has rows."""
    mean = max(call.m / call.experts, 1)
    nearest = sorted(TOKENS, key=lambda tokens: abs(log2(tokens / (1.5 * mean))))[:NEAREST]
    return [ExpertsConfig(tokens, *shape) for shape in SHAPES for tokens in nearest]


def closed(w: Spense, call: ExpertsCall) -> list[ExpertsConfig]:
    """Return the configurations of the likeliest shape."""
    return choices(w, call)[:NEAREST]


def plan(w: Spense, call: ExpertsCall, config: ExpertsConfig) -> Product:
    """Load the kernel. Reads only the shapes and the device of W's tiles. Raises Unsupported."""
    device, (n, k), about = w.sparse.device, call.shape, call.of_expert
    macros = macros_of(config, call.dtype, call.activation, call.experts)
    shared = dict(macros)["SHARED_BYTES"]
    kernel = cuda.load("experts_wgmma", "multiply_experts", macros, shared, device)
    loaded = kernel.on(multiprocessors(device), config.tiles.threads)
    counts = call.experts, n // ROWS

    @lru_cache(cuda.ADDRESSES)
    def arguments(rows: int, x: tuple[int, int], y: int, ends: int, *at: int) -> cuda.Arguments:
        of_x = x[0], (rows, k), x[1], call.dtype
        few = spense_wgmma.map_of(*of_x, (spense_wgmma.STORE_TOKENS, spense_wgmma.BOX))
        maps = *spense_wgmma.maps_of(about, config.tiles, rows, x, y)[:2], few
        sparse, dense, features = at
        k_tiles, row_bytes = -(-k // w.span), about.width * about.kind.itemsize
        experts = ends, y, *counts, rows, k_tiles, row_bytes
        scales = features, 0, w.shape[0], rows
        return kernel.arguments(*maps, sparse, dense, *tiles_of(w), *experts, *scales)

    def run(
        x: Tensor,
        ends: Tensor,
        sparse: Tensor,
        dense: Tensor,
        features: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        y = x.new_empty((x.shape[0], about.width), dtype=about.kind) if out is None else out
        of_x, at = (
            (x.data_ptr(), x.stride(0)),
            (ends.data_ptr(), sparse.data_ptr(), dense.data_ptr()),
        )
        scale = 0 if features is None else features.data_ptr()
        args = arguments(x.shape[0], of_x, y.data_ptr(), *at, scale)
        return cuda.launch(loaded, args, y, loaded, ends, sparse, dense)

    return Product(run, kernel.code)


def macros_of(
    config: ExpertsConfig, dtype: torch.dtype, activation: str | None = None, experts: int = 1
) -> cuda.Constants:
    """Return the macros of experts_wgmma.cu."""
    constants = dict(spense_wgmma.constants_of(config.tiles, dtype, activation))
    listed = max(FEWEST_EXPERTS, 1 << (experts - 1).bit_length())
    constants |= {"SHARED_BYTES": SHARED_BYTES - 8 * listed, "MOST_EXPERTS": listed}
    return tuple(constants.items())


def call_of(w: Spense, experts: int, rows: int, activation: str | None = None) -> ExpertsCall:
    """Return the call that plans a product of rows with experts."""
    shape = w.shape[0] // experts, w.shape[1]
    return ExpertsCall(bucket(rows), experts, shape, w.sparse_shape, w.dtype, activation)


def problem_of(call: ExpertsCall) -> dict[str, Any]:
    """Return a call's sizes, as a list of choices has them; a 2:4 element counts half."""
    (n, k), (rows, columns) = call.shape, call.sparse_shape
    density = float(f"{1 - rows * columns / (2 * call.experts * n * k):.2g}")
    fields = {"op": "spense.experts", "dtype": NAMES.get(call.dtype, str(call.dtype))}
    sizes = {"m": call.m, "n": n, "k": k, "experts": call.experts, "density": density}
    return {**fields, "activation": call.activation, **sizes}


def unsupported_call(w: Spense, call: ExpertsCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    n, k = call.shape
    step = ALIGNMENT // call.dtype.itemsize
    if n % ROWS or k % step:
        return (
            f"expected n of each expert in multiples of {ROWS} and k of {step}, found {n} and {k}"
        )
    if call.experts > MOST_EXPERTS:
        return f"expected at most {MOST_EXPERTS} experts, found {call.experts}"
    if w.sparse_shape[0] not in (0, w.shape[0]):
        return f"expected experts split by columns, found {w.sparse_shape[0]} sparse rows"
    return None


def bound(
    w: Spense,
    x: Tensor,
    ends: Tensor,
    experts: int,
    engines: tuple[Engine, ...],
    scale: Tensor | None = None,
    *,
    activation: str | None = None,
) -> OperatorCall:
    """Return a call of X with experts, and in fp8 the scales of the rows of W."""
    call = call_of(w, experts, len(x), activation)
    operator = Operator(engines, lambda call: w, problem_of, w.sparse.device)
    return OperatorCall(operator, call, (x, ends), lambda product: (w.sparse, w.dense, scale))


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands. Raises Unsupported."""
    return bind_tiles(weight_of(operands.weights, "w"), operands, engines)


def bind_tiles(w: Spense, operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a weight with the activations of a suite. Raises Unsupported."""
    x, ends = (operands.activations[name] for name in ("x", "ends"))
    return bound(w, x, ends, operands.problem["experts"], engines)


unsupported = partial(unsupported_on_hopper, dtypes=("fp16", "bf16", "fp8"))

KERNEL = gpu_engine(
    *("experts_wgmma", "experts", "spense", ExpertsConfig, choices, plan),
    *(unsupported, bind, unsupported_call),
    closed=closed,
)

"""A SparseGatedMLP without gradients: it runs the fastest layer of the TwELL family.

    Y [m, k] = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T          act is relu or relu2

    ffn_few          one launch, up to 64 tokens
    ffn_sparse       groups of eight tokens; the gate by torch, or as TwELL words
    ffn_step_sparse  the forward pass of training, in Triton; also for GPUs before Hopper
    dense            three products in torch, gate and up side by side, and a kernel for act(G) * U

A plan reads the weights as they are, so writes to them need no new plan. It depends on the number
of active units per token, which the first call of a layer counts in its X, rounded to a power of 2.
With 4096 tokens of 5632 units, sparse products are 2.2 times as fast as dense ones if 8 units are
active, and slower if 113 are, so layers of one size do not share plans if their counts differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import log2
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.cuda import on_tape
from sparsebench.kernels._common.elementwise import gated
from sparsebench.kernels._common.selection import (
    Candidate,
    Earlier,
    NoConfig,
    Operator,
    Selected,
    bucket,
)
from sparsebench.kernels.twell import _grouped, _layer, ffn_few
from sparsebench.kernels.twell._autograd import NAMES, gated_mlp, require_kernels
from sparsebench.kernels.twell._twell_gate import configurations
from sparsebench.results.record import Problem

ACTIVE = "_sparsebench_active"  # attribute of Wg: active units per token, a power of two
ENGINES = "ffn_few", "ffn_sparse", "ffn_twell", "ffn_step_sparse", "dense"


class InTorch:
    """The layer by an operator that is not of one size: training's, or dense products."""

    code = pack = order = None

    def __init__(self, run: Callable[..., Tensor]) -> None:
        """Take the function of X and the three weights."""
        self._run = run

    def run(self, *operands: Tensor) -> Tensor:
        """Return Y."""
        on_tape(complete=False)
        return self._run(*operands)


def eager(x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, slots: int) -> Tensor:
    """Return Y [m, k]; X [m, k], Wg, Wu and Wd.T [n, k] are contiguous. Raises Unsupported."""
    if not x.shape[0]:
        return x.new_empty(x.shape)
    operands = x, wg, wu, wd_t
    with torch.cuda.device_of(x):
        return plan_of(operands, squared, slots).product.run(*operands)


def plan_of(
    operands: Sequence[Tensor], squared: bool, slots: int, earlier: Earlier | None = None
) -> Selected:
    """Return the plan of a call by its operands, which the first call makes. Raises Unsupported."""
    (x, wg, *_), m = operands, bucket(operands[0].shape[0])
    plan = operator_for(wg, squared, slots).plans.get(m)
    if plan is not None:
        return plan
    if not hasattr(wg, ACTIVE) and not is_capturing(x):
        active = (x @ wg.T > 0).sum() / x.shape[0]
        setattr(wg, ACTIVE, 2 ** round(log2(max(float(active), 1))))
    operator = operator_for(wg, squared, slots)
    return operator.select(m, lambda product: partial(product.run, *operands), earlier)


def operator_for(wg: Tensor, squared: bool, slots: int) -> Operator:
    """Return the plans of a layer, by its gate; they are empty before its first call."""
    return operator_of(*wg.shape, wg.dtype, squared, slots, getattr(wg, ACTIVE, 0), wg.device)


inference = torch.library.custom_op(
    "sparsebench::sparse_gated_mlp_inference", eager, mutates_args=()
)


@inference.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@lru_cache(256)
def operator_of(
    n: int,
    k: int,
    dtype: torch.dtype,
    squared: bool,
    slots: int,
    active: int,
    device: torch.device,
) -> Operator:
    """Return the plans of all layers of these sizes, by number of tokens (selection.bucket)."""
    activation = "relu2" if squared else "relu"

    def offer(m: int, choice: Mapping[str, Any] | None) -> list[Iterable[Candidate]]:
        engines = [_on_hopper(m), _training(m), _dense()]
        if not choice:
            return engines
        return [[c for engine in engines for c in engine if c.choice.items() <= choice.items()]]

    def _on_hopper(m: int) -> list[Candidate]:
        sizes: dict[str, Any] = {
            "m": m,
            "n": n,
            "k": k,
            "dtype": NAMES[dtype],
            "activation": activation,
        }
        if _layer.unsupported(Problem("ffn", sizes), device):
            return []
        plan = _layer.Plan(m, n, k, squared, dtype, device)
        few = [ffn_few.Config(way) for way in ffn_few.ways_of(m, n)]
        whole = [_grouped.Config(alone=True)] if m <= _grouped.MOST_ALONE else []
        whole.append(_grouped.Config())
        words = [_grouped.Config(cluster=gate.cluster) for gate in configurations()]
        kernels: dict[str, tuple[Any, Sequence[Any]]] = {
            "ffn_few": (ffn_few.Product, few if m <= ffn_few.MOST_TOKENS else []),
            "ffn_sparse": (_grouped.Product, whole),
            "ffn_twell": (_grouped.Product, words),
        }
        return [
            Candidate(name, config, partial(product, plan, config))
            for name, (product, configs) in kernels.items()
            for config in configs
        ]

    def _training(m: int) -> Iterable[Candidate]:
        require_kernels(m, n, k, dtype, device)

        def run(*operands: Tensor) -> Tensor:
            y: Tensor = gated_mlp(*operands, squared, slots)[0]
            return y

        yield Candidate("ffn_step_sparse", NoConfig(), partial(InTorch, run))

    def _dense() -> list[Candidate]:
        def run(x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor) -> Tensor:
            products = x.new_empty(len(x), 2 * n)
            torch.mm(x, wg.t(), out=products[:, :n])
            torch.mm(x, wu.t(), out=products[:, n:])
            return gated(products, activation) @ wd_t

        return [Candidate("dense", NoConfig(), partial(InTorch, run))]

    def problem(m: int) -> dict[str, Any]:
        density = float(f"{active / n:.2g}")
        fields = {"op": "twell.ffn", "dtype": NAMES[dtype], "activation": activation}
        return {**fields, "m": m, "n": n, "k": k, "density": density}

    if dtype not in NAMES:
        raise Unsupported(f"expected fp16, bf16 or fp32 on a GPU, found {dtype}")
    return Operator(ENGINES, offer, problem, device)

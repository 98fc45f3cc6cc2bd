"""A SparseGatedMLP without gradients: it runs the fastest layer of the TwELL family (_engines.py).

    Y [m, k] = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T          act is relu or relu2

A plan reads the weights as they are, so writes to them need no new plan. It depends on the number
of active units per token, which the first call of a layer counts in its X. So layers of one size do
not share plans if their counts differ.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.operator import Earlier, Operator, bucket
from sparsebench.kernels._common.product import Selected
from sparsebench.kernels.twell._call import TwellCall, operator_of, units_on
from sparsebench.kernels.twell._engines import ENGINES, likeliest

ACTIVE = "_sparsebench_active"  # attribute of Wg: active units per token, a power of two


def eager(x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, slots: int) -> Tensor:
    """Return Y [m, k]; X [m, k], Wg, Wu and Wd.T [n, k] are contiguous. Raises Unsupported."""
    if not x.shape[0]:
        return x.new_empty(x.shape)
    operands = x, wg, wu, wd_t
    with torch.cuda.device_of(x):
        y: Tensor = plan_of(operands, squared, slots).product.run(*operands)
    return y


def plan_of(
    operands: Sequence[Tensor], squared: bool, slots: int, earlier: Earlier | None = None
) -> Selected:
    """Return the plan of a call by its operands, which the first call makes. Raises Unsupported."""
    x, wg, *_ = operands
    call = call_of(x.shape[0], wg, squared, slots)
    if (selected := operator_for(wg, call).plans.get(call)) is not None:
        return selected
    if not hasattr(wg, ACTIVE) and not is_capturing(x):
        setattr(wg, ACTIVE, units_on(x, wg))
    operator = operator_for(wg, call)
    return operator.select(call, lambda product: partial(product.run, *operands), earlier)


def call_of(tokens: int, wg: Tensor, squared: bool, slots: int) -> TwellCall:
    """Return the call that is planned for a number of tokens."""
    n, k = wg.shape
    return TwellCall(bucket(tokens), n, k, wg.dtype, squared, slots=slots)


def operator_for(wg: Tensor, call: TwellCall) -> Operator:
    """Return the plans of a layer, by its gate; they are empty before its first call."""
    return _operator(call._replace(m=0), getattr(wg, ACTIVE, 0), wg.device)


@lru_cache(256)
def _operator(sizes: TwellCall, active: int, device: torch.device) -> Operator:
    """Return the plans of all layers of these sizes."""
    return operator_of(ENGINES, active, device, likeliest)


inference = torch.library.custom_op(
    "sparsebench::sparse_gated_mlp_inference", eager, mutates_args=()
)


@inference.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)

"""Declare a torch operator in one statement: what computes it, its sizes, and its derivative.

An operator is opaque to torch.compile, torch.export and dispatch modes. It has no derivative in
forward mode, and torch would drop the tangent without a word, so a call with one is refused.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.transforms import refuse_transforms


def torch_operator(
    name: str,
    compute: Callable[..., Any],
    sizes: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    advice: str = "",
) -> Callable[..., Any]:
    """Return the operator sparsebench::NAME. Its schema is that of the annotations of `compute`.

    sizes     (operands) -> results without values
    save      (ctx, operands, results) -> keeps on ctx what `backward` reads
    backward  (ctx, gradients of results) -> those of operands; None for an operator of gradients
    advice    what to do instead of a second derivative

    The operator raises Unsupported for a tangent, and for a transform of torch.func.
    """

    def refuse(*_: Any) -> NoReturn:
        raise Unsupported(f"{name}: expected no second derivative, found one{advice}")

    @wraps(compute)
    def without_tangents(*operands: Any, **named: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(name, (operands, named))
        return compute(*operands, **named)

    operator = torch.library.custom_op(f"sparsebench::{name}", without_tangents, mutates_args=())
    operator.register_fake(sizes)
    operator.register_autograd(backward or refuse, setup_context=save)

    def call(*operands: Any, **named: Any) -> Any:
        refuse_transforms()
        return operator(*operands, **named)

    return call


def refuse_tangents(name: str, operands: Any) -> None:
    """Raise Unsupported if forward-mode AD gave an operand a tangent."""
    tensors = (leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor))
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise Unsupported(f"{name}: expected no tangent of forward-mode AD, found one")

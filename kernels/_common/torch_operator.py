"""Declare a torch operator in one statement: what computes it, its sizes, and its derivative.

An operator is opaque to torch.compile, torch.export and dispatch modes.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sparsebench.errors import Unsupported


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
    """

    def refuse(*_: Any) -> NoReturn:
        raise Unsupported(f"{name}: expected no second derivative, found one{advice}")

    operator = torch.library.custom_op(f"sparsebench::{name}", compute, mutates_args=())
    operator.register_fake(sizes)
    operator.register_autograd(backward or refuse, setup_context=save)
    return operator

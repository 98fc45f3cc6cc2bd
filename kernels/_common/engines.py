"""Make an engine of functions that need not repeat what it refuses."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from sparsebench.kernels._common.operator import Engine, OperatorCall
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._kernel import Operands, refuse
from sparsebench.results.record import Problem


def gpu_engine(
    name: str,
    op: str,
    consumes: str,
    config: type,
    choices: Callable[[Any, Any], Sequence[Any]],
    plan: Callable[[Any, Any, Any], Product],
    unsupported: Callable[[Problem, torch.device], str | None],
    bind: Callable[[Operands, tuple[Engine, ...]], OperatorCall],
    unsupported_call: Callable[[Any, Any], str | None] = lambda w, call: None,
    most: int | None = None,
    closed: Callable[[Any, Any], Sequence[Any]] | None = None,
) -> Engine:
    """Return an engine on a GPU (operator.py).

    unsupported_call  (w, call) -> why no configuration can run the call, or None
    most              configurations that are timed
    """

    def offered(w: Any, call: Any) -> Sequence[Any]:
        refuse(unsupported_call(w, call))
        return choices(w, call)[:most]

    def offered_closed(w: Any, call: Any) -> Sequence[Any]:
        refuse(unsupported_call(w, call))
        return (closed or choices)(w, call)[:most]

    @wraps(plan)
    def planned(w: Any, call: Any, chosen: Any) -> Product:
        refuse(unsupported_call(w, call))
        return plan(w, call, chosen)

    return Engine(
        op=op,
        consumes=consumes,
        device="cuda",
        unsupported=unsupported,
        name=name,
        config=config,
        choices=offered,
        plan=planned,
        bind=bind,
        closed=closed and offered_closed,
    )

"""Is the harness still the harness? Its functions and clocks, held against what they were.

    sealed   every function and class of sparsebench that is loaded when a contest starts, with
             their code; the clocks, and what the check calls of torch
    checked  after each step that runs code of a contender

What has been replaced is put back, and the contender is wrong. A kernel's own Python runs in this
process: it can undo a change before it returns, or write to memory (harness/TRUST.md).
"""

import sys
import time
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from sparsebench.harness.bench.guard import Meddled

CLOCKS = [
    (time, "perf_counter"),
    (time, "perf_counter_ns"),
    (time, "monotonic"),
    (torch.cuda, "Event"),
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "record"),
    (torch.cuda.Event, "elapsed_time"),
]
OF_TENSORS = ["double", "abs", "norm", "isfinite", "all", "any", "max", "sum", "copy_", "fill_"]
OF_TENSORS += ["__sub__", "__truediv__", "__mul__", "equal", "data_ptr", "view", "detach"]
CODE = "__code__", "__defaults__", "__kwdefaults__"


class Seal:
    """What names of the harness mean."""

    def __init__(self) -> None:
        """Take everything as it is now."""
        self._known = [(owner, name, value) for owner, name, value in _everything()]

    def check(self) -> None:
        """Raise Meddled where a name means something else, after all mean what they did."""
        changed = [found for found in self._known if _get(*found[:2]) is not found[2]]
        for owner, name, value in changed:
            setattr(owner, name, value)
        if changed:
            raise Meddled(f"replaced {', '.join(sorted({_called(*c[:2]) for c in changed})[:3])}")


def _everything() -> Iterator[tuple[Any, str, Any]]:
    for owner, name in [*CLOCKS, *((torch.Tensor, name) for name in OF_TENSORS)]:
        yield owner, name, _get(owner, name)
    for title, module in list(sys.modules.items()):
        if title.partition(".")[0] != "sparsebench":
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType | type) or callable(value):
                yield module, name, value
            if getattr(value, "__module__", None) == title:
                yield from _inside(value)


def _inside(value: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield a function's code, or a class's functions and their code."""
    if isinstance(value, FunctionType):
        yield from ((value, name, getattr(value, name)) for name in CODE)
    elif isinstance(value, type):
        for name, member in list(vars(value).items()):
            if isinstance(member, FunctionType | property | classmethod | staticmethod):
                yield value, name, member
            if isinstance(member, FunctionType):
                yield from _inside(member)


def _get(owner: Any, name: str) -> Any:
    """Return what a name means; a class's own member unwrapped, as it is written."""
    inherited = getattr(owner, name, None)
    return vars(owner).get(name, inherited) if isinstance(owner, type) else inherited


def _called(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"

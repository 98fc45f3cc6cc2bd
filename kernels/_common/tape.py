"""The tape of a thread: what an operator launches and allocates, which front.py replays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any, NamedTuple

from torch import Tensor

from sparsebench.kernels._common.declarations import Arguments


@dataclass(eq=False)
class Tape:
    """What a thread launches and allocates while `taping` (front.py).

    launches  kernels with their arguments, and what torch itself computes, in order
    outputs   new tensors that the launches write, the results among them
    views     parts of outputs whose addresses the launches take, each with its output
    owners    of the other memory that the launches read
    complete  every kernel of the call is on the tape
    dense     the weight, if the call was torch's own product with it, and nothing else
    """

    launches: "list[tuple[Any, Arguments] | ByTorch | LibraryCall]" = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    views: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    complete: bool = True
    dense: Tensor | None = None


class TransposedCopy(NamedTuple):
    """A copy by torch: `result` [blocks, c, r] are the transposed `blocks` [blocks, r, c]."""

    blocks: Tensor
    result: Tensor


class MatrixProduct(NamedTuple):
    """A product by torch: `result` [m, k] is `a` [m, n] @ `b` [n, k].

    fixed  `b` is a weight: no new tensor, but the same one in every call
    alpha  8 bytes of a factor, if these are products of batches: `result` [.., m, k] is
           alpha times `a` [.., m, n] @ `b` [.., k, n] transposed
    """

    a: Tensor
    b: Tensor
    result: Tensor
    fixed: bool = False
    alpha: bytes = b""


ByTorch = TransposedCopy | MatrixProduct


class LibraryCall(NamedTuple):
    """The address of cublasLtMatmul, and its 16 arguments: 8 bytes each, the stream is zero."""

    function: int
    arguments: bytes


class _ThreadTape(local):
    tape: Tape | None = None


_thread = _ThreadTape()


def current_tape() -> Tape | None:
    """Return the tape of this thread, if it records."""
    return _thread.tape


@contextmanager
def taping() -> Iterator[Tape]:
    """Record the launches of this thread."""
    tape = _thread.tape = Tape()
    try:
        yield tape
    finally:
        _thread.tape = None


def on_tape(
    *outputs: Tensor,
    owners: Sequence[Any] = (),
    complete: bool = True,
    dense: Tensor | None = None,
    call: ByTorch | LibraryCall | None = None,
    view: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Put new tensors, owners of memory, or the lack of a launch on the tape, if there is one."""
    if (tape := _thread.tape) is None:
        return
    tape.dense = dense
    if call is not None:
        tape.launches.append(call)
    if view is not None:
        tape.views.append(view)
    tape.outputs += outputs
    tape.owners += owners
    tape.complete &= complete

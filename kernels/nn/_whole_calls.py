"""Calls that select blocks and attend to them, recorded whole: their steps are launches alone.

    first call    in Python, which plans attention and binds the other launches
    second call   in Python, on a tape: scores ──> blocks ──> lists ──> attention ──> sum
    later calls   the launches of this tape, without Python (front.py)

A recording is for one set of options, in one thread on one stream, because shared plans are, too
(_shared_plans.py). Calls that need a gradient take their steps in Python, as do calls that torch
traces or captures, and those with an option that is a tensor.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._common.front import Conditions, Recordings, Signature
from sparsebench.kernels._common.transforms import PLAIN, aligned, is_current, is_traced

MOST_CALLS = 64  # sets of options, in a thread on a stream; those used last
CONSTANTS = bool, int, float, str, type(None)  # types of options that a recording is for


def whole_call(compute: Callable[..., Tensor], /, *operands: Tensor, **options: Any) -> Tensor:
    """Return compute(*operands, **options), without Python if the call repeats an earlier one.

    compute  a function of a module that reads nothing else; all that it enqueues is on the tape, or
             it says that the tape is not complete
    """
    if torch.compiler.is_compiling() or not operands[0].is_cuda:
        return compute(*operands, **options)
    return replay_or_record(compute, operands, options)


def replay_or_record(
    compute: Callable[..., Tensor], operands: tuple[Tensor, ...], options: dict[str, Any]
) -> Tensor:
    """Return `whole_call` of operands whose device has streams."""
    plain = all(type(t) in PLAIN for t in operands)
    if not plain or not all(type(value) in CONSTANTS for value in options.values()):
        return compute(*operands, **options)
    device = operands[0].device
    place = get_ident(), device.index, torch._C._cuda_getCurrentRawStream(device.index)
    recordings = _recordings(*place, compute, len(operands), *options, *options.values())
    if (o := recordings.replay(*operands)) is not None:
        return o  # type: ignore[no-any-return]
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    if differentiates or is_traced() or not is_current(device):
        return compute(*operands, **options)
    inputs = [*map(aligned, operands)]  # as recordings read them, so this call binds their launches

    def on_tape(*inputs: Tensor) -> list[Tensor]:
        return [compute(*inputs, **options)]

    in_python = partial(compute, *inputs, **options)
    result: Tensor = recordings.call(inputs, Conditions([]), on_tape, in_python)
    return result


@lru_cache(MOST_CALLS, typed=True)  # 16.0 is no number of blocks, but equals 16
def _recordings(
    thread: int, device: int, stream: int, compute: object, count: int, *options: Any
) -> Recordings:
    return Recordings(Signature(tuple(map(str, range(count))), ("o",), exact=True))

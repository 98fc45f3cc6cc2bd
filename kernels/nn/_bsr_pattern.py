"""Keep the plans of a BSR index, and notice when other code writes into the index.

An index is two tensors, and other code, such as AveragedModel and DDP, writes into them. So a
pattern holds a copy of the index, and the stamp that both tensors had when they last equalled it:

    stamp  for offsets and columns: torch's count of the writes, the address, the length

If the stamp differs, a call compares the index with the copy, which waits for the device, and makes
new plans if they differ. torch does not count writes through `.data`, through NumPy, or by a
collective on the tensor itself. So one call in COMPARE_EVERY compares regardless of the stamp, and
raises if it detects such a write. Tensors made in inference mode have no count, so each call
compares them. A pattern is an attribute of the tensor `columns`, and is freed with it.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels.nn import _bsr_plans
from sparsebench.kernels.nn._bsr_plans import Call, Multiply

COMPARE_EVERY = 256  # calls: a comparison takes 40 µs and waits for all queued work
ATTRIBUTE = "_sparsebench_pattern"  # of the tensor `columns`


class Pattern:
    """A copy of an index, and the plans made for it.

    offsets, columns  the copies; plans read these, so that writes into the index cannot corrupt one
    stamp             None for an index made in inference mode
    """

    def __init__(self, offsets: Tensor, columns: Tensor, stamp: tuple[int, ...] | None) -> None:
        """Copy an index. Raises Unsupported if its tensors are on different devices."""
        devices = sorted({str(offsets.device), str(columns.device)})
        if len(devices) > 1:
            raise Unsupported(f"expected one device, found {', '.join(devices)}")
        with torch.inference_mode(False):
            self.offsets, self.columns = offsets.clone(), columns.clone()
        self.originals = offsets.detach(), columns.detach()  # keeps their addresses taken
        self.stamp, self.calls = stamp, 0
        self.plans: dict[Call, Multiply] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as an empty object of a type that torch.load accepts."""
        return OrderedDict, ()

    def plan(self, call: Call) -> Multiply:
        """Return the planned kernel of a call. The first call with these sizes makes the plan."""
        try:
            return self.plans[call]
        except KeyError:
            multiply = self.plans[call] = _bsr_plans.plan(call, self.offsets, self.columns)
            return multiply

    def equals(self, offsets: Tensor, columns: Tensor) -> bool:
        """Return whether an index equals the copy. Waits for the device."""
        pairs = (self.offsets, offsets), (self.columns, columns)
        same = all((a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape) for a, b in pairs)
        return same and all(torch.equal(a, b) for a, b in pairs)


def pattern_of(offsets: Tensor, columns: Tensor) -> Pattern:
    """Return the pattern of an index.

    Waits for the device at the first call, after a write, and once in COMPARE_EVERY calls. Raises
    Unsupported, and RuntimeError if torch did not count a write.
    """
    cached = getattr(columns, ATTRIBUTE, None)
    stamp = _stamp(offsets, columns)
    if type(cached) is Pattern and cached.stamp == stamp is not None:
        cached.calls += 1
        if cached.calls % COMPARE_EVERY:
            return cached
    return _compare(cached if type(cached) is Pattern else None, stamp, offsets, columns)


def _stamp(offsets: Tensor, columns: Tensor) -> tuple[int, ...] | None:
    try:
        counts = offsets._version, columns._version
    except RuntimeError:  # an inference tensor
        return None
    addresses = offsets.data_ptr(), columns.data_ptr()
    return *counts, *addresses, offsets.shape[0], columns.shape[0]  # len() takes ten times as long


def _compare(
    cached: Pattern | None, stamp: tuple[int, ...] | None, offsets: Tensor, columns: Tensor
) -> Pattern:
    """Return the cached pattern if the index still equals it, else a new one."""
    same_stamp = cached is not None and cached.stamp == stamp is not None
    if columns.is_cuda and torch.cuda.is_current_stream_capturing():  # a capture cannot compare
        return cached if cached and same_stamp else Pattern(offsets, columns, None)  # without plans
    if cached and cached.equals(offsets, columns):
        cached.stamp = stamp
        return cached
    if same_stamp:
        raise RuntimeError(
            f"the index of {len(columns)} blocks was written in a way that torch does not count "
            f"(.data, NumPy, a collective), so up to {COMPARE_EVERY} calls since then were wrong: "
            "load a state dict or call set_pattern instead"
        )
    pattern = Pattern(offsets, columns, stamp)
    setattr(columns, ATTRIBUTE, pattern)
    return pattern


def replan(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
    """Make every plan of the old index for the new one, so that no later call waits."""
    pattern = getattr(old[1], ATTRIBUTE, None)
    for call in [*pattern.plans] if type(pattern) is Pattern else ():
        pattern_of(*new).plan(call)

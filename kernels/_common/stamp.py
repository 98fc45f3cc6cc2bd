"""What is made of the arrays of a weight or a mask, until they are written or moved."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format

Stamp = tuple[tuple[int, int], ...]
"""torch's count of the writes to each array, and its address."""


def stamp_of(w: Format, caller: str) -> Stamp:
    """Return the stamp of a weight as it is now. Raises Unsupported for an inference tensor."""
    arrays = w.arrays().values()
    if any(array.is_inference() for array in arrays):
        expected = "expected a weight or mask made outside of torch.inference_mode"
        raise Unsupported(f"{caller}: {expected}, because torch does not count writes to this one")
    return tuple((array._version, array.data_ptr()) for array in arrays)


@dataclass(eq=False)
class StampedValue:
    """A value and the stamp of its arrays; no other tensor gets their addresses meanwhile."""

    stamp: Hashable
    arrays: list[Tensor]
    value: Any

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as an empty object of a type that torch.load accepts."""
        return OrderedDict, ()


def by_stamp(
    w: Format,
    caller: str,
    attribute: str,
    make: Callable[[], Any],
    holder: Tensor | None = None,
    more: Hashable = None,
) -> Any:
    """Return what `make` made of a weight as it is now. Raises Unsupported.

    attribute  of the weight, or of `holder`, that keeps it
    more       what it depends on beside the stamp
    """
    stamp, owner = (stamp_of(w, caller), more), w if holder is None else holder
    entry = owner.__dict__.get(attribute)
    if not isinstance(entry, StampedValue) or entry.stamp != stamp:
        entry = StampedValue(stamp, [array.detach() for array in w.arrays().values()], make())
        object.__setattr__(owner, attribute, entry)
    return entry.value

"""Notice that the arrays of a weight or a mask were written or moved since plans were made."""

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


def arrays_of(w: Format) -> list[Tensor]:
    """Return the arrays; while they are referenced, no other tensor gets their addresses."""
    return [array.detach() for array in w.arrays().values()]

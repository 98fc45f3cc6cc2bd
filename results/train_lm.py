"""What training with an L1 term came to: the JSON that `sparsebench train-lm --json` prints.

{"schema": "sparsebench/sparsity@1",
 "text": "Python 3.12.3's standard library", "sha256": "a5fd...", "bytes": 11034512,
 "held_out": 262144, "device": "NVIDIA H200", "settings": {"steps": 3000, ...},
 "trained": [{"l1": 2e-05, "loss": 0.91,
              "layers": [{"active": 29.1, "zeros": 0.986, "dead": 612, "most": 310,
                          "first": [201.4, 96.0, ...], "rest": 27.9}, ...],
              "seconds": 71.2}, ...]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

SCHEMA: Final = "sparsebench/sparsity@1"


@dataclass(frozen=True)
class LayerCount:
    """How many hidden units of a layer are on (active), counted over held-out text.

    active  mean per token                       zeros  share of units that are off, 0 to 1
    dead    units that are on for no token       most   the largest number for one token
    first   mean per token at each of the first places of a context
    rest    mean per token at all later places
    """

    active: float
    zeros: float
    dead: int
    most: int
    first: Sequence[float]
    rest: float


@dataclass(frozen=True)
class Trained:
    """One training: its L1 coefficient, and its loss in nats per byte of held-out text."""

    l1: float
    loss: float
    layers: Sequence[LayerCount]
    seconds: float

    def mean(self, name: str) -> float:
        """Return the mean over layers of a number of LayerCount, by its name."""
        return fmean(getattr(layer, name) for layer in self.layers)


@dataclass(frozen=True)
class Training:
    """All trainings of one text, one per L1 coefficient, as asked for.

    sha256    of the whole text: the bytes trained on, then the bytes held out
    bytes     how many were trained on
    held_out  how many the loss and the active units were counted over
    """

    schema: str
    text: str
    sha256: str
    bytes: int
    held_out: int
    device: str
    settings: Mapping[str, Any]
    trained: Sequence[Trained]

    def to_json(self) -> dict[str, Any]:
        """Return what is printed."""
        return asdict(self)

"""How few hidden units training left on: the JSON that `sparsebench train-lm --json` prints.

{"schema": "sparsebench/sparsity@1",
 "text": "Python 3.12.3's standard library", "sha256": "a5fd...", "bytes": 11034512,
 "device": "NVIDIA H200", "settings": {"steps": 3000, ...},
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
    """Units of a layer that are on, over held-out text.

    active  of a token, in the mean;  zeros  the share of the units that is off
    dead    on for no token;  most  the most of one token
    first   the mean of `active` at each of the first places of a context;  rest  at all after them
    """

    active: float
    zeros: float
    dead: int
    most: int
    first: Sequence[float]
    rest: float


@dataclass(frozen=True)
class Trained:
    """What one L1 coefficient came to: loss in nats a byte of held-out text, and its layers."""

    l1: float
    loss: float
    layers: Sequence[LayerCount]
    seconds: float

    def mean(self, name: str) -> float:
        """Return the mean over layers of a field that is a number."""
        return fmean(getattr(layer, name) for layer in self.layers)


@dataclass(frozen=True)
class Sparsity:
    """What was trained on what: a Trained a coefficient, in the order asked for.

    sha256    of the text, `bytes` to train on and then those held out
    held_out  bytes that loss and units were counted over
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

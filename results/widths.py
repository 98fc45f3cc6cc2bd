"""What training with block-sparse weights came to: the JSON of `sparsebench train-lm --pattern`.

    {"schema": "sparsebench/widths@1", "text": "Python 3.12.3's standard library", ...,
     "trained": [{"pattern": "small_world", "block": 32, "sparsity": 0.797, "width": 2048,
                  "parameters": 28311552, "seed": 0, "loss": 1.21, "step_us": 2900.0,
                  "peak_bytes": 1503238144, "seconds": 5.1}, ...]}

Every seed has the same models. A sparse one stands beside two that are dense: one of its width, and
one that is as narrow as it has to be for as many parameters, or a few more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

from sparsebench.results.files import validated

SCHEMA: Final = "sparsebench/widths@1"
DENSE = "dense"

Cost = Annotated[FiniteFloat, Field(gt=0)]


@dataclass(frozen=True)
class Width:
    """One training.

    pattern     of the layers' weights; "dense" has blocks of 1 and a sparsity of 0
    sparsity    part of the layers' weights that is not stored
    parameters  that are stored, in all of the model
    loss        nats a byte of held-out text
    step_us     median time of a step;  peak_bytes  most on the device (0: unknown)
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    pattern: str
    block: PositiveInt
    sparsity: Annotated[FiniteFloat, Field(ge=0, lt=1)]
    width: PositiveInt
    parameters: PositiveInt
    seed: NonNegativeInt
    loss: Cost
    step_us: Cost
    peak_bytes: NonNegativeInt
    seconds: Cost

    @property
    def model(self) -> tuple[str, int, float, int]:
        """Return what trainings of different seeds share."""
        return self.pattern, self.block, self.sparsity, self.width


@dataclass(frozen=True)
class Widths:
    """All trainings of one text.

    sha256    of the whole text: the bytes trained on, then the bytes held out
    bytes     how many were trained on;  held_out  how many the loss is of
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    schema: Literal["sparsebench/widths@1"]
    text: str
    sha256: str
    bytes: PositiveInt
    held_out: PositiveInt
    device: str
    settings: Mapping[str, Any]
    trained: Annotated[Sequence[Width], Field(min_length=1)]

    def to_json(self) -> dict[str, Any]:
        """Return the data that `read` reads."""
        return asdict(self)

    def beside(self, sparse: Width, equal: str) -> Width | None:
        """Return the dense training of the same seed and equal `width`, or equal `parameters`.

        Of the latter the one with the fewest that are not fewer: dense is never given less.
        """
        same = [one for one in self.trained if one.pattern == DENSE and one.seed == sparse.seed]
        if equal == "width":
            return next((one for one in same if one.width == sparse.width), None)
        enough = [one for one in same if one.parameters >= sparse.parameters]
        return min(enough, key=lambda one: one.parameters, default=None)


def read(path: Path) -> Widths:
    """Read a file of `train-lm --pattern`; ResultError says what is wrong with it."""
    return validated(path, Widths, SCHEMA)

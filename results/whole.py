"""What a whole model took: the JSON of `sparsebench whole`.

{"schema": "sparsebench/whole@1", "device": "NVIDIA H200", "dtype": "bf16",
 "model": {"layers": 38, "width": 2048, ...}, "active": 24.1, "active_by_layer": [24.0, ...],
 "ways": [{"what": "forward", "mlp": "cublas", "tokens": 131072, "times_us": [...],
           "peak_bytes": 9131072000, "energy_j": 412.0, "error": 0.004, "detail": ""}, ...]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

from sparsebench.results.files import validated

SCHEMA: Final = "sparsebench/whole@1"
FORWARD: Final = "forward"
STEP: Final = "step"

Cost = Annotated[FiniteFloat, Field(gt=0)]
NonNegativeCount = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class Way:
    """One way to compute the MLPs, in a forward pass or in a training step.

    mlp         the kernel, or the layer
    times_us    of each pass, in turn with those of the other ways (a step: one way after the other)
    peak_bytes  most on the device, weights included (0: unknown)
    energy_j    of a pass (None: not measured)
    error       of the logits to those of the plain model; of a step's loss likewise
    detail      why there are no times
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    what: Literal["forward", "step"]
    mlp: str
    tokens: PositiveInt
    times_us: Sequence[Cost] = ()
    peak_bytes: NonNegativeInt = 0
    energy_j: Cost | None = None
    error: FiniteFloat | None = None
    detail: str = ""

    @property
    def time_us(self) -> float:
        """Return the median time."""
        return median(self.times_us)


@dataclass(frozen=True)
class Whole:
    """A model with every way that was measured.

    active           units on for a token, mean over layers
    active_by_layer  of each layer; of files that have none `active` is of the last layer
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    schema: Literal["sparsebench/whole@1"]
    device: str
    dtype: str
    model: Mapping[str, Any]
    active: Cost
    ways: Annotated[Sequence[Way], Field(min_length=1)]
    active_by_layer: Sequence[NonNegativeCount] = ()

    @property
    def units_on(self) -> str:
        """Say how many units were on: 24.0 units on (23.6 to 24.4 by layer)."""
        if not self.active_by_layer:
            return f"{self.active:.1f} units on in the last layer"
        ends = min(self.active_by_layer), max(self.active_by_layer)
        return f"{self.active:.1f} units on ({ends[0]:.1f} to {ends[1]:.1f} by layer)"

    def to_json(self) -> dict[str, Any]:
        """Return the data that `read` reads."""
        return asdict(self)


def read(path: Path) -> Whole:
    """Read what `sparsebench whole` wrote; ResultError says what is wrong with it."""
    return validated(path, Whole, SCHEMA)

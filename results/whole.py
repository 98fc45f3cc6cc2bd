"""What a whole model took: the JSON of `sparsebench whole`.

{"schema": "sparsebench/whole@1", "device": "NVIDIA H200", "dtype": "bf16",
 "model": {"layers": 38, "width": 2048, ...}, "active": 24.1,
 "ways": [{"what": "forward", "mlp": "cublas_ffn", "tokens": 131072, "times_us": [...],
           "peak_bytes": 9131072000, "energy_j": 412.0, "error": 0.004, "detail": ""}, ...]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from sparsebench.errors import ResultError
from sparsebench.results.files import JSON_BYTES, content

SCHEMA: Final = "sparsebench/whole@1"
FORWARD: Final = "forward"
STEP: Final = "step"

Cost = Annotated[FiniteFloat, Field(gt=0)]


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
    """A model with every way that was measured; `active` units were on in its last layer."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    schema: Literal["sparsebench/whole@1"]
    device: str
    dtype: str
    model: Mapping[str, Any]
    active: Cost
    ways: Annotated[Sequence[Way], Field(min_length=1)]

    def to_json(self) -> dict[str, Any]:
        """Return the data that `read` reads."""
        return asdict(self)


def read(path: Path) -> Whole:
    """Read what `sparsebench whole` wrote; ResultError says what is wrong with it."""
    try:
        return TypeAdapter(Whole).validate_json(content(path, JSON_BYTES))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        wrong = f"{place}{first['msg']}; found {str(first['input'])[:60]!r}"
        raise ResultError(f"{path}: expected {SCHEMA}; {wrong}") from error

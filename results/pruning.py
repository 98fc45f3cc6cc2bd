"""What pruning cost a model or a layer: the JSON that `sparsebench prune --json` prints.

    {"schema": "sparsebench/pruning@1",
     "weights": "gemma.gguf", "sha256": "a5fd...", "tokens_from": "book.txt",
     "calibration": 4096, "held_out": 2048, "loss": 2.559,
     "outcomes": [{"method": "wanda", "region": "scored", "dense": 0.5, "sparsity": 0.25,
                   "errors": {"gate": 0.126, ..., "output": 0.124}, "loss": 2.698}, ...]}

A report draws it against the speed-ups of a run whose contenders leave the same fraction dense.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, FiniteFloat

from sparsebench.errors import ResultError
from sparsebench.results.files import validated

SCHEMA: Final = "sparsebench/pruning@1"
OUTPUT = "output"  # the error of what the layer or the MLP gives, beside those of its parts

Fraction = Annotated[float, Field(ge=0, le=1)]
Cost = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class Pruned:
    """What pruning by one method and region cost, on held-out tokens.

    dense     fraction of the features left dense
    sparsity  fraction of all weights that were pruned, 0 to 1
    errors    by part, means over layers: ||XW^T - XW'^T|| / ||XW^T||; OUTPUT is always one of them
    loss      of the pruned model, in nats per token; None for a layer
    pattern   of what is not dense: 2:4, or unstructured
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    method: str
    region: str
    dense: Fraction
    sparsity: Fraction
    errors: Mapping[str, Cost]
    loss: FiniteFloat | None
    pattern: str = "2:4"


@dataclass(frozen=True)
class Pruning:
    """What was pruned, with which tokens, and what each way to prune cost.

    weights      name of the file; of a layer, also the tensors
    sha256       of the file
    tokens_from  where the tokens came from
    calibration  how many tokens the pruning looked at
    held_out     how many other tokens errors and losses are of
    loss         of the dense model on the held-out tokens, in nats per token; None for a layer
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    schema: Literal["sparsebench/pruning@1"]
    weights: str
    sha256: str
    tokens_from: str
    calibration: int
    held_out: int
    loss: FiniteFloat | None
    outcomes: Annotated[Sequence[Pruned], Field(min_length=1)]

    def to_json(self) -> dict[str, Any]:
        """Return the data that `read` reads."""
        return asdict(self)


def read(path: Path) -> Pruning:
    """Read what `sparsebench prune --json` printed; ResultError says what is wrong with it."""
    found = validated(path, Pruning, SCHEMA)
    for number, outcome in enumerate(found.outcomes):
        if OUTPUT not in outcome.errors:
            names = ", ".join(outcome.errors) or "none"
            expected = f"an error of the {OUTPUT!r}; found {names}"
            raise ResultError(f"{path}: outcomes: {number}: expected {expected}")
    return found

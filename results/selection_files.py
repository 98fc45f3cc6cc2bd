"""The JSON file of experiments/selection_quality.py, and its reader.

    sparsebench/selection@1    loss and time of a model with attention to selected keys

Each class has the fields of its JSON object. The reader raises ResultError for any other file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, FiniteFloat, PositiveInt

from sparsebench.errors import ResultError
from sparsebench.results.files import read_model
from sparsebench.results.model_files import STRICT, Fraction, Positive

SELECTION_SCHEMA: Final = "sparsebench/selection@1"


@dataclass(frozen=True)
class Passes:
    """Tokens of a model's passes: as prompts, or decoded one by one.

    loss       nats per token
    agreement  share of the tokens at which the most likely next token is that of dense attention
    time_us    median time of a prompt or of a step; None on a CPU, where a reference runs
    """

    __pydantic_config__: ClassVar = STRICT

    loss: FiniteFloat
    agreement: Fraction
    time_us: Positive | None = None


@dataclass(frozen=True)
class SelectionOutcome:
    """A model whose queries attend to selected blocks of keys.

    share  of the blocks of keys that the queries of a prompt see
    keep   blocks of keys that a block of queries, and a step, attends to; None: dense attention
    """

    __pydantic_config__: ClassVar = STRICT

    share: Fraction
    keep: PositiveInt | None
    prompts: Passes
    steps: Passes


@dataclass(frozen=True)
class SelectionQuality:
    """A model with dense attention, the first outcome, and with fewer and fewer keys.

    context    tokens of a context
    prompts    tokens of prompts over which loss and agreement are means: those of the second half
    steps      tokens that were decoded, at the end of the contexts
    layers     number of layers, and `selecting` that of the layers without a window
    """

    __pydantic_config__: ClassVar = STRICT

    schema: Literal["sparsebench/selection@1"]
    weights: str
    sha256: str
    tokens_from: str
    device: str
    dtype: str
    context: PositiveInt
    prompts: PositiveInt
    steps: PositiveInt
    block: PositiveInt
    layers: PositiveInt
    selecting: PositiveInt
    unit: Literal["token", "byte"]
    outcomes: Annotated[Sequence[SelectionOutcome], Field(min_length=2)]


def read_selection(path: Path) -> SelectionQuality:
    """Read the output of selection_quality.py; raises ResultError if it is invalid."""
    quality = read_model(path, SelectionQuality, SELECTION_SCHEMA)
    for number, outcome in enumerate(quality.outcomes):
        if (outcome.keep is None) != (number == 0):
            expected = (
                "no keep in the first outcome, that of dense attention, and one in the others"
            )
            raise ResultError(
                f"{path}: outcomes.{number}.keep: expected {expected}; found {outcome.keep}"
            )
    if quality.selecting > quality.layers:
        expected = f"at most all layers, {quality.layers}"
        raise ResultError(f"{path}: selecting: expected {expected}; found {quality.selecting}")
    return quality

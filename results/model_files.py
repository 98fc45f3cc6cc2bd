"""The JSON files about models, and their readers.

    sparsebench/pruning@1    sparsebench prune        loss after pruning, also by recover_model.py
    sparsebench/sparsity@1   train_lm.py              active hidden units, by L1 coefficient
    sparsebench/widths@1     train_lm.py --pattern    block-sparse models beside dense ones
    sparsebench/whole@1      whole_model.py           time, memory and energy of a whole model

selection_files.py has that of selection_quality.py. The scripts are in the folder experiments.
Each class has the fields of its JSON object. The readers raise ResultError for any other file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

from sparsebench.errors import ResultError
from sparsebench.results.files import read_model

PRUNING_SCHEMA: Final = "sparsebench/pruning@1"
SPARSITY_SCHEMA: Final = "sparsebench/sparsity@1"
WIDTHS_SCHEMA: Final = "sparsebench/widths@1"
WHOLE_SCHEMA: Final = "sparsebench/whole@1"
OUTPUT = "output"  # key of the error of the whole layer's or MLP's output
DENSE = "dense"  # pattern of a dense training
LONGER = 1.15  # largest ratio of a dense step to a sparse step that count as equally long
FORWARD: Final = "forward"
STEP: Final = "step"

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
NonNegative = Annotated[FiniteFloat, Field(ge=0)]
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class RecoveryTraining:
    """A training of a pruned model in which its zeros stay zeros.

    loss       after it, in nats per token, on the held-out tokens
    low, high  95 % interval of its rise over the dense model's: Student's, over held-out contexts
    text       source of its `tokens`, some repeated; of so many `bytes`, without held-out ones
    """

    __pydantic_config__: ClassVar = STRICT

    loss: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    text: str
    bytes: PositiveInt
    tokens: PositiveInt
    seconds: Positive
    device: str


@dataclass(frozen=True)
class PruningOutcome:
    """The result of pruning by one method and region, on held-out tokens.

    dense     fraction of the features left dense
    sparsity  fraction of all weights that were pruned, 0 to 1
    errors    by part, mean over layers: ||XW^T - XW'^T|| / ||XW^T||; always includes OUTPUT
    loss      of the pruned model, in nats per token; None for a layer
    pattern   of the pruned features: N:M, unstructured, or the size of the blocks such as 64x64
    recovery  what a training left of the loss; None without one
    """

    __pydantic_config__: ClassVar = STRICT

    method: str
    region: str
    dense: Fraction
    sparsity: Fraction
    errors: Mapping[str, NonNegative]
    loss: FiniteFloat | None
    pattern: str = "2:4"
    recovery: RecoveryTraining | None = None


@dataclass(frozen=True)
class DenseWeights:
    """The weights of a model that stay dense for one reason.

    tensors  their number          weights  the number of their elements
    first    name of the first tensor
    """

    __pydantic_config__: ClassVar = STRICT

    tensors: int
    weights: int
    first: str


@dataclass(frozen=True)
class Pruning:
    """A model or layer pruned by several recipes.

    weights      name of the file; for a layer, also the tensors
    sha256       of the file
    tokens_from  source of the tokens
    calibration  number of tokens that pruning used
    held_out     number of other tokens, over which errors and losses were measured
    loss         of the dense model on the held-out tokens, in nats per token; None for a layer
    unit         what a token is: a word or a part of it, or a byte
    mlps         number of MLPs that were pruned; None for a layer, and in older files
    layers       number of layers of the model; None where `mlps` is
    left_dense   the weights outside of those MLPs by the reason why they stay dense; None where
                 `mlps` is, and in older files
    """

    __pydantic_config__: ClassVar = STRICT

    schema: Literal["sparsebench/pruning@1"]
    weights: str
    sha256: str
    tokens_from: str
    calibration: int
    held_out: int
    loss: FiniteFloat | None
    outcomes: Annotated[Sequence[PruningOutcome], Field(min_length=1)]
    unit: Literal["token", "byte"] = "token"
    mlps: PositiveInt | None = None
    layers: PositiveInt | None = None
    left_dense: Mapping[str, DenseWeights] | None = None


@dataclass(frozen=True)
class LayerCount:
    """The number of active hidden units of a layer, counted over held-out text.

    active  mean per token                       zeros  share of inactive units, 0 to 1
    dead    units that are active for no token   most   the largest number for one token
    first   mean per token at each of the first positions of a context
    rest    mean per token at all later positions
    """

    active: float
    zeros: float
    dead: int
    most: int
    first: Sequence[float]
    rest: float


@dataclass(frozen=True)
class L1Training:
    """One training: its L1 coefficient, and its loss in nats per byte of held-out text."""

    l1: float
    loss: float
    layers: Sequence[LayerCount]
    seconds: float

    def mean(self, name: str) -> float:
        """Return the mean over layers of one field of LayerCount."""
        return fmean(getattr(layer, name) for layer in self.layers)


@dataclass(frozen=True)
class L1Trainings:
    """All trainings on one text, one per L1 coefficient, in the order requested.

    sha256    of the whole text: the training bytes, then the held-out bytes
    bytes     number of training bytes
    held_out  number of held-out bytes, over which loss and active units were measured
    """

    schema: str
    text: str
    sha256: str
    bytes: int
    held_out: int
    device: str
    settings: Mapping[str, Any]
    trained: Sequence[L1Training]


@dataclass(frozen=True)
class PatternTraining:
    """One training with block-sparse or dense weights.

    pattern     of the layers' weights; "dense" has blocks of 1 and a sparsity of 0
    sparsity    fraction of the layers' weights that is not stored
    parameters  number of stored parameters in the whole model
    loss        nats per byte of held-out text
    step_us     median time of a step
    peak_bytes  peak device memory; 0 if unknown
    """

    __pydantic_config__: ClassVar = STRICT

    pattern: str
    block: PositiveInt
    sparsity: Annotated[FiniteFloat, Field(ge=0, lt=1)]
    width: PositiveInt
    parameters: PositiveInt
    seed: NonNegativeInt
    loss: Positive
    step_us: Positive
    peak_bytes: NonNegativeInt
    seconds: Positive

    @property
    def model(self) -> tuple[str, int, float, int]:
        """Return what trainings with different seeds share."""
        return self.pattern, self.block, self.sparsity, self.width


@dataclass(frozen=True)
class PatternTrainings:
    """All trainings on one text; every seed has the same models.

    Each sparse model has two dense ones: one of equal width, and the narrowest one that has at
    least as many parameters. One of the dense models may also take as long for a step.

    sha256    of the whole text: the training bytes, then the held-out bytes
    bytes     number of training bytes
    held_out  number of bytes over which the loss was measured
    """

    __pydantic_config__: ClassVar = STRICT

    schema: Literal["sparsebench/widths@1"]
    text: str
    sha256: str
    bytes: PositiveInt
    held_out: PositiveInt
    device: str
    settings: Mapping[str, Any]
    trained: Annotated[Sequence[PatternTraining], Field(min_length=1)]

    @property
    def data(self) -> str:
        """Return what was learned: `text`, the standard library, or `samples` from a file."""
        return "text" if self.text.endswith("standard library") else "samples"

    def dense_match(self, sparse: PatternTraining, equal: str) -> PatternTraining | None:
        """Return the dense training of the same seed and equal `width`, `parameters` or `time`.

        No dense model has exactly as many parameters, or takes exactly as long; this returns the
        smallest one that has at least as many, or takes at least as long (but not LONGER), so that
        dense is never at a disadvantage. Times are medians over the seeds.
        """
        dense = [one for one in self.trained if one.pattern == DENSE and one.seed == sparse.seed]
        if equal == "width":
            return next((one for one in dense if one.width == sparse.width), None)
        if equal == "time":
            ratios = [(self._step_us(one) / self._step_us(sparse), one) for one in dense]
            near = [(ratio, one) for ratio, one in ratios if 1 <= ratio <= LONGER]
            return min(near, key=lambda pair: pair[0], default=(0.0, None))[1]
        enough = [one for one in dense if one.parameters >= sparse.parameters]
        return min(enough, key=lambda one: one.parameters, default=None)

    def _step_us(self, training: PatternTraining) -> float:
        return median(one.step_us for one in self.trained if one.model == training.model)


@dataclass(frozen=True)
class MlpTiming:
    """A forward pass or training step with one implementation of the MLPs.

    mlp         the kernel, or the layer
    times_us    of each pass; forward passes alternate between implementations, steps do not
    peak_bytes  peak device memory, weights included; 0 if unknown
    energy_j    per pass; None if not measured
    error       of the logits against the plain model; for a step, of the loss
    detail      why there are no times
    """

    __pydantic_config__: ClassVar = STRICT

    what: Literal["forward", "step"]
    mlp: str
    tokens: PositiveInt
    times_us: Sequence[Positive] = ()
    peak_bytes: NonNegativeInt = 0
    energy_j: Positive | None = None
    error: FiniteFloat | None = None
    detail: str = ""

    @property
    def time_us(self) -> float:
        """Return the median time of a pass; 0 if there is none."""
        return median(self.times_us or [0.0])

    def quantity(self, column: str) -> float:
        """Return time_us, peak_bytes or energy_j; 0 if it was not measured."""
        return float(getattr(self, column) or 0.0) if self.times_us else 0.0


@dataclass(frozen=True)
class ModelTimings:
    """A model, timed with several implementations of its MLPs.

    active           active units per token, mean over layers
    active_by_layer  the same for each layer; in files without it, `active` is the last layer's
    """

    __pydantic_config__: ClassVar = STRICT

    schema: Literal["sparsebench/whole@1"]
    device: str
    dtype: str
    model: Mapping[str, Any]
    active: Positive
    ways: Annotated[Sequence[MlpTiming], Field(min_length=1)]
    active_by_layer: Sequence[NonNegative] = ()


def read_pruning(path: Path) -> Pruning:
    """Read the output of `sparsebench prune --json`; raises ResultError if it is invalid."""
    pruning = read_model(path, Pruning, PRUNING_SCHEMA)
    for number, outcome in enumerate(pruning.outcomes):
        if OUTPUT not in outcome.errors:
            names = ", ".join(outcome.errors) or "none"
            expected = f"an error of the {OUTPUT!r}; found {names}"
            raise ResultError(f"{path}: outcomes.{number}: expected {expected}")
        if (outcome.loss is None) != (pruning.loss is None):
            expected = "a loss before and after pruning, or neither"
            raise ResultError(f"{path}: outcomes.{number}: expected {expected}; found one of them")
        if after := outcome.recovery:
            rise = nan if pruning.loss is None else after.loss - pruning.loss
            if not after.low <= rise <= after.high:
                expected = f"a rise of the loss from {after.low:g} to {after.high:g}"
                raise ResultError(
                    f"{path}: outcomes.{number}.recovery: expected {expected}; found {rise:g}"
                )
    return pruning


def read_widths(path: Path) -> PatternTrainings:
    """Read the output of train_lm.py --pattern; raises ResultError if it is invalid."""
    return read_model(path, PatternTrainings, WIDTHS_SCHEMA)


def read_whole(path: Path) -> ModelTimings:
    """Read the output of whole_model.py; raises ResultError if it is invalid."""
    return read_model(path, ModelTimings, WHOLE_SCHEMA)

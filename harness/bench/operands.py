"""The operands of a problem: weights drawn or read, pruned to the pattern, and activations.

    source         pattern           weight
    none           any but file      numbers from the seed, kept where a hash is highest
    pattern file   file              numbers from the seed, kept where the file has an entry
    safetensors    any but file      the file's, cast to the dtype, kept where largest in magnitude

An op with `recorded` (_op.py) takes all its operands from the file: the tensors `group.wg`, ...,
`group.x`. X [tokens, k] is a recording. A draw is m consecutive rows of it; row 0 follows the last
row, and each draw starts at another row than the draw before it.

A dense contender may multiply the weights as they were before pruning: those of the same problem
with the pattern `dense` (`unpruned`), which have the same numbers where the pattern keeps them.

Weights have a standard deviation of about 1 / sqrt(k), activations and outputs of about 1. In 8
bits, drawn weights are a power of two larger, about 1, and int8 and an op of several products scale
their sums by it. Unscaled, a ninth of the weights would become zero in e4m3, whose smallest number
is 2^-9, at k = 25600.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from sparsebench.errors import SuiteError, Unsupported
from sparsebench.formats._format import BITS, is_stored
from sparsebench.harness.inputs import sources
from sparsebench.harness.inputs.bits import UNIT, digest, fill, scores
from sparsebench.harness.inputs.grid import Score, ValueGrid, magnitudes
from sparsebench.harness.ops._op import Op
from sparsebench.harness.patterns._mask import level, mask
from sparsebench.kernels._kernel import DTYPES, unit_scale
from sparsebench.results.record import Contender, Problem, Source

GOLDEN = (5**0.5 - 1) / 2  # part of the tokens between two draws (Knuth, 6.4)
SEEDS_APART = 2**31  # difference between layers; above any seed of a suite (plan/limits.py)
NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class DenseOperands:
    """A problem's operands, dense, before any format sees them.

    originals   the weights before pruning, if a contender multiplies them; else empty
    recordings  activations of a file, from which each draw takes its rows; empty without a source
    nnz         elements of each weight that are not zero (-0.0 is zero), or what the op counts
    sparsity    fraction of zeros in all weights
    digest      of weights and first activations that are drawn; the same on every machine
    """

    weights: dict[str, Tensor]
    activations: dict[str, Tensor]
    recordings: dict[str, Tensor]
    nnz: dict[str, int]
    sparsity: float
    digest: str
    originals: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ChainLayer:
    """A layer of a chain: a problem and its operands; `name` is "" for the contest's problem."""

    problem: Problem
    dense: DenseOperands
    name: str = ""

    def with_weights_of(self, contender: Contender) -> Self:
        """Return the layer as a contender multiplies it: with its unpruned weights, or itself."""
        if not contender.is_unpruned:
            return self
        return replace(self, dense=replace(self.dense, weights={**self.dense.originals}))

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Name every operand and every recording of the layer."""
        of = self.dense
        kinds = {
            "operand": {**of.weights, **of.activations},
            "unpruned operand": of.originals,
            "recording": of.recordings,
        }
        return {
            f"the {kind} {name}{self.name}": tensor
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        }


@dataclass(frozen=True)
class Draws:
    """The activations of a call, of one layer or of several, and copies of draws by name."""

    activations: Mapping[str, Tensor]
    copies: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def keep(self, name: str) -> None:
        self.copies[name] = {name: x.detach().clone() for name, x in self.activations.items()}

    def write(self, name: str) -> None:
        """Overwrite the activations without changing torch's version counters."""
        for operand, values in self.copies[name].items():
            self.activations[operand].data.copy_(values)


class Layers:
    """The operands of a contest: its problem, and the further layers of a chain, if one is timed.

    A layer differs from the problem only in its seed. `first` has the activations of the problem,
    `chain` those of all layers.
    """

    def __init__(
        self,
        problem: Problem,
        op: Op,
        device: torch.device,
        data: Path | None,
        count: int = 1,
        originals: bool = False,
    ) -> None:
        """Build the operands of `count` layers on the device. Raises as `operands` does."""
        problems = [replace(problem, seed=problem.seed + SEEDS_APART * n) for n in range(count)]
        self.op, self._draw = op, 0
        self.each = [
            ChainLayer(p, operands(p, op, device, data, originals), of_layer(number))
            for number, p in enumerate(problems)
        ]
        self.first = Draws(self.each[0].dense.activations)
        self.chain = Draws(
            {
                f"{n}{layer.name}": x
                for layer in self.each
                for n, x in layer.dense.activations.items()
            }
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Return what a row says about the operands of the contest's problem."""
        problem, dense = self.each[0].problem, self.each[0].dense
        itemsize = DTYPES[problem["dtype"]].itemsize
        return {
            **self.op.work(problem, dense.nnz),
            "sparsity": dense.sparsity,
            "digest": dense.digest,
            "values": self.op.distributions(problem),
            "dense_bytes": itemsize * sum(w.numel() for w in dense.weights.values()),
        }

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output of a layer."""
        return self.op.output_bytes(self.each[0].problem, self.each[0].dense.nnz)

    @property
    def activations(self) -> set[str]:
        """Return the names of the arrays that `redraw` writes."""
        return {f"the operand {name}" for name in self.chain.activations}

    def redraw(self) -> int:
        """Draw new activations, from a seed that was never used, and return it."""
        recordings = [of for layer in self.each for of in layer.dense.recordings.values()]
        self._draw = other_draw(self._draw, recordings)
        for layer in self.each:
            fresh = layer.dense.activations, self._draw, layer.dense.recordings, layer.dense.weights
            redraw(layer.problem, self.op, *fresh)
        return self._draw

    def keep(self, name: str) -> None:
        """Copy the present activations of all layers (spot_checks.py)."""
        self.first.keep(name)
        if len(self.each) > 1:
            self.chain.keep(name)

    def forget(self) -> None:
        """Release the copies, which take twice the memory of the activations."""
        self.first.copies.clear()
        self.chain.copies.clear()


def of_layer(number: int) -> str:
    """Name a further layer of a chain; the first is the problem itself."""
    return f" of layer {number}" if number else ""


def operands(
    problem: Problem, op: Op, device: torch.device, data: Path | None, originals: bool = False
) -> DenseOperands:
    """Build the operands on the device, with sources below `data`, and the `originals` if wanted.

    Raises SuiteError, or Unsupported if a file's values do not fit the dtype or are all zero.
    """
    weights = _weights(problem, op, device, data)
    if problem.source:
        _require_values(problem, weights)
    activations = {
        name: torch.empty(_shape(problem, op, name), dtype=_dtype(problem, op, name), device=device)
        for name in op.activations
    }
    recordings = {}
    if op.recorded and problem.source:
        recordings = {name: _recording(problem, op, name, device, data) for name in op.activations}
    redraw(problem, op, activations, 0, recordings, weights)
    nnz, full = op.nonzeros(problem, weights), op.elements(problem)
    size = sum(full[name] for name in op.weights)
    sparsity = (size - sum(nnz[name] for name in op.weights)) / size
    inputs = {name: x for name, x in activations.items() if name not in op.derived}
    all_bits = digest({**weights, **inputs})
    before = _weights(unpruned(problem), op, device, data) if originals else NONE
    return DenseOperands(weights, activations, recordings, nnz, sparsity, all_bits, before)


def unpruned(problem: Problem) -> Problem:
    """Return the problem whose weights are those of this one before pruning."""
    of_file = problem.source if problem.source and problem.source.tensor else None
    fields = {**problem.fields, "pattern": "dense", "sparsity": 0.0, "block": 1}
    return replace(problem, fields=fields, source=of_file)


def _weights(
    problem: Problem, op: Op, device: torch.device, data: Path | None
) -> dict[str, Tensor]:
    weights = {name: _weight(problem, op, name, device, data) for name in op.weights}
    for name, weight in weights.items():
        op.adjust(problem, name, weight, 0)
    return weights


def without_mask(op: Op, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that contenders of format dense receive: a mask is all ones."""
    ones = {op.mask: torch.ones_like(weights[op.mask])} if op.mask else {}
    return {**weights, **ones}


def _require_values(problem: Problem, weights: Mapping[str, Tensor]) -> None:
    assert problem.source
    for name, weight in weights.items():
        if not bool(is_stored(weight).any()):
            of = f"{problem.source.label}, weight {name}"
            expected = f"expected a value that is not zero in {problem['dtype']}"
            raise Unsupported(f"{of}: {expected}, found none")


def redraw(
    problem: Problem,
    op: Op,
    activations: Mapping[str, Tensor],
    draw: int,
    recordings: Mapping[str, Tensor] = NONE,
    weights: Mapping[str, Tensor] = NONE,
) -> None:
    """Overwrite the activations in place with draw number `draw`; `operands` gave number 0.

    `weights` are the problem's dense weights, for an op that adjusts activations to them.
    """
    for name in op.activations:
        if op.recorded and problem.source:
            play(recordings[name], activations[name], draw)
        else:
            fill(activations[name], problem.seed, name, draw)
            op.adjust(problem, name, activations[name], draw)
    op.derive(problem, weights, activations)


def other_draw(last: int, recordings: Sequence[Tensor]) -> int:
    """Return a random draw number, one that plays other rows of the recordings than the last."""
    while True:
        draw = int.from_bytes(os.urandom(4), "little") >> 1
        if all(_place(draw, len(of)) != _place(last, len(of)) for of in recordings):
            return draw


def level_of(op: Op, fields: Mapping[str, Any], weight: str) -> float:
    """Return the fraction of a weight's cells that the pattern prunes. Raises SuiteError."""
    return level(op.sizes(fields), op.operands[weight].shape) if op.prunes(fields, weight) else 0.0


def _weight(problem: Problem, op: Op, name: str, device: torch.device, data: Path | None) -> Tensor:
    """Return a weight in which every pruned element is +0.0."""
    source = problem.source
    sources.agree(problem["pattern"], source)
    if source is None:
        hashed: Score = lambda grid: scores(problem.seed, name, grid.cells, device)  # noqa: E731
        return _prune(problem, op, name, _draw_weight(problem, op, name, device), hashed)
    path = _verify(source, data)
    if source.tensor is None:
        keep = _fitting(problem, op, name, path, sources.load_pattern(path)).to(device)
        return _mask_bits(_draw_weight(problem, op, name, device), keep)
    if (dtype := _dtype(problem, op, name)).itemsize == 1:
        expected = "expected a dtype of 16 or 32 bits for weights from a file"
        present = f"found {problem['dtype']}, which needs scaled weights"
        raise SuiteError(f"{path}: {expected}, {present}")
    tensor = sources.member(source, name) if op.recorded else source.tensor
    stored = _fitting(problem, op, name, path, sources.load_weights(path, tensor))
    weight = stored.to(device, dtype, copy=True)
    weight = _finite(problem, f"{source.path}:{tensor}", weight, stored)
    return _prune(problem, op, name, weight, partial(magnitudes, weight))


def _recording(
    problem: Problem, op: Op, name: str, device: torch.device, data: Path | None
) -> Tensor:
    """Return a file's activations [tokens, k]: at least two tokens, and as many as the problem has.

    With one token all draws would be equal, and a call that does nothing would not be detected.
    """
    assert problem.source
    path = _verify(problem.source, data)
    stored = sources.load_weights(path, sources.member(problem.source, name))
    tokens, (m, k) = len(stored), _shape(problem, op, name)
    if tokens < max(m, 2) or stored.shape[1] != k:
        expected = f"at least {max(m, 2)} tokens of {k} features"
        raise SuiteError(f"{path}: expected {expected}, found {list(stored.shape)}")
    where = f"{problem.source.path}:{sources.member(problem.source, name)}"
    return _finite(problem, where, stored.to(device, _dtype(problem, op, name)), stored)


def play(recording: Tensor, x: Tensor, draw: int) -> None:
    """Overwrite X [m, k] with m consecutive rows from the draw's place, cyclically."""
    tokens = len(recording)
    start = _place(draw, tokens)
    rows = torch.arange(start, start + len(x), device=x.device) % tokens
    torch.index_select(recording, 0, rows, out=x)


def _place(draw: int, tokens: int) -> int:
    return int((draw + 1) * GOLDEN * tokens) % tokens


def _finite(problem: Problem, where: str, values: Tensor, stored: Tensor) -> Tensor:
    """Return the values; raise Unsupported if one of those stored does not fit the dtype."""
    bad = int((~values.isfinite()).sum())
    if not bad:
        return values
    largest = float(stored.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
    most = torch.finfo(values.dtype).max
    expected = f"expected values finite in {problem['dtype']}, up to {most:.4g}"
    raise Unsupported(f"{where}: {expected}; found {bad} others; the largest is {largest:.4g}")


def _draw_weight(problem: Problem, op: Op, name: str, device: torch.device) -> Tensor:
    shape = _shape(problem, op, name)
    weight = torch.ones(shape, dtype=_dtype(problem, op, name), device=device)
    if name == op.mask:
        return weight
    scale = 1.0 if weight.itemsize == 1 else unit_scale(shape[1])
    fill(weight, problem.seed, name, scale=UNIT * scale)
    return weight


def _prune(problem: Problem, op: Op, name: str, weight: Tensor, score: Score) -> Tensor:
    def first_column_first(grid: ValueGrid) -> Tensor:
        scored = score(grid).long()  # the maximum of 31 bits plus one must fit
        scored.view(grid.rows, grid.columns)[:, 0] = scored.max() + 1
        return scored

    if level_of(op, problem.fields, name) == 0:
        return weight
    ranked = first_column_first if op.keeps_first(problem, name) else score
    shape = op.operands[name].shape
    return _mask_bits(weight, mask(op.sizes(problem.fields), shape, ranked, weight.device))


def _mask_bits(weight: Tensor, keep: Tensor) -> Tensor:
    """Set all other elements to +0.0, by their bits, because torch cannot fill fp8."""
    weight.view(BITS[weight.element_size()]).masked_fill_(~keep, 0)
    return weight


def _verify(source: Source, data: Path | None) -> Path:
    path = sources.locate(source, data)
    if (present := sources.sha256(path)) != source.sha256:
        expected = f"expected SHA-256 {source.sha256}"
        raise SuiteError(f"{path}: {expected}, found {present}: it has changed")
    return path


def _fitting(problem: Problem, op: Op, name: str, path: Path, tensor: Tensor) -> Tensor:
    expected = _shape(problem, op, name)
    if tuple(tensor.shape) != expected:
        raise SuiteError(f"{path}: expected {list(expected)}, found {list(tensor.shape)}")
    return tensor


def _shape(problem: Problem, op: Op, name: str) -> tuple[int, int]:
    rows, columns = op.operands[name].shape
    sizes = op.sizes(problem.fields)
    return sizes[rows], sizes[columns]


def _dtype(problem: Problem, op: Op, name: str) -> torch.dtype:
    return op.operands[name].dtypes[problem["dtype"]]

"""Make layers of a model sparse, in place and without data: sparsify_(model, recipe, filter_fn).

    recipe              takes                       puts in their place
    BlockSparse         nn.Linear                   BlockSparseLinear: the blocks of largest norm
    TwoFour             gated MLPs, else nn.Linear  SpenseGatedMLP, SpenseLinear: of every 4 weights
                                                    the 2 largest, beside a dense region
    Unstructured        nn.Linear                   BitmapLinear: the largest weights of each row
    SparseActivations   gated MLPs, relu or relu2   SparseGatedMLP: all weights

All layers are checked before the first one changes. Then one after the other is replaced, and its
dense weights are freed. `sparsebench prune` chooses 2:4 weights by data; this does by size alone.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sparsebench.errors import FormatError
from sparsebench.formats._format import require
from sparsebench.formats.spense import sparse_shape_of
from sparsebench.harness.models.pruning import checkpoint
from sparsebench.harness.models.pruning.gated import (
    Gated,
    named,
    require_gated,
    require_plain,
    require_steps,
)
from sparsebench.harness.models.pruning.pattern import Pattern, keep
from sparsebench.harness.models.pruning.region import dense_count
from sparsebench.kernels.nn import (
    BitmapLinear,
    BlockSparseLinear,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)

Filter = Callable[[nn.Module, str], bool]
M = TypeVar("M", bound=nn.Module)


class Recipe(Protocol):
    """Which kinds of layers are made sparse, and how."""

    def takes(self, module: nn.Module) -> bool:
        """Return whether a module is of a kind that this recipe replaces."""

    def check(self, module: nn.Module) -> None:
        """Raise SparsebenchError where `make` could not replace this module. Changes nothing."""

    def make(self, module: nn.Module) -> nn.Module:
        """Return the layer to put in the module's place."""


@dataclass(frozen=True)
class BlockSparse:
    """Keep the blocks of largest Euclidean norm of every nn.Linear.

    block     rows and columns of a block, or one number for both
    sparsity  fraction of blocks to drop, 0 to 1
    """

    block: int | tuple[int, int] = 64
    sparsity: float = 0.9

    def takes(self, module: nn.Module) -> bool:
        """Return whether this is an nn.Linear."""
        return isinstance(module, nn.Linear)

    def check(self, module: nn.Module) -> None:
        """Raise FormatError where no block would be left."""
        assert isinstance(module, nn.Linear)
        require_plain(module)
        r, c = (self.block, self.block) if isinstance(self.block, int) else self.block
        require(r > 0 and c > 0, f"block: expected at least 1x1, found {r}x{c}")
        require(0 <= self.sparsity <= 1, f"sparsity: expected 0 to 1, found {self.sparsity:g}")
        n, k = module.weight.shape
        blocks = -(-n // r) * -(-k // c)
        found = f"found a weight {n}x{k} of {blocks} blocks of {r}x{c}"
        left = round((1 - self.sparsity) * blocks) > 0
        require(left, f"expected a block to be left at sparsity {self.sparsity:g}, {found}")

    def make(self, module: nn.Module) -> nn.Module:
        """Return a BlockSparseLinear."""
        assert isinstance(module, nn.Linear)
        layer = BlockSparseLinear.from_dense(module, self.block, self.sparsity)
        layer.values.requires_grad_(module.weight.requires_grad)
        return layer


@dataclass(frozen=True)
class TwoFour:
    """Keep the 2 largest of every 4 weights along k, in fp16 or bf16. The new layers are frozen.

    dense  fraction that is left dense: the last hidden units of a gated MLP, the last rows of an
           nn.Linear, in whole tiles of 128. 0 is plain 2:4
    """

    dense: float = 0.0

    def takes(self, module: nn.Module) -> bool:
        """Return whether this is a gated MLP or an nn.Linear."""
        return Gated.of(module) is not None or isinstance(module, nn.Linear)

    def check(self, module: nn.Module) -> None:
        """Raise SparsebenchError for sizes, a dtype or an activation that Spense does not have."""
        require(0 <= self.dense < 1, f"dense: expected 0 to below 1, found {self.dense:g}")
        if isinstance(module, nn.Linear):
            require_plain(module)
            require_steps(module)
            n, k = module.weight.shape
            layer = SpenseLinear(k, n, dense_fraction=self.dense, **_on_meta(module))
        else:
            parts, activation = require_gated(module, ("silu", "gelu_tanh", "relu"))
            h, k = parts.gate.weight.shape
            options = _on_meta(parts.gate) | {"activation": activation}
            layer = SpenseGatedMLP(k, h, dense=dense_count(h, self.dense), **options).gate_up
        expected = "expected a tile of 128 rows or units to be sparse"
        require(layer.sparse_shape[0] > 0, f"{expected}, found none at dense {self.dense:g}")

    def make(self, module: nn.Module) -> nn.Module:
        """Return a SpenseLinear, or a SpenseGatedMLP."""
        if isinstance(module, nn.Linear):
            w = module.weight.detach()
            n, k = w.shape
            rows, _ = sparse_shape_of(n, k, w.itemsize, self.dense, "rows")
            bias = None if module.bias is None else module.bias.detach()
            return SpenseLinear.from_dense(_above(w, rows), dense_fraction=self.dense, bias=bias)
        parts, activation = require_gated(module, ("silu", "gelu_tanh", "relu"))
        gate, up, down = parts.weights
        dense = dense_count(len(gate), self.dense)
        sparse = len(gate) - dense
        pruned = _above(gate, sparse), _above(up, sparse), keep(down, down.abs(), sparse)
        return SpenseGatedMLP.from_dense(*pruned, dense=dense, activation=activation)


@dataclass(frozen=True)
class Unstructured:
    """Keep the largest weights of each row of every nn.Linear. The new layers are frozen.

    sparsity  fraction of weights to drop, above 0 and below 1
    """

    sparsity: float = 0.5

    def takes(self, module: nn.Module) -> bool:
        """Return whether this is an nn.Linear."""
        return isinstance(module, nn.Linear)

    def check(self, module: nn.Module) -> None:
        """Raise FormatError for a dtype that matmul does not have, or another sparsity."""
        assert isinstance(module, nn.Linear)
        require_plain(module)
        between = 0 < self.sparsity < 1
        require(between, f"sparsity: expected above 0 and below 1, found {self.sparsity:g}")
        n, k = module.weight.shape
        BitmapLinear(k, n, stored=0, **_on_meta(module))

    def make(self, module: nn.Module) -> nn.Module:
        """Return a BitmapLinear."""
        assert isinstance(module, nn.Linear)
        w = module.weight.detach()
        pruned = keep(w, w.abs(), w.shape[1], Pattern("unstructured", self.sparsity, 0))
        return BitmapLinear.from_dense(pruned, module.bias)


@dataclass(frozen=True)
class SparseActivations:
    """Compute and store only the hidden units that are on, of gated MLPs with relu or relu2.

    slots  for active units, of a token on average; None for a 64th of all units
    """

    slots: int | None = None

    def takes(self, module: nn.Module) -> bool:
        """Return whether this is a gated MLP."""
        return Gated.of(module) is not None

    def check(self, module: nn.Module) -> None:
        """Raise SparsebenchError for another activation, or for slots that do not fit."""
        parts, activation = require_gated(module, ("relu", "relu2"))
        h, k = parts.gate.weight.shape
        options = _on_meta(parts.gate) | {"activation": activation}
        SparseGatedMLP(k, h, slots=self.slots, **options)

    def make(self, module: nn.Module) -> nn.Module:
        """Return a SparseGatedMLP."""
        parts, activation = require_gated(module, ("relu", "relu2"))
        mlp = SparseGatedMLP.from_dense(*parts.weights, activation=activation, slots=self.slots)
        for new, old in zip(mlp.parameters(), parts.layers.values(), strict=True):
            new.requires_grad_(old.weight.requires_grad)
        return mlp


def sparsify_(model: M, recipe: Recipe, filter_fn: Filter | None = None) -> M:
    """Replace layers of a model by sparse ones, in place; return the model.

    recipe     BlockSparse, TwoFour, Unstructured or SparseActivations
    filter_fn  of a module and its name: whether to replace it. It is asked about modules of the
               kinds that the recipe takes, from the outermost on, and not about what is inside of a
               replaced one. By default all are replaced, but for a Hugging Face model's head

    `save_pretrained` of a Hugging Face model then writes the sparse layers (checkpoint.py).
    Raises FormatError, which names the first layer that no format fits, before anything is changed.
    """
    known = "BlockSparse(...), TwoFour(...), Unstructured(...) or SparseActivations(...)"
    fits = all(callable(getattr(recipe, name, None)) for name in ("takes", "check", "make"))
    require(fits and not isinstance(recipe, type), f"recipe: expected {known}; found {recipe!r}")
    chosen = _chosen(model, recipe, filter_fn)
    for name in chosen:
        module = model.get_submodule(name)
        named(name, _require_own, model, module)
        named(name, recipe.check, module)
    record = checkpoint.recorder(model)
    for name in chosen:
        module = model.get_submodule(name)
        with torch.no_grad():
            layer = named(name, recipe.make, module)
        model.set_submodule(name, layer.train(module.training))
        del module  # its weights are freed before the next ones are packed
    record()
    return model


def _chosen(model: nn.Module, recipe: Recipe, filter_fn: Filter | None) -> list[str]:
    """Return the names of the modules to replace. Raises FormatError where there are none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    wanted = filter_fn or (lambda module, _: module is not head)
    chosen: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        if recipe.takes(module) and wanted(module, name):
            chosen.append(name)
        else:
            for part, child in module.named_children():
                visit(child, f"{name}.{part}" if name else part)

    visit(model, "")
    kind, found = type(recipe).__name__, type(model).__name__
    if "" in chosen:
        raise FormatError(f"expected a model with layers in it, found a layer alone: {found}")
    require(bool(chosen), f"expected a layer for {kind} in {found}, found none that is chosen")
    return chosen


def _require_own(model: nn.Module, module: nn.Module) -> None:
    """Raise FormatError if the module or a weight of it is also somewhere else in the model."""
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    require(places[id(module)] == 1, "expected a layer in one place of the model, found it in more")
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tied = ", ".join(name for name, p in module.named_parameters() if users[id(p)] > 1)
    require(not tied, f"expected weights of its own, found {tied} shared with another layer")


def _above(weight: Tensor, rows: int) -> Tensor:
    """Return a weight [n, k] with its first rows 2:4, the rest as it is."""
    top, rest = weight[:rows], weight[rows:]
    return torch.cat((keep(top, top.abs(), weight.shape[1]), rest))


def _on_meta(layer: nn.Linear) -> dict[str, Any]:
    return {"device": "meta", "dtype": layer.weight.dtype}

"""Make layers of a model sparse in place, without data: sparsify_(model, recipe, filter_fn).

    recipe              takes                       replacement
    BlockSparse         nn.Linear                   BlockSparseLinear: the blocks of largest norm
    TwoFour             gated MLPs, else nn.Linear  SpenseGatedMLP, SpenseLinear: the 2 largest of
                                                    every 4 weights, beside a dense region
    Unstructured        nn.Linear                   BitmapLinear: the largest weights of each row
    SparseActivations   gated MLPs, relu or relu2   SparseGatedMLP: all weights

All layers are checked before the first one changes. Then they are replaced one by one, and their
dense weights are freed. Weights are chosen by magnitude; `sparsebench prune` chooses them by data.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sparsebench.formats._format import require, sides_of
from sparsebench.formats.spense import sparse_shape_of
from sparsebench.harness.models.pruning import checkpoint
from sparsebench.harness.models.pruning.gated import (
    Gated,
    is_dense,
    named,
    require_gated,
    require_plain,
    require_steps,
)
from sparsebench.harness.models.pruning.pattern import Pattern, keep
from sparsebench.harness.models.pruning.region import dense_count
from sparsebench.harness.models.pruning.surroundings import (
    exception,
    others,
    require_unread,
    summary,
)
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
    """The kinds of layers to make sparse, and how."""

    def takes(self, module: nn.Module) -> bool:
        """Return whether this recipe replaces a module of this kind."""

    def check(self, module: nn.Module) -> None:
        """Raise SparsebenchError if `make` cannot replace this module. Changes nothing."""

    def make(self, module: nn.Module) -> nn.Module:
        """Return the layer that replaces the module."""


@dataclass(frozen=True)
class BlockSparse:
    """Keep the blocks of largest Euclidean norm of every nn.Linear.

    block     rows and columns of a block, or one number for both
    sparsity  fraction of blocks to drop, from 0 to 1
    """

    block: int | tuple[int, int] = 64
    sparsity: float = 0.9

    def takes(self, module: nn.Module) -> bool:
        return is_dense(module)

    def check(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Linear)
        require_plain(module)
        r, c = sides_of(self.block)
        require(0 <= self.sparsity <= 1, f"sparsity: expected 0 to 1, found {self.sparsity:g}")
        n, k = module.weight.shape
        blocks = -(-n // r) * -(-k // c)
        weight = f"a weight {n}x{k} of {blocks} blocks of {r}x{c}"
        message = f"expected a block to remain at sparsity {self.sparsity:g}, found {weight}"
        require(round((1 - self.sparsity) * blocks) > 0, message)

    def make(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        layer = BlockSparseLinear.from_dense(module, self.block, self.sparsity)
        layer.values.requires_grad_(module.weight.requires_grad)
        return layer


@dataclass(frozen=True)
class TwoFour:
    """Keep the 2 largest of every 4 weights along k, in fp16 or bf16. The new layers are frozen.

    dense  fraction that stays dense, in whole tiles of 128: the last hidden units of a gated MLP,
           or the last rows of an nn.Linear; 0 is plain 2:4
    """

    dense: float = 0.0

    def takes(self, module: nn.Module) -> bool:
        return Gated.of(module) is not None or is_dense(module)

    def check(self, module: nn.Module) -> None:
        """Raise SparsebenchError for unsupported sizes, dtypes or activations."""
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
        message = f"expected at least one sparse tile of 128, found none at dense {self.dense:g}"
        require(layer.sparse_shape[0] > 0, message)

    def make(self, module: nn.Module) -> nn.Module:
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
        return is_dense(module)

    def check(self, module: nn.Module) -> None:
        """Raise FormatError for a dtype that matmul does not support, or an invalid sparsity."""
        assert isinstance(module, nn.Linear)
        require_plain(module)
        between = 0 < self.sparsity < 1
        require(between, f"sparsity: expected above 0 and below 1, found {self.sparsity:g}")
        n, k = module.weight.shape
        stay = k - round(self.sparsity * k)
        message = f"expected a weight of each row to stay at sparsity {self.sparsity:g}"
        require(stay > 0, f"{message}, found rows of {k}")
        BitmapLinear(k, n, stored=0, **_on_meta(module))

    def make(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        w = module.weight.detach()
        pruned = keep(w, w.abs(), w.shape[1], Pattern("unstructured", self.sparsity, 0))
        return BitmapLinear.from_dense(pruned, module.bias)


@dataclass(frozen=True)
class SparseActivations:
    """Compute and store only the active hidden units of gated MLPs with relu or relu2.

    slots  for the mean number of active units per token; None for a 64th of all units
    """

    slots: int | None = None

    def takes(self, module: nn.Module) -> bool:
        return Gated.of(module) is not None

    def check(self, module: nn.Module) -> None:
        """Raise SparsebenchError for another activation, or an invalid number of slots."""
        parts, activation = require_gated(module, ("relu", "relu2"))
        h, k = parts.gate.weight.shape
        options = _on_meta(parts.gate) | {"activation": activation}
        SparseGatedMLP(k, h, slots=self.slots, **options)

    def make(self, module: nn.Module) -> nn.Module:
        parts, activation = require_gated(module, ("relu", "relu2"))
        mlp = SparseGatedMLP.from_dense(*parts.weights, activation=activation, slots=self.slots)
        for new, old in zip(mlp.parameters(), parts.layers.values(), strict=True):
            new.requires_grad_(old.weight.requires_grad)
        return mlp


def sparsify_(
    model: M,
    recipe: Recipe,
    filter_fn: Filter | None = None,
    *,
    tokens: Iterable[int] = (),
) -> M:
    """Replace layers of a model by sparse ones in place; return the model.

    recipe     BlockSparse, TwoFour, Unstructured or SparseActivations
    filter_fn  takes a module and its name, and returns whether to replace it. It is called for
               modules of the kinds that the recipe takes, outermost first, and not for the parts of
               a replaced module. By default all are replaced, except a Hugging Face model's head
    tokens     numbers of tokens for which each layer plans, and searches, its kernels at once;
               other numbers do so at their first call

    Adapters, routers and gates of fewer than 8 rows stay dense, and so do experts that share one
    tensor. A UserWarning counts them before anything changes. `save_pretrained` of a Hugging Face
    model then writes the sparse layers (checkpoint.py). Raises FormatError, before any change, with
    the name of the first layer that does not fit, or with whose weight other code computes.
    """
    recipes = "BlockSparse(...), TwoFour(...), Unstructured(...) or SparseActivations(...)"
    fits = all(callable(getattr(recipe, name, None)) for name in ("takes", "check", "make"))
    require(fits and not isinstance(recipe, type), f"recipe: expected {recipes}; found {recipe!r}")
    names, left_out = _select(model, recipe, filter_fn)
    for name in names:
        module = model.get_submodule(name)
        named(name, _require_unshared, model, module)
        named(name, recipe.check, module)
    require_unread(model, names)
    record = checkpoint.recorder(model)
    if left_out:
        warnings.warn(f"sparsify_ leaves dense: {summary(left_out)}", stacklevel=2)
    for name in names:
        module = model.get_submodule(name)
        with torch.no_grad():
            layer = named(name, recipe.make, module)
        model.set_submodule(name, layer.train(module.training))
        del module  # frees its weights before the next ones are packed
    record()
    planned = [*tokens]
    for name in names:
        if (plan := getattr(model.get_submodule(name), "plan", None)) is not None:
            plan(planned)
    return model


def _select(
    model: nn.Module, recipe: Recipe, filter_fn: Filter | None
) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Return the names of the modules to replace, and what stays dense beside them.

    Raises FormatError if there is nothing to replace.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    selects = filter_fn or (lambda module, _: module is not head)
    names: list[str] = []
    left_out: list[tuple[str, str, int]] = []

    def visit(module: nn.Module, name: str) -> None:
        if recipe.takes(module) and selects(module, name):
            if (reason := exception(model, module, name)) is None:
                names.append(name)
            else:
                left_out.append((reason, name, sum(p.numel() for p in module.parameters())))
        else:
            for part, child in module.named_children():
                visit(child, f"{name}.{part}" if name else part)

    visit(model, "")
    left_out += others(model, names, only_experts=filter_fn is not None)
    kind, model_kind = type(recipe).__name__, type(model).__name__
    require("" not in names, f"expected a model that contains layers, found a layer: {model_kind}")
    alternative = summary(left_out) or "none"
    message = f"expected a layer for {kind} in {model_kind}, found {alternative}"
    require(bool(names), message)
    return names, left_out


def _require_unshared(model: nn.Module, module: nn.Module) -> None:
    """Raise FormatError if the module or one of its weights occurs twice in the model."""
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    require(
        places[id(module)] == 1,
        "expected an unshared layer, found it in several places",
    )
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tied = ", ".join(name for name, p in module.named_parameters() if users[id(p)] > 1)
    require(not tied, f"expected unshared weights, found {tied} shared with another layer")


def _above(weight: Tensor, rows: int) -> Tensor:
    """Return a weight [n, k] with its first rows pruned to 2:4."""
    top, rest = weight[:rows], weight[rows:]
    return torch.cat((keep(top, top.abs(), weight.shape[1]), rest))


def _on_meta(layer: nn.Linear) -> dict[str, Any]:
    return {"device": "meta", "dtype": layer.weight.dtype}

"""Make layers of a model sparse in place, without data: sparsify_(model, recipe, filter_fn).

    recipe              takes                       replacement
    BlockSparse         nn.Linear                   BlockSparseLinear: the blocks of largest norm
    TwoFour             gated MLPs, else nn.Linear  SpenseGatedMLP, SpenseLinear: the 2 largest of
                                                    every 4 weights, beside a dense region
    both                experts of a mixture        SparseExperts: the same of each expert
    Unstructured        nn.Linear                   BitmapLinear: the largest weights of each row
    SparseActivations   gated MLPs, relu or relu2   SparseGatedMLP: all weights

All layers are checked before the first one changes. Then they are replaced one by one, and their
dense weights are freed. Weights are chosen by magnitude; `sparsebench prune` chooses them by data.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsebench.formats._format import require, sides_of
from sparsebench.formats.spense import sparse_shape_of
from sparsebench.harness.models.pruning import checkpoint
from sparsebench.harness.models.pruning.ahead import plan_ahead, take
from sparsebench.harness.models.pruning.experts import (
    Experts,
    in_blocks,
    in_two_four,
    require_blocks,
    require_two_four,
)
from sparsebench.harness.models.pruning.gated import (
    Gated,
    is_dense,
    outermost,
    parts_of,
    require_gated,
    require_plain,
    require_steps,
    with_name,
)
from sparsebench.harness.models.pruning.layer import dense_count
from sparsebench.harness.models.pruning.left_dense import (
    HEADS,
    Remainder,
    exceptions,
    others,
    sentence,
    totals,
)
from sparsebench.harness.models.pruning.methods import PruningPattern, keep
from sparsebench.kernels.nn import (
    BitmapLinear,
    BlockSparseLinear,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)

Filter = Callable[[nn.Module, str], bool]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class BlockSparse:
    """Keep the blocks of largest Euclidean norm of every nn.Linear, and of experts' weights.

    block     rows and columns of a block, or one number for both
    sparsity  fraction of blocks to drop, from 0 to 1
    """

    block: int | tuple[int, int] = 64
    sparsity: float = 0.9

    def takes(self, module: nn.Module) -> bool:
        return is_dense(module) or Experts.of(module) is not None

    def check(self, module: Any) -> None:
        require(0 <= self.sparsity <= 1, f"sparsity: expected 0 to 1, found {self.sparsity:g}")
        if Experts.of(module):
            require_blocks(module, self.block, self.sparsity)
            return
        require_plain(module)
        (r, c), (n, k) = sides_of(self.block), module.weight.shape
        blocks = -(-n // r) * -(-k // c)
        weight = f"a weight {n}x{k} of {blocks} blocks of {r}x{c}"
        message = f"expected a block to remain at sparsity {self.sparsity:g}, found {weight}"
        require(round((1 - self.sparsity) * blocks) > 0, message)

    def padded(self, model: nn.Module, names: Iterable[str]) -> int:
        """Return the side of a block if it does not divide the sizes of all experts, else 0."""
        side, _ = sides_of(self.block)
        every = (Experts.of(model.get_submodule(name)) for name in names)
        return side * any(size % side for each in every if each for size in each.sizes[1:])

    def make(self, module: Any) -> nn.Module:
        if Experts.of(module):
            return in_blocks(module, self.block, self.sparsity)
        layer = BlockSparseLinear.from_dense(module, self.block, self.sparsity)
        layer.values.requires_grad_(module.weight.requires_grad)
        return layer


@dataclass(frozen=True)
class TwoFour:
    """Keep the 2 largest of every 4 weights along k, in fp16 or bf16. The new layers are frozen.

    dense  fraction that stays dense, in whole tiles of 128: the last hidden units of a gated MLP,
           the last rows of an nn.Linear, or the last columns of experts' weights; 0 is plain 2:4
    """

    dense: float = 0.0

    def takes(self, module: nn.Module) -> bool:
        parts = Gated.of(module)
        whole = parts is not None and all(layer.bias is None for layer in parts.layers.values())
        return whole or is_dense(module) or Experts.of(module) is not None

    def check(self, module: Any) -> None:
        require(0 <= self.dense < 1, f"dense: expected 0 to below 1, found {self.dense:g}")
        if Experts.of(module):
            require_two_four(module, self.dense)
            return
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

    def make(self, module: Any) -> nn.Module:
        if Experts.of(module):
            return in_two_four(module, self.dense)
        if isinstance(module, nn.Linear):
            w, (n, k) = module.weight.detach(), module.weight.shape
            rows, _ = sparse_shape_of(n, k, w.itemsize, self.dense, "rows")
            bias = None if module.bias is None else module.bias.detach()
            return SpenseLinear.from_dense(_above(w, rows), dense_fraction=self.dense, bias=bias)
        parts = parts_of(module)
        gate, up, down = parts.weights
        dense = dense_count(len(gate), self.dense)
        sparse = len(gate) - dense
        pruned = _above(gate, sparse), _above(up, sparse), keep(down, down.abs(), sparse)
        return SpenseGatedMLP.from_dense(*pruned, dense=dense, activation=str(parts.activation))


@dataclass(frozen=True)
class Unstructured:
    """Keep the largest weights of each row of every nn.Linear. The new layers are frozen.

    sparsity  fraction of weights to drop, above 0 and below 1
    """

    sparsity: float = 0.5

    def takes(self, module: nn.Module) -> bool:
        return is_dense(module)

    def check(self, module: Any) -> None:
        require_plain(module)
        between = 0 < self.sparsity < 1
        require(between, f"sparsity: expected above 0 and below 1, found {self.sparsity:g}")
        n, k = module.weight.shape
        message = f"expected a weight of each row to stay at sparsity {self.sparsity:g}"
        require(k - round(self.sparsity * k) > 0, f"{message}, found rows of {k}")
        BitmapLinear(k, n, stored=0, **_on_meta(module))  # raises for a dtype without a kernel

    def make(self, module: Any) -> nn.Module:
        w, pattern = module.weight.detach(), PruningPattern("unstructured", self.sparsity)
        return BitmapLinear.from_dense(keep(w, w.abs(), w.shape[1], pattern), module.bias)


@dataclass(frozen=True)
class SparseActivations:
    """Compute and store only the active hidden units of gated MLPs with relu or relu2.

    slots  for the mean number of active units per token; None for a 64th of all units
    """

    slots: int | None = None

    def takes(self, module: nn.Module) -> bool:
        return Gated.of(module) is not None

    def check(self, module: Any) -> None:
        parts, activation = require_gated(module, ("relu", "relu2"))
        h, k = parts.gate.weight.shape
        options = {"activation": activation, "slots": self.slots, **_on_meta(parts.gate)}
        SparseGatedMLP(k, h, **options)  # raises for invalid slots

    def make(self, module: Any) -> nn.Module:
        parts = parts_of(module)
        activation = str(parts.activation)
        mlp = SparseGatedMLP.from_dense(*parts.weights, activation=activation, slots=self.slots)
        for new, old in zip(mlp.parameters(), parts.layers.values(), strict=True):
            new.requires_grad_(old.weight.requires_grad)
        return mlp


Recipe = BlockSparse | TwoFour | Unstructured | SparseActivations
"""The kinds of layers to make sparse (`takes`), and how.

`check` raises SparsebenchError if a module cannot be replaced, and `make` returns its replacement.
"""


def sparsify_(
    model: M,
    recipe: Recipe,
    filter_fn: Filter | None = None,
    *,
    tokens: Iterable[int] | None = None,
) -> M:
    """Replace layers of a model by sparse ones in place; return the model.

    recipe     BlockSparse, TwoFour, Unstructured or SparseActivations
    filter_fn  takes a module and its name, and returns whether to replace it. It is called for
               modules of the kinds that the recipe takes, outermost first, and not for the parts of
               a replaced module. By default all are replaced, except the output heads of a Hugging
               Face model: what lies outside of its base model, such as lm_head and classifier
    tokens     numbers of tokens for which each layer searches the fastest kernel now, unless a
               file beside the model's weights has it (`sparsebench tune`). By default
               no layer searches: those on a GPU take what is listed for their sizes, and compile it
               now for the powers of two to 2048 (ahead.py); () compiles at the first calls

    Adapters, routers and gates of fewer than 8 rows stay dense, and so do experts in a layout that
    SparseExperts lacks (experts.py). Before anything changes, a UserWarning counts what is replaced
    and what stays dense; if only output heads do, the logger `sparsebench` says so at level INFO.
    `save_pretrained` of a Hugging Face model then writes the sparse layers (checkpoint.py).

    Raises FormatError, before any change, with the name of the first layer that does not fit. Code
    that computes with the weight of a replaced layer, as Mamba's does with that of dt_proj, raises
    Unsupported at its first call: leave such a layer out by filter_fn.
    """
    recipes = "BlockSparse(...), TwoFour(...), Unstructured(...) or SparseActivations(...)"
    require(
        isinstance(recipe, Recipe),
        f"recipe: expected {recipes}; found {repr(recipe).splitlines()[0]}",
    )
    names, remainders = _select(model, recipe, filter_fn)
    for name in names:
        module = model.get_submodule(name)
        with_name(name, _require_unshared, model, module)
        with_name(name, recipe.check, module)
    record = checkpoint.recorder(model)
    kinds = Counter(type(model.get_submodule(name)).__name__ for name in names)
    replaced = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    message = f"sparsify_ replaces {replaced}; leaves dense: {sentence(totals(remainders))}"
    if isinstance(recipe, BlockSparse) and (padded := recipe.padded(model, names)):
        message += f"; pads experts to multiples of {padded}"
    if all(reason == HEADS for reason, *_ in remainders):
        logging.getLogger("sparsebench").info(message)
    else:
        warnings.warn(message, stacklevel=2)
    for name in names:
        module = model.get_submodule(name)
        with torch.no_grad():
            layer = with_name(name, recipe.make, module)
        model.set_submodule(name, layer.train(module.training))
        del module  # frees its weights before the next are packed
    record()
    if tokens is None:
        plan_ahead(model)
        return model
    searched = [*tokens]
    take(model)
    for name in names:
        if (plan := getattr(model.get_submodule(name), "plan", None)) is not None:
            plan(searched)
    return model


def _select(
    model: nn.Module, recipe: Recipe, filter_fn: Filter | None
) -> tuple[list[str], list[Remainder]]:
    """Return the names of the modules to replace, and what stays dense beside them.

    Raises FormatError if there is nothing to replace.
    """
    selects = filter_fn or (lambda module, _: True)
    exception = exceptions(model, with_heads=filter_fn is None)
    names: list[str] = []
    remainders: list[Remainder] = []

    for name, module in outermost(model, lambda m, n: recipe.takes(m) and selects(m, n)):
        if (reason := exception(module, name)) is None:
            names.append(name)
        else:
            remainders.append((reason, name, sum(p.numel() for p in module.parameters())))
    remainders += others(model, names, only_experts=filter_fn is not None)
    kind, model_kind = type(recipe).__name__, type(model).__name__
    require("" not in names, f"expected a model that contains layers, found a layer: {model_kind}")
    rest = sentence(totals(remainders))
    require(bool(names), f"expected a layer for {kind} in {model_kind}, found {rest}")
    return names, remainders


def _require_unshared(model: nn.Module, module: nn.Module) -> None:
    """Raise FormatError if the module or one of its weights occurs twice in the model."""
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    require(places[id(module)] == 1, "expected an unshared layer, found it in several places")
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tied = ", ".join(name for name, p in module.named_parameters() if users[id(p)] > 1)
    require(not tied, f"expected unshared weights, found {tied} shared with another layer")


def _above(weight: Tensor, rows: int) -> Tensor:
    """Return a weight [n, k] with its first rows pruned to 2:4."""
    top, rest = weight[:rows], weight[rows:]
    return torch.cat((keep(top, top.abs(), weight.shape[1]), rest))


def _on_meta(layer: nn.Linear) -> dict[str, Any]:
    return {"device": "meta", "dtype": layer.weight.dtype}

"""What stays dense in a model beside its sparse layers: sparsify_, convert and prune say it alike.

    exceptions  nn.Linear that stays dense: output heads, routers, gates of few rows, adapters
    others      weights that no recipe takes: experts in one tensor, Conv1D, nn.LSTM
    outside     both: all weights outside of some modules
    totals      the numbers by reason
    sentence    the numbers in one line

Code around a layer that computes with its `weight`, as Mamba's does with dt_proj.weight, is not
searched: there the first call raises Unsupported (kernels/nn/_packed.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparsebench.harness.models.pruning.gated import is_dense
from sparsebench.results.formatting import amount
from sparsebench.results.model_files import DenseWeights

FEW_ROWS = 8  # a gate with fewer rows stays dense: the kernels have no tile so small
HEADS = "output heads"
WEIGHT = re.compile("weight|proj")  # found in the names of parameters that multiply
EXPERTS = re.compile("num.*_experts|n_routed_experts")
Remainder = tuple[str, str, int]
"""A weight that stays dense: the reason, its name, and its number of elements."""


def exceptions(model: nn.Module, *, with_heads: bool) -> Callable[[nn.Module, str], str | None]:
    """Return a function that says why a layer that a recipe takes stays dense, or None.

    with_heads  whether output heads stay dense
    """
    heads = heads_of(model) if with_heads else set()
    experts = _experts(model)

    def exception(module: nn.Module, name: str) -> str | None:
        parts = name.split(".")
        owners = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
        for owner, part in zip(owners, parts, strict=True):
            if part != "base_layer" and isinstance(getattr(owner, "base_layer", None), nn.Module):
                return "adapters"
        if module in heads:
            return HEADS
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return nn.MultiheadAttention.__name__  # which reads its weight
        if isinstance(module, nn.Linear):
            if module.out_features < FEW_ROWS:
                return f"gates and heads of fewer than {FEW_ROWS} rows"
            if module.out_features in experts:
                return "routers, which have a row for each expert"
        return None

    return exception


def heads_of(model: nn.Module) -> set[nn.Module]:
    """Return the output heads of a Hugging Face model and of the models in it, with their parts.

    A head is what a model computes after its base model: `lm_head`, `score`, `classifier`,
    `qa_outputs`, BERT's `cls`. A model of a task without a base model, such as
    T5ForQuestionAnswering, has it as its last child.
    """
    heads: set[nn.Module] = set()
    for part in model.modules():
        output = getattr(part, "get_output_embeddings", lambda: None)()
        if isinstance(output, nn.Module):
            heads.update(output.modules())
        if not (prefix := getattr(part, "base_model_prefix", None)):
            continue
        children = [*part.children()]
        base = getattr(part, prefix, None)
        if base in children:
            models = [child for child in children if hasattr(child, "base_model_prefix")]
            for child in children:
                if child is not base and child not in models:
                    heads.update(child.modules())
        elif "For" in type(part).__name__ and is_dense(children[-1]):
            heads.add(children[-1])
    return heads


def _experts(model: nn.Module) -> set[int]:
    """Return the numbers of experts in a Hugging Face model's configuration."""
    fields: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    nested = [fields, *(value for value in fields.values() if isinstance(value, dict))]
    return {
        number
        for each in nested
        for name, number in each.items()
        if EXPERTS.fullmatch(str(name)) and isinstance(number, int)
    }


def others(model: nn.Module, names: Sequence[str], only_experts: bool) -> Iterator[Remainder]:
    """Yield weights that are neither in the named modules nor in a layer that a recipe could take.

    Each is a reason, a name, and the number of elements.
    """
    for name, module in model.named_modules():
        excluded = isinstance(module, _EXCLUDED) or name.endswith(".parametrizations.weight")
        if excluded or any(name == n or name.startswith(f"{n}.") for n in names):
            continue
        kind = type(module).__name__
        experts = "expert" in f"{name}.{kind}".lower()
        for part, parameter in module.named_parameters(recurse=False):
            sides = sum(size > 1 for size in parameter.shape)
            multiplies = (experts or not only_experts) and not part.endswith("bias")
            if sides > 1 and multiplies and (WEIGHT.search(part) or sides > 2):
                reason = (
                    f"{kind}, whose experts share one tensor" if sides > 2 and experts else kind
                )
                yield reason, f"{name}.{part}" if name else part, parameter.numel()


_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d
_EXCLUDED = nn.Linear | nn.Embedding | nn.EmbeddingBag | _CONVOLUTIONS


def outside(
    model: nn.Module, names: Sequence[str], reasons: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Remainder]:
    """Yield all weights outside of the named modules.

    reasons  why an nn.Linear stays dense, by its name, unless it is an exception
    """
    exception = exceptions(model, with_heads=True)
    for name, module in model.named_modules():
        if is_dense(module) and not any(name.startswith(f"{n}.") for n in names):
            reason = exception(module, name) or reasons.get(name, "other linear layers")
            yield reason, name, module.weight.numel()
    yield from others(model, names, only_experts=False)


def totals(remainders: Iterable[Remainder]) -> dict[str, DenseWeights]:
    """Return the numbers of weights that stay dense, by reason."""
    weights: dict[str, DenseWeights] = {}
    for reason, name, size in remainders:
        before = weights.get(reason, DenseWeights(0, 0, name))
        weights[reason] = DenseWeights(before.tensors + 1, before.weights + size, before.first)
    return weights


def sentence(dense: Mapping[str, DenseWeights]) -> str:
    """Return one line about weights that stay dense, or "none"."""
    parts = (
        f"{reason} ({n.weights:,} weights in {amount(n.tensors, 'tensor')}, the first is {n.first})"
        for reason, n in dense.items()
    )
    return "; ".join(parts) or "none"

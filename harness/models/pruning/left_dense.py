"""What sparsify_ leaves dense beside the layers that it replaces.

    exception   an nn.Linear that stays dense: a gate of few rows, a router, an adapter
    others      weights that no recipe takes: experts in one tensor, Conv1D, nn.LSTM

Code around a layer that computes with its `weight`, as Mamba's does with dt_proj.weight, is not
searched: there the first call raises Unsupported (kernels/nn/_packed.py).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

FEW_ROWS = 8  # a gate with fewer rows stays dense: the kernels have no tile so small
WEIGHT = re.compile("weight|proj")  # found in the names of parameters that multiply
EXPERTS = re.compile("num.*_experts|n_routed_experts")


def exception(model: nn.Module, module: nn.Module, name: str) -> str | None:
    """Return why a layer that a recipe takes stays dense; None if it does not."""
    parts = name.split(".")
    owners = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    for owner, part in zip(owners, parts, strict=True):
        if part != "base_layer" and isinstance(getattr(owner, "base_layer", None), nn.Module):
            return "adapters"
    if isinstance(module, nn.Linear):
        if module.out_features < FEW_ROWS:
            return f"gates and heads of fewer than {FEW_ROWS} rows"
        if module.out_features in _experts(model):
            return "routers, which have a row for each expert"
    return None


def _experts(model: nn.Module) -> set[int]:
    """Return the numbers of experts in a Hugging Face model's configuration."""
    fields: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    return {n for name, n in fields.items() if EXPERTS.fullmatch(name) and isinstance(n, int)}


def others(
    model: nn.Module, names: Sequence[str], only_experts: bool
) -> Iterator[tuple[str, str, int]]:
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


def summary(left_out: Sequence[tuple[str, str, int]]) -> str:
    """Return one line about weights that stay dense; each is a reason, a name, and a size."""
    counts, sizes, first = Counter[str](), Counter[str](), dict[str, str]()
    for reason, name, size in left_out:
        counts[reason] += 1
        sizes[reason] += size
        first.setdefault(reason, name)
    lines = []
    for reason, count in counts.items():
        tensors = f"{count} tensor{'s' * (count > 1)}"
        weights = f"{sizes[reason]:,} weights in {tensors}, the first is {first[reason]}"
        lines.append(f"{reason} ({weights})")
    return "; ".join(lines)

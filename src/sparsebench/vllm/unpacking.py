"""Read the packed layers of a sparse checkpoint as dense weights.

    model.layers.0.mlp.gate_up.sparse  .dense    tensors of a SpenseGatedMLP, in any order
    model.layers.0.mlp.down.sparse     .dense
      └─> model.layers.0.mlp.gate_proj.weight, up_proj.weight, down_proj.weight

Other tensors pass through. A layer is unpacked when its last tensor has come.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.checkpoint import Description, dense_of, layer_on_meta
from sparsebench.harness.models.pruning.gated import with_name
from sparsebench.kernels.nn import BitmapLinear

EXTRA = "_extra_state"  # repeats what the description says


def dense_weights(
    tensors: Iterable[tuple[str, Tensor]],
    layers: Mapping[str, Description],
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, those of its packed layers as dense ones.

    layers  descriptions by name (harness/models/pruning/checkpoint.py)
    device  where layers are unpacked

    Raises FormatError for a tensor that is missing or does not fit.
    """
    empty = {name: with_name(name, layer_on_meta, layer) for name, layer in layers.items()}
    states: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    for name, tensor in tensors:
        parts = name.split(".")
        owners = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        if (owner := next((each for each in owners if each in layers), None)) is None:
            yield name, tensor
        elif not name.endswith(EXTRA):
            state = states[owner]
            state[name.removeprefix(f"{owner}.")] = tensor
            if state.keys() == _keys(empty[owner]):
                dense = with_name(owner, _unpacked, empty.pop(owner), states.pop(owner), device)
                yield from ((f"{owner}.{key}", weight) for key, weight in dense.items())
    for owner, state in states.items():
        absent = ", ".join(sorted(_keys(empty[owner]) - state.keys()))
        require(not states, f"{owner}: expected {absent} in the checkpoint, found none")


def _keys(layer: nn.Module) -> set[str]:
    return {key for key in layer.state_dict() if not key.endswith(EXTRA)}


def _unpacked(
    layer: nn.Module, state: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return the dense weights of a layer. Raises FormatError."""
    layer = layer.to_empty(device=device)
    sizes = {key: tensor.shape for key, tensor in layer.state_dict().items() if key in state}
    for key, size in sizes.items():
        shape = state[key].shape
        require(shape == size, f"{key}: expected {list(size)}, found {list(shape)}")
    layer.load_state_dict(state, strict=False)
    if isinstance(layer, BitmapLinear):
        layer.require_index()
    return dense_of(layer).state_dict()

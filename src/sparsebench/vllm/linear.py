"""A linear layer of vLLM whose weight is loaded dense, packed and planned.

    create_weights   the dense weight of this rank, which vLLM's own loaders fill: shards, q, k and
                     v, gate and up
    process_weights_after_loading
                     packs it (packing.py), and plans the numbers of tokens for which the engine
                     captures graphs, and the powers of two up to its largest step, by the
                     checkpoint's tuning file and the user's cache; frees the dense weight. With
                     --additional-config '{"sparsebench_search": true}' it first searches what
                     the cache lacks, which takes minutes, once on each kind of GPU
    apply            Y = X @ W.T + bias by the operators of the layers, which torch.compile sees
                     with fakes. It neither searches nor synchronizes

A second load, as for new weights in training, is refused: graphs and plans belong to the first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.ahead import kinds_of, plan_ahead
from sparsebench.harness.models.pruning.gated import with_name
from sparsebench.vllm.packing import DENSE, Storage, pack, prune, require_whole_blocks

SEARCH, LAYOUTS = "sparsebench_search", "sparsebench_layouts"  # in --additional-config


@register_weight_loader_v2_supported_method
class DenseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A layer that stays dense."""

    def __init__(self, config: Any, engine: Any) -> None:
        super().__init__()
        self.config, self.engine = config, engine

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check the configuration, and keep the weight. Raises FormatError."""
        self.config.prepare(self.engine, layer.weight.device)
        super().process_weights_after_loading(layer)


@register_weight_loader_v2_supported_method
class SparseLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A layer that becomes sparse; `storages` say how each of its parts is stored."""

    def __init__(self, config: Any, storages: Sequence[Storage], engine: Any) -> None:
        self.config, self.storages, self.engine = config, storages, engine

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Make the dense weight of this rank. Raises FormatError if ranks divide a block."""
        shard = output_partition_sizes, input_size_per_partition
        whole = output_size, input_size
        with_name(layer.prefix, require_whole_blocks, self.storages, shard, whole)
        sizes = input_size_per_partition, output_partition_sizes, *whole[::-1]
        create: Any = UnquantizedLinearMethod.create_weights
        create(self, layer, *sizes, params_dtype, **attributes)
        self.sizes = output_partition_sizes

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the dense weight by sparse layers, and plan them. Raises FormatError."""
        require_first_load(layer)
        weight, device = layer.weight.data, layer.weight.device
        self.config.prepare(self.engine, device)
        with set_default_torch_dtype(torch.float32), torch.inference_mode(False), torch.no_grad():
            layer.sparse = with_name(layer.prefix, self._sparse, weight)
        del layer.weight, weight
        record(self.engine, layer)
        if device.type == "cuda":
            plan(layer.sparse, self.engine)

    def _sparse(self, weight: Tensor) -> nn.Module:
        if (recipe := self.config.recipe) is not None:
            parts = zip(weight.split(self.sizes), self.storages, strict=True)
            pruned = [w if storage == DENSE else prune(w, recipe) for w, storage in parts]
            weight = torch.cat(pruned)
        return pack(weight, self.sizes, self.storages)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return Y [..., n] of X [..., k]."""
        y: Tensor = layer.sparse(x)
        return y if bias is None else y + bias


def plan(sparse: nn.Module, engine: Any) -> None:
    """Plan a layer for the sizes of an engine; search them first if its options say so."""
    tokens = tokens_of(engine)
    if engine.additional_config.get(SEARCH):
        for layer in kinds_of(sparse):
            layer.plan(sorted(tokens))
    plan_ahead(sparse, tokens)


def tokens_of(engine: Any) -> set[int]:
    """Return the numbers of tokens to plan: those of graphs, and powers of two to the largest."""
    largest = engine.scheduler_config.max_num_batched_tokens
    captures = engine.compilation_config.cudagraph_capture_sizes or ()
    return {*captures, *(2**power for power in range(largest.bit_length())), largest}


def record(engine: Any, layer: Any) -> None:
    """Let the engine's hash, by which it keeps compiled code, depend on the tensors of a layer.

    Without this, another recipe for the same model would find the code of the one before.
    """
    tensors = layer.sparse.state_dict().items()
    shapes = [f"{name} {tensor.dtype} {[*tensor.shape]}" for name, tensor in tensors]
    layouts = engine.additional_config.setdefault(LAYOUTS, {})
    layouts[layer.prefix] = [repr(layer.sparse), *shapes]


def require_first_load(layer: nn.Module) -> None:
    """Raise FormatError if a layer is packed already."""
    first = not hasattr(layer, "quant_method") or not hasattr(layer, "sparse")
    require(first, "expected weights that are loaded once, found others: start a new server")

"""The load format `sparsebench`: a sparse checkpoint, read as dense weights.

    model.layers.0.mlp.gate_up.sparse ...   ──>   model.layers.0.mlp.gate_proj.weight ...

vLLM's loaders split and merge the dense weights as those of any model, and each rank packs its
shard (linear.py). One layer at a time is unpacked, on the device of the model (unpacking.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from sparsebench.harness.models.pruning.checkpoint import METHOD, parse
from sparsebench.vllm.linear import require_first_load
from sparsebench.vllm.unpacking import dense_weights


@register_model_loader(METHOD)
class UnpackingLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads safetensors; packed layers as dense weights."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Return the dense weights of a checkpoint. Raises FormatError for a model that has them.

        Nothing is changed then: vLLM would empty the model before it loads other weights.
        """
        for layer in model.modules():
            require_first_load(layer)
        config = getattr(model_config.hf_config, "quantization_config", None) or {}
        weights: Iterator[tuple[str, Tensor]] = super().get_all_weights(model_config, model)
        if config.get("quant_method") != METHOD or "recipe" in config:
            return weights
        layers = parse(config.get("version"), config.get("layers"))
        return dense_weights(weights, layers, torch.device(current_platform.device_type))

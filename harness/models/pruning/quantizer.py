"""The classes by which transformers restores sparse layers, under the method "sparsebench".

A model's configuration holds them, and pickle needs classes of a module. This file imports
transformers; checkpoint.py imports it as soon as a program uses transformers.
"""

import warnings
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.ahead import plan_ahead, take
from sparsebench.harness.models.pruning.checkpoint import (
    METHOD,
    describe,
    parse,
    place,
    to_dense,
    verify,
)
from sparsebench.kernels.nn.serving_transformers import unsupported_version


@register_quantization_config(METHOD)
class SparsebenchConfig(QuantizationConfigMixin):
    """The sparse layers of a checkpoint."""

    quant_method: Any

    def __init__(self, version: object = None, layers: object = None, **other: object):
        unknown = sorted(other.keys() - {"quant_method"})
        require(not unknown, f"quantization_config: expected no fields {unknown}")
        parse(version, layers or {})
        self.quant_method, self.version, self.layers = METHOD, version, layers or {}


@register_quantizer(METHOD)
class SparsebenchQuantizer(HfQuantizer):
    """Replace dense layers before the weights are loaded; afterwards check and plan them."""

    quantization_config: Any
    is_trainable: ClassVar = True
    is_qat_trainable: ClassVar = True
    is_compileable: ClassVar = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        config = self.quantization_config
        if (reason := unsupported_version()) is not None:
            warnings.warn(f"sparse layers may be loaded or served wrongly: {reason}", stacklevel=2)
        with torch.device("cpu"):
            layers = parse(config.version, config.layers)
            self.shapes = place(model, layers, model.dtype)
        report = model._adjust_missing_and_unexpected_keys

        def record(keys: Any) -> None:
            self.missing = {*keys.missing_and_mismatched()}  # a set, before tensors are offloaded
            report(keys)

        model._adjust_missing_and_unexpected_keys = record
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            del model._adjust_missing_and_unexpected_keys
            verify(model, self.shapes, self.missing)
            plan_ahead(model, take(model))
        model.hf_quantizer = self
        self.quantization_config.layers = describe(model)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, str]]:
        self.quantization_config.layers = describe(model)  # a pattern may have changed
        return None, {}

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        to_dense(model)
        return model

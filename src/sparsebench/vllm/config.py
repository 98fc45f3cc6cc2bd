"""Which linear layers of a model of vLLM become sparse, by its checkpoint or by a recipe.

    config.json        "quantization_config": {"quant_method": "sparsebench", "layers": {...}}
    sparsebench.json   {"recipe": "TwoFour", "dense": 0.5, "layers": ["*.mlp.*"]}

The first is what `save_pretrained` writes (harness/models/pruning/checkpoint.py). The second stands
beside the weights of a dense model, or elsewhere with hf_overrides={"quantization_config_file":
PATH}: the name of a recipe of `sparsify_`, its fields, and patterns of layers to make sparse, by
the names that Hugging Face uses. Each rank prunes its own shard.

Experts, embeddings, output heads and routers stay dense.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, cast

import torch
import vllm
from pydantic import TypeAdapter, ValidationError
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from sparsebench._discovery import unknown
from sparsebench.errors import FormatError
from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.ahead import take_from
from sparsebench.harness.models.pruning.checkpoint import METHOD, Description, parse
from sparsebench.harness.models.pruning.gated import PARTS, with_name
from sparsebench.harness.models.pruning.sparsify import BlockSparse, Recipe, TwoFour, Unstructured
from sparsebench.results.files import first_error, from_json
from sparsebench.vllm.linear import DenseLinearMethod, SparseLinearMethod
from sparsebench.vllm.packing import DENSE, Storage, storage_of_layer, storage_of_recipe

TESTED = {"vllm": ("0.32", "0.33"), "transformers": ("5.17", "5.19", "5.20")}
RECIPES: dict[str, Any] = {kind.__name__: kind for kind in (BlockSparse, TwoFour, Unstructured)}
RECIPE_FILE = "sparsebench.json"
ROUTERS = "gate", "router", "shared_expert_gate"
logger = logging.getLogger("vllm.sparsebench")


@register_quantization_config(METHOD)
class ServedConfig(QuantizationConfig):  # type: ignore[misc]
    """The layers of a sparse checkpoint, or a recipe and the patterns of the layers it takes."""

    def __init__(
        self,
        layers: Mapping[str, Description] | None = None,
        recipe: Recipe | None = None,
        patterns: Sequence[str] = (),
    ) -> None:
        super().__init__()
        named = (layers or {}).items()
        self.layers = {name: with_name(name, storage_of_layer, layer) for name, layer in named}
        self.descriptions, self.recipe, self.patterns = layers, recipe, patterns
        self.places: set[str] = set()  # the names and patterns for which the model has a layer
        self.is_ready = False
        warn_of_untested_versions()

    @classmethod
    def get_name(cls) -> str:
        """Return the quant_method of config.json."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes of X."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability from which the kernels run: 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the file of a recipe beside the weights."""
        return [RECIPE_FILE]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read the quantization_config of a checkpoint, or a recipe. Raises FormatError."""
        if "recipe" in config:
            return cls(recipe=recipe_of(config), patterns=patterns_of(config))
        return cls(layers=parse(config.get("version"), config.get("layers")))

    @classmethod
    def from_config_file(cls, path: str) -> Self:
        """Read the file of a recipe. Raises FormatError."""
        return with_name(path, cls.from_config, from_json(Path(path)))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM renames the modules of this model."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return how a linear layer is loaded and run; None for other layers. Raises FormatError.

        prefix  the layer's name in vLLM, such as model.layers.0.mlp.gate_up_proj
        """
        if not isinstance(layer, LinearBase):
            return None
        owner, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [last])
        storages = [self._storage(f"{owner}.{part}") for part in parts]
        engine = get_current_vllm_config()
        if all(storage == DENSE for storage in storages):
            return DenseLinearMethod(self, engine)
        with_name(prefix, self.require_engine, engine)
        return SparseLinearMethod(self, storages, engine)

    def _storage(self, name: str) -> Storage:
        """Return how a layer is stored, by its name in Hugging Face."""
        owner, _, last = name.rpartition(".")
        if last in ROUTERS:
            return DENSE
        names = [name, owner] if last in PARTS else [name]
        if place := next((each for each in names if each in self.layers), None):
            self.places.add(place)
            return self.layers[place]
        if patterns := {each for each in self.patterns if fnmatchcase(name, each)}:
            self.places |= patterns
            return storage_of_recipe(cast(Recipe, self.recipe))
        return DENSE

    def require_engine(self, engine: Any) -> None:
        """Raise FormatError for options of the engine that sparse layers cannot follow."""
        load_format = engine.load_config.load_format
        fits = self.descriptions is None or load_format == METHOD
        require(fits, f"expected --load-format {METHOD} for packed weights, found {load_format}")
        sleeps = engine.model_config is not None and engine.model_config.enable_sleep_mode
        require(not sleeps, "expected an engine without sleep mode, found --enable-sleep-mode")

    def prepare(self, engine: Any, device: torch.device) -> None:
        """Check the names, and take the choices beside the checkpoint, when weights are loaded.

        Raises FormatError for a name or a pattern without a layer.
        """
        if self.is_ready:
            return
        whole = engine.parallel_config.pipeline_parallel_size == 1  # else other ranks have others
        absent = [each for each in (*self.layers, *self.patterns) if each not in self.places]
        kinds = "experts, embeddings, heads and routers stay dense"
        message = f"expected a linear layer of this model for {', '.join(absent[:3])}, found none"
        require(not (whole and absent), f"{message}: {kinds}")
        if self.descriptions is not None and device.type == "cuda":
            take_from(Path(engine.model_config.model), device, self.descriptions)
        self.is_ready = True


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file. Raises FormatError."""
    name, other = str(config["recipe"]), {"quant_method", "version", "recipe", "layers"}
    require(name in RECIPES, f"recipe: {unknown('a known recipe', name, RECIPES)}")
    options = {key: value for key, value in config.items() if key not in other}
    names = [field.name for field in fields(RECIPES[name])]
    for key in options:
        require(key in names, f"recipe {name}: {unknown('a known field', key, names)}")
    try:
        return cast(Recipe, TypeAdapter(RECIPES[name]).validate_python(options))
    except ValidationError as error:
        raise FormatError(f"recipe {name}: {first_error(error)}") from error


def patterns_of(config: Mapping[str, Any]) -> list[str]:
    """Return the patterns of the layers that a recipe takes. Raises FormatError."""
    patterns = config.get("layers")
    right = isinstance(patterns, list) and all(isinstance(each, str) for each in patterns)
    expected = 'layers: expected a list of patterns such as ["*.mlp.*"]'
    require(right and bool(patterns), f"{expected}, found {patterns!r}")
    return cast(list[str], patterns)


@cache
def warn_of_untested_versions() -> None:
    """Log one line if this is another version of vLLM or transformers than the tested ones."""
    versions = {"vllm": vllm.__version__, "transformers": version("transformers")}
    for name, actual in versions.items():
        if not any(actual.startswith(f"{tested}.") for tested in TESTED[name]):
            tested = " and ".join(TESTED[name])
            logger.warning("sparsebench was tested with %s %s, found %s", name, tested, actual)

"""Sparse layers in Hugging Face checkpoints: what save_pretrained writes and from_pretrained reads.

    config.json   "quantization_config": {"quant_method": "sparsebench", "version": 1, "layers": {
                     "model.layers.0.mlp": {"layer": "SpenseGatedMLP", "in_features": 640, ...}}}
    safetensors   the state dict as it is: tiles, blocks, offsets and columns

transformers calls a class that it knows by `quant_method`: before it loads, the layers above take
the places of the dense ones, on the meta device; after it, indices and missing tensors are checked.
`register` makes that class known, and `import sparsebench.nn` calls it where transformers is
installed. `model.dequantize()` returns the layers to dense ones, under Hugging Face's names.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import nn

from sparsebench.errors import FormatError
from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.gated import DenseGatedMLP, Gated, named
from sparsebench.kernels.nn import (
    BitmapLinear,
    BlockSparseLinear,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)
from sparsebench.kernels.nn._bsr_plans import require_index

METHOD: Final = "sparsebench"
VERSION: Final = 1
STRICT = ConfigDict(extra="forbid")
Size = Annotated[int, Field(ge=1, le=2**24)]
Dtype = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]


@dataclass(frozen=True, config=STRICT)
class Blocks:
    """A BlockSparseLinear: sizes, rows and columns of a block, and how many blocks are stored."""

    in_features: Size
    out_features: Size
    block: tuple[Size, Size]
    stored: Annotated[int, Field(ge=0)]
    bias: bool
    dtype: Dtype
    layer: Literal["BlockSparseLinear"] = "BlockSparseLinear"

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the features of the first layer, in and out."""
        return self.in_features, self.out_features

    @classmethod
    def of(cls, layer: BlockSparseLinear) -> "Blocks":
        """Describe a layer."""
        sizes, stored = (layer.in_features, layer.out_features), len(layer.columns)
        return cls(*sizes, layer.block, stored, layer.bias is not None, _name(layer.values.dtype))

    def make(self) -> BlockSparseLinear:
        """Return the layer on the meta device."""
        r, c = self.block
        grid = -(-self.out_features // r), -(-self.in_features // c)
        blocks = grid[0] * grid[1]
        require(self.stored <= blocks, f"stored: expected at most {blocks}, found {self.stored}")
        pattern = (torch.arange(blocks) < self.stored).view(grid)
        options: dict[str, Any] = {"bias": self.bias, "dtype": getattr(torch, self.dtype)}
        sizes = self.in_features, self.out_features
        return BlockSparseLinear(*sizes, block=self.block, pattern=pattern, **options).to("meta")


@dataclass(frozen=True, config=STRICT)
class Tiles:
    """A SpenseLinear: sizes, and rows and columns of the sparse part."""

    in_features: Size
    out_features: Size
    sparse_shape: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    bias: bool
    dtype: Dtype
    layer: Literal["SpenseLinear"] = "SpenseLinear"

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the features of the first layer, in and out."""
        return self.in_features, self.out_features

    @classmethod
    def of(cls, layer: SpenseLinear) -> "Tiles":
        """Describe a layer."""
        sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
        return cls(*sizes, layer.sparse_shape, bias, _name(layer.dtype))

    def make(self) -> SpenseLinear:
        """Return the layer on the meta device."""
        (rows, columns), n, k = self.sparse_shape, self.out_features, self.in_features
        options: dict[str, Any] = {"device": "meta", "dtype": getattr(torch, self.dtype)}
        options |= {"split": "columns" if columns < k else "rows", "bias": self.bias}
        layer = SpenseLinear(k, n, dense_fraction=1 - rows * columns / (n * k), **options)
        found = f"expected {list(layer.sparse_shape)}, found {[rows, columns]}"
        require(layer.sparse_shape == self.sparse_shape, f"sparse_shape: {found}")
        return layer


@dataclass(frozen=True, config=STRICT)
class Bits:
    """A BitmapLinear: sizes, and the bytes of its records."""

    in_features: Size
    out_features: Size
    stored: Annotated[int, Field(ge=0)]
    bias: bool
    dtype: Dtype
    layer: Literal["BitmapLinear"] = "BitmapLinear"

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the features of the first layer, in and out."""
        return self.in_features, self.out_features

    @classmethod
    def of(cls, layer: BitmapLinear) -> "Bits":
        """Describe a layer."""
        bias, dtype = layer.bias is not None, _name(layer.dtype)
        return cls(layer.in_features, layer.out_features, len(layer.records), bias, dtype)

    def make(self) -> BitmapLinear:
        """Return the layer on the meta device."""
        sizes, dtype = (self.in_features, self.out_features), getattr(torch, self.dtype)
        return BitmapLinear(*sizes, stored=self.stored, bias=self.bias, device="meta", dtype=dtype)


@dataclass(frozen=True, config=STRICT)
class TiledMLP:
    """A SpenseGatedMLP: sizes, the hidden units that are stored dense, and the activation."""

    in_features: Size
    hidden_features: Size
    dense: Annotated[int, Field(ge=0)]
    activation: str
    dtype: Dtype
    layer: Literal["SpenseGatedMLP"] = "SpenseGatedMLP"

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the features of the first layer, in and out."""
        return self.in_features, self.hidden_features

    @classmethod
    def of(cls, layer: SpenseGatedMLP) -> "TiledMLP":
        """Describe a layer."""
        up, h = layer.gate_up, layer.hidden_features
        sizes = up.in_features, h, h - up.sparse_shape[0] // 2
        return cls(*sizes, layer.activation, _name(up.dtype))

    def make(self) -> SpenseGatedMLP:
        """Return the layer on the meta device."""
        options: dict[str, Any] = {"device": "meta", "dtype": getattr(torch, self.dtype)}
        options |= {"dense": self.dense, "activation": self.activation}
        return SpenseGatedMLP(self.in_features, self.hidden_features, **options)


@dataclass(frozen=True, config=STRICT)
class ActiveMLP:
    """A SparseGatedMLP: sizes, the activation, and slots for active units."""

    in_features: Size
    hidden_features: Size
    activation: str
    slots: Size
    dtype: Dtype
    layer: Literal["SparseGatedMLP"] = "SparseGatedMLP"

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the features of the first layer, in and out."""
        return self.in_features, self.hidden_features

    @classmethod
    def of(cls, layer: SparseGatedMLP) -> "ActiveMLP":
        """Describe a layer."""
        sizes = layer.in_features, layer.hidden_features
        return cls(*sizes, layer.activation, layer.slots, _name(layer.gate.weight.dtype))

    def make(self) -> SparseGatedMLP:
        """Return the layer on the meta device."""
        options: dict[str, Any] = {"device": "meta", "dtype": getattr(torch, self.dtype)}
        options |= {"slots": self.slots, "activation": self.activation}
        return SparseGatedMLP(self.in_features, self.hidden_features, **options)


Described = Blocks | Tiles | Bits | TiledMLP | ActiveMLP
LAYERS = TypeAdapter(dict[str, Annotated[Described, Field(discriminator="layer")]])
KINDS: dict[type[nn.Module], Any] = {
    BlockSparseLinear: Blocks,
    SpenseLinear: Tiles,
    BitmapLinear: Bits,
    SpenseGatedMLP: TiledMLP,
    SparseGatedMLP: ActiveMLP,
}


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what each sparse layer of a model is, by name; those inside of one are part of it."""
    found: dict[str, dict[str, Any]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if kind := KINDS.get(type(module)):
            found[name] = asdict(kind.of(module))
            return
        for part, child in module.named_children():
            visit(child, f"{name}.{part}" if name else part)

    visit(model, "")
    return found


def parse(version: object, layers: object) -> dict[str, Described]:
    """Return the layers of a quantization_config. Raises FormatError, in one line."""
    expected = f"expected version {VERSION} of a {METHOD} checkpoint"
    require(version == VERSION, f"quantization_config: {expected}, found {version!r}")
    try:
        return LAYERS.validate_python(layers)
    except ValidationError as error:
        first = error.errors()[0]
        place = ": ".join(str(part) for part in first["loc"])
        wrong = f"{place}: {first['msg']}; found {str(first['input'])[:60]!r}"
        raise FormatError(f"quantization_config: layers: {wrong}") from error


def place(
    model: nn.Module, layers: Mapping[str, Described], dtype: torch.dtype
) -> dict[str, torch.Size]:
    """Put empty sparse layers, on the meta device, where dense ones are. Raises FormatError.

    dtype  of the model: blocks are converted to it, and tiles must have it

    Return the shapes of the tensors to load, by name.
    """
    made = {}
    for name, layer in layers.items():
        try:
            old = model.get_submodule(name)
        except AttributeError as error:
            where = f"{name}: expected a place for {layer.layer}"
            raise FormatError(f"{where}, found none in {type(model).__name__}") from error
        mlp = Gated.of(old)
        first = mlp.gate if mlp else old
        found = [getattr(first, size, None) for size in ("in_features", "out_features")]
        fits = found == [*layer.sizes]
        require(fits, f"{name}: expected a layer of {[*layer.sizes]} features, found {found}")
        made[name] = named(name, cast(layer, dtype).make)
    shapes: dict[str, torch.Size] = {}
    for name, module in made.items():
        model.set_submodule(name, module)
        shapes |= {
            key: tensor.shape for key, tensor in module.state_dict(prefix=f"{name}.").items()
        }
    return {key: shape for key, shape in shapes.items() if not key.endswith("._extra_state")}


def cast(layer: Described, dtype: torch.dtype) -> Described:
    """Return the description of a layer of a model of this dtype. Raises FormatError."""
    wanted, tiled = _name(dtype), isinstance(layer, Tiles | Bits | TiledMLP)
    outside = "bfloat16" if layer.dtype == "float8_e4m3fn" else layer.dtype
    fits = not tiled or outside == wanted
    require(fits, f"expected dtype {outside}, as its tiles are for, found {wanted}")
    return layer if tiled else replace(layer, dtype=wanted)


def verify(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Raise FormatError for a tensor that was not loaded, or in another shape, and for a bad index.

    shapes  what `place` returned

    transformers fills what is missing with anything and logs it. It marks what it has loaded.
    """
    found = model.state_dict(keep_vars=True)
    for key, shape in shapes.items():
        loaded = hasattr(found[key], "_is_hf_initialized")
        what = list(found[key].shape) if loaded else "none"
        fits = loaded and found[key].shape == shape
        require(fits, f"{key}: expected {list(shape)} in the checkpoint, found {what}")
    for name, part in model.named_modules():
        if isinstance(part, BlockSparseLinear):
            size = part.out_features, part.in_features
            named(name, require_index, part.offsets, part.columns, size, part.block)
        if isinstance(part, BitmapLinear):
            named(name, part.require_index)
        if isinstance(part, SpenseLinear | BitmapLinear) and part.bias is not None:
            part.bias.requires_grad_(False)  # as from_pretrained leaves no parameter
        if isinstance(part, SparseGatedMLP):
            part.active.zero_()


def to_dense(model: nn.Module) -> None:
    """Replace every sparse layer by dense ones, in place."""
    for name in describe(model):
        module = model.get_submodule(name)
        dense: nn.Module
        if isinstance(module, SpenseGatedMLP):
            dense = DenseGatedMLP(*module.to_dense(), module.activation)
        elif isinstance(module, SparseGatedMLP):
            weights = module.gate.weight, module.up.weight, module.down.weight
            dense = DenseGatedMLP(*weights, module.activation)
        else:
            assert isinstance(module, BlockSparseLinear | SpenseLinear | BitmapLinear)
            dense = module.to_dense()
        model.set_submodule(name, dense.train(module.training))


# ---- transformers ----


def recorder(model: nn.Module) -> Callable[[], None]:
    """Return a function that notes in a Hugging Face model what its sparse layers are.

    It does nothing for another module. Raises FormatError for a model that is quantized otherwise.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return lambda: None
    quantizer, config = register()
    other = getattr(model, "hf_quantizer", None)
    found = type(other).__name__
    require(other is None or isinstance(other, quantizer), f"expected dense layers, found {found}")

    def record() -> None:
        quantizer(config(VERSION), pre_quantized=False).postprocess_model(model)

    return record


@cache
def register() -> tuple[Any, Any]:
    """Make transformers restore sparse layers; return the two classes that do it."""
    auto = import_module("transformers.quantizers.auto")
    mixin = import_module("transformers.utils.quantization_config").QuantizationConfigMixin
    base = import_module("transformers.quantizers").HfQuantizer

    class SparsebenchConfig(mixin):  # type: ignore[misc, valid-type]
        """The sparse layers of a checkpoint."""

        def __init__(self, version: object = None, layers: object = None, **other: object):
            unknown = sorted(other.keys() - {"quant_method"})
            require(not unknown, f"quantization_config: expected no {unknown}, found it")
            parse(version, layers or {})
            self.quant_method, self.version, self.layers = METHOD, version, layers or {}

    class SparsebenchQuantizer(base):  # type: ignore[misc, valid-type]
        """Sparse layers in place of dense ones, before and after weights are loaded."""

        is_trainable: ClassVar = True
        is_qat_trainable: ClassVar = True
        is_compileable: ClassVar = True

        def is_serializable(self) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            config = self.quantization_config
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)  # as the layers take it, not the model's
            try:
                with torch.device("cpu"):
                    layers = parse(config.version, config.layers)
                    self.shapes = place(model, layers, model.dtype)
            finally:
                torch.set_default_dtype(before)
            return model

        def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            if self.pre_quantized:
                verify(model, self.shapes)
            model.hf_quantizer = self
            self.quantization_config.layers = describe(model)
            return model

        def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, str]]:
            self.quantization_config.layers = describe(model)  # a pattern may have changed
            return None, {}

        def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
            to_dense(model)
            return model

    auto.register_quantization_config(METHOD)(SparsebenchConfig)
    auto.register_quantizer(METHOD)(SparsebenchQuantizer)
    return SparsebenchQuantizer, SparsebenchConfig


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")

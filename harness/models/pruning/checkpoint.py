"""Sparse layers in Hugging Face checkpoints, for save_pretrained and from_pretrained.

    config.json   "quantization_config": {"quant_method": "sparsebench", "version": 1, "layers": {
                     "model.layers.0.mlp": {"layer": "SpenseGatedMLP", "in_features": 640, ...}}}
    safetensors   the state dict unchanged: tiles, blocks, offsets and columns

transformers looks up a class by `quant_method`. Before loading, that class replaces the dense
layers by the listed ones on the meta device; after loading, it checks for missing tensors and
invalid indices. `register` registers the class (quantizer.py); sparsebench.nn calls it as soon as
transformers is imported. `model.dequantize()` restores dense layers with the names that Hugging
Face uses.
"""

import sys
from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final, Literal, Union

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from torch import nn

from sparsebench.errors import FormatError
from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.adapters import (
    require_separable,
    retarget,
    with_adapters,
)
from sparsebench.harness.models.pruning.experts import Experts, in_dense
from sparsebench.harness.models.pruning.gated import DenseGatedMLP, Gated, outermost, with_name
from sparsebench.kernels.nn import (
    BitmapLinear,
    BlockSparseLinear,
    SparseExperts,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)
from sparsebench.kernels.nn._bsr_pattern import require_index
from sparsebench.kernels.nn._packed import loaded, unwrapped
from sparsebench.results.files import first_error

METHOD: Final = "sparsebench"
VERSION: Final = 1
Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=0)]


# ---- descriptions: the objects under "layers" in config.json ----


Dtype = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]
_LAYER = {"in_features": Size, "dtype": Dtype}
_LINEAR = {**_LAYER, "out_features": Size, "bias": bool}
_MLP = {**_LAYER, "hidden_features": Size, "activation": str}
FIELDS: dict[type[nn.Module], dict[str, Any]] = {
    BlockSparseLinear: {**_LINEAR, "block": tuple[Size, Size], "stored": Count},  # stored blocks
    SpenseLinear: {**_LINEAR, "sparse_shape": tuple[Count, Count]},  # rows and columns
    BitmapLinear: {**_LINEAR, "stored": Count},  # bytes of the records
    SpenseGatedMLP: {**_MLP, "dense": Count},  # hidden units stored dense
    SparseGatedMLP: {**_MLP, "slots": Size},  # for active units
}
Description = Mapping[str, Any]


def _model(kind: type[nn.Module], fields: Mapping[str, Any]) -> Any:
    """Return the pydantic model of a description."""
    literal: Any = Literal
    types: dict[str, Any] = {"layer": literal[kind.__name__], **fields}
    required: dict[str, Any] = {name: (annotation, ...) for name, annotation in types.items()}
    return create_model(kind.__name__, __config__=ConfigDict(extra="forbid"), **required)


def _one_of(*kinds: type[nn.Module]) -> Any:
    """Return the type of a description of one of these kinds."""
    models: Any = Union[tuple(_model(kind, FIELDS[kind]) for kind in kinds)]  # noqa: UP007
    return Annotated[models, Field(discriminator="layer")]


PARTS = "gate_up", "down"  # of SparseExperts
FIELDS[SparseExperts] = {**_MLP, "experts": Size, "top_k": Size, "bias": bool}
FIELDS[SparseExperts] |= dict.fromkeys(PARTS, _one_of(BlockSparseLinear, SpenseLinear))
OF_EXPERTS = FIELDS[SparseExperts].keys() - {*PARTS, "dtype"}
KINDS: dict[str, Any] = {kind.__name__: kind for kind in FIELDS}
_ANY_LAYER: Any = _one_of(*FIELDS)
LAYERS: Any = TypeAdapter(dict[str, _ANY_LAYER])


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return a description of each outermost sparse layer of a model, by name."""
    sparse = outermost(model, lambda module, _: type(module) in KINDS.values())
    return {name: _description(layer) for name, layer in sparse}


def _description(layer: nn.Module) -> dict[str, Any]:
    return {"layer": type(layer).__name__, **_fields(layer)}


def _fields(layer: Any) -> dict[str, Any]:
    fields: dict[str, Any]
    match layer:
        case BlockSparseLinear():
            fields = {"block": layer.block, "stored": len(layer.columns)}
            dtype = layer.values.dtype
        case SpenseLinear():
            fields, dtype = {"sparse_shape": layer.sparse_shape}, layer.dtype
        case BitmapLinear():
            fields, dtype = {"stored": len(layer.records)}, layer.dtype
        case SpenseGatedMLP():
            first = unwrapped(layer.gate_up)
            fields = {"dense": layer.hidden_features - first.sparse_shape[0] // 2}
            fields["in_features"], dtype = first.in_features, first.dtype
        case SparseGatedMLP():
            fields, dtype = {"slots": layer.slots}, unwrapped(layer.gate).weight.dtype
        case SparseExperts():
            fields = {part: _description(getattr(layer, part)) for part in PARTS}
            fields |= {"experts": layer.experts, "top_k": layer.top_k}
            fields["bias"], dtype = layer.gate_up_bias is not None, layer.gate_up.weight.dtype
    names = "in_features", "out_features", "hidden_features", "activation"
    fields |= {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    if "out_features" in fields:
        fields["bias"] = layer.bias is not None
    return {**fields, "dtype": _name(dtype)}


def parse(version: object, layers: object) -> dict[str, Description]:
    """Return the layers of a quantization_config. Raises FormatError with one line."""
    expected = f"expected version {VERSION} of a {METHOD} checkpoint"
    require(version == VERSION, f"quantization_config: {expected}, found {version!r}")
    try:
        valid = LAYERS.validate_python(layers)
    except ValidationError as error:
        raise FormatError(f"quantization_config: layers: {first_error(error)}") from error
    return {name: layer.model_dump() for name, layer in valid.items()}


def place(
    model: nn.Module, layers: Mapping[str, Description], dtype: torch.dtype
) -> dict[str, torch.Size]:
    """Replace dense layers by empty sparse ones on the meta device. Raises FormatError.

    dtype  of the model; blocks are converted to it, and tiles must already have it

    As for dense layers, the prefix of the base model is added or removed, and layers of a head that
    the model lacks are skipped. Return the shapes of the tensors to load, by name.
    """
    replacements: dict[str, nn.Module] = {}
    for saved_name, layer in layers.items():
        if (name := _name_in(model, saved_name, layer["layer"])) is None:
            continue
        old = model.get_submodule(name)
        mlp, experts = Gated.of(old), Experts.of(old)
        first = mlp.gate if mlp else old
        features = [getattr(first, size, None) for size in ("in_features", "out_features")]
        sizes = experts.sizes if experts else features
        expected_sizes = [*_sizes(layer)]
        message = f"{name}: expected a layer of {expected_sizes} features, found {sizes}"
        require(sizes == expected_sizes, message)
        replacements[name] = with_name(name, layer_on_meta, with_name(name, cast, layer, dtype))
    shapes: dict[str, torch.Size] = {}
    for name, module in replacements.items():
        model.set_submodule(name, module)
        state = module.state_dict(prefix=f"{name}.")
        shapes |= {key: tensor.shape for key, tensor in state.items()}
    return {key: shape for key, shape in shapes.items() if not key.endswith("._extra_state")}


def _name_in(model: nn.Module, name: str, kind: str) -> str | None:
    """Return the name that a layer of a checkpoint has in a model; None if its head is absent.

    Raises FormatError if the model has only a part of the path to the layer.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    body = name.removeprefix(prefix)
    candidates = name, body, prefix + name
    for candidate in candidates:
        with suppress(AttributeError):
            model.get_submodule(candidate)
            return candidate
    owners = model, getattr(model, prefix[:-1], None)
    parts = [getattr(owner, body.partition(".")[0], None) for owner in owners]
    reason = f"found none in {type(model).__name__}"
    require(parts == [None, None], f"{name}: expected a place for {kind}, {reason}")
    return None


def cast(layer: Description, dtype: torch.dtype) -> Description:
    """Return the description of a layer in a model of this dtype. Raises FormatError."""
    if layer["layer"] == "SparseExperts":
        return {
            **layer,
            **{part: cast(layer[part], dtype) for part in PARTS},
            "dtype": _name(dtype),
        }
    if layer["layer"] in ("BlockSparseLinear", "SparseGatedMLP"):
        return {**layer, "dtype": _name(dtype)}
    outside = "bfloat16" if layer["dtype"] == "float8_e4m3fn" else layer["dtype"]
    message = f"expected dtype {outside}, for which the layer is packed, found {_name(dtype)}"
    require(outside == _name(dtype), message)
    return layer


def _sizes(layer: Description) -> tuple[int, ...]:
    """Return the features of the first product; of experts their number, features and units."""
    if layer["layer"] == "SparseExperts":
        return layer["experts"], layer["in_features"], layer["hidden_features"]
    return layer["in_features"], layer.get("out_features") or layer["hidden_features"]


def layer_on_meta(layer: Description) -> nn.Module:
    """Return the empty layer of a description, on the meta device. Raises FormatError."""
    if layer["layer"] == "SparseExperts":
        parts: Any = [layer_on_meta(layer[part]) for part in PARTS]
        return SparseExperts(*parts, **{name: layer[name] for name in OF_EXPERTS})
    k, n = _sizes(layer)
    kind = KINDS[layer["layer"]]
    names = {"bias", "stored", "dense", "activation", "slots"} & layer.keys()
    options = {name: layer[name] for name in names} | {"dtype": getattr(torch, layer["dtype"])}
    if kind is BlockSparseLinear:
        (r, c), stored = layer["block"], options.pop("stored")
        grid = -(-n // r), -(-k // c)
        blocks = grid[0] * grid[1]
        require(stored <= blocks, f"stored: expected at most {blocks}, found {stored}")
        pattern = (torch.arange(blocks) < stored).view(grid)
        return BlockSparseLinear(k, n, block=(r, c), pattern=pattern, **options).to("meta")
    if kind is SpenseLinear:
        rows, columns = layer["sparse_shape"]
        options |= {"split": "columns" if columns < k else "rows"}
        options |= {"dense_fraction": 1 - rows * columns / (n * k)}
    module: nn.Module = kind(k, n, device="meta", **options)
    if isinstance(module, SpenseLinear):
        message = f"expected {[*module.sparse_shape]}, found {[rows, columns]}"
        require(module.sparse_shape == (rows, columns), f"sparse_shape: {message}")
    return module


def verify(model: nn.Module, shapes: Mapping[str, torch.Size], missing: Set[str]) -> None:
    """Raise FormatError for a tensor that is missing or has another shape, and for a bad index.

    shapes   the result of `place`
    missing  names of tensors that the checkpoint lacks, or has in another shape: transformers only
             logs and initializes them
    """
    state = model.state_dict()
    for key, shape in shapes.items():
        actual = "none" if key in missing else list(state[key].shape)
        fits = key not in missing and state[key].shape == shape
        require(fits, f"{key}: expected {list(shape)} in the checkpoint, found {actual}")
    for name, part in model.named_modules():
        with loaded(part) if isinstance(part, BlockSparseLinear | BitmapLinear) else nullcontext():
            if isinstance(part, BlockSparseLinear):
                size = part.out_features, part.in_features
                with_name(name, require_index, part.offsets, part.columns, size, part.block)
            if isinstance(part, BitmapLinear):
                with_name(name, part.require_index)
        if isinstance(part, SpenseLinear | BitmapLinear) and part.bias is not None:
            part.bias.requires_grad_(False)  # from_pretrained resets it
        if isinstance(part, SparseExperts):
            for bias in part.parameters(recurse=False):
                bias.requires_grad_(False)
        if isinstance(part, SparseGatedMLP):
            part.active.zero_()


def to_dense(model: nn.Module) -> None:
    """Replace every sparse layer by dense ones, in place; adapters stay (adapters.py).

    Raises FormatError, before any change, for adapters that cannot stay.
    """
    layers = {name: model.get_submodule(name) for name in describe(model)}
    for name, layer in layers.items():
        with_name(name, require_separable, layer)
    skeleton = None
    if any(isinstance(layer, SparseExperts) for layer in layers.values()):
        with torch.device("meta"):
            skeleton = type(model)(model.config)
    for name, layer in layers.items():
        old = skeleton.get_submodule(name) if skeleton else None
        model.set_submodule(name, dense_of(layer, old).train(layer.training))
    retarget(model, [name for name, layer in layers.items() if isinstance(layer, SpenseGatedMLP)])


def dense_of(layer: Any, old: nn.Module | None = None) -> nn.Module:
    """Return a sparse layer as dense ones, with the names that Hugging Face uses.

    old  the dense module in its place, on the meta device, which experts are written into
    """
    match layer:
        case SpenseGatedMLP():
            return with_adapters(DenseGatedMLP(*layer.to_dense(), layer.activation), layer)
        case SparseGatedMLP():
            gate, up, down = (part.weight for part in (layer.gate, layer.up, layer.down))
            return DenseGatedMLP(gate, up, down, layer.activation)
        case SparseExperts():
            assert old is not None
            return in_dense(layer, old)
        case _:
            dense: nn.Module = layer.to_dense()
            return dense


# ---- transformers ----


def recorder(model: nn.Module) -> Callable[[], None]:
    """Return a function that records the sparse layers in a Hugging Face model's configuration.

    It does nothing for other modules. Raises FormatError if another tool quantized the model.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return lambda: None
    quantizer, config = register()
    other = getattr(model, "hf_quantizer", None)
    dense = other is None or isinstance(other, quantizer)
    require(dense, f"expected dense layers, found {type(other).__name__}")
    return lambda: quantizer(config(VERSION), pre_quantized=False).postprocess_model(model)


@cache
def register() -> tuple[Any, Any]:
    """Register the classes with which transformers restores sparse layers; return both."""
    quantizer = import_module("sparsebench.harness.models.pruning.quantizer")
    return quantizer.SparsebenchQuantizer, quantizer.SparsebenchConfig


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")

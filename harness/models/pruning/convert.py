"""Convert a checkpoint of compressed-tensors, or one with 2:4 zeros, into sparse layers.

    stored as                            becomes
    sparse-24-bitmask, or 2:4 with its zeros     SpenseLinear, in 16 bits or in fp8 with scales
        gate, up and down, 16 bits, no bias      SpenseGatedMLP
    sparse-bitmask                               BitmapLinear
    everything else                              dense, in the model's dtype

The model is built on the meta device, where transformers compares its state with the tensors of the
checkpoint, by the names that it gives them (state.py). Then one module at a time is read and
packed, so that memory holds the largest gated MLP beside what is written at the end. At last the
output is loaded by `from_pretrained`, as what `save_pretrained` writes of a sparse model
(checkpoint.py), and compared again.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import FormatError, SuiteError
from sparsebench.formats._format import require
from sparsebench.harness.models.pruning import checkpoint
from sparsebench.harness.models.pruning.compressed import BITMASK, Checkpoint, is_two_four
from sparsebench.harness.models.pruning.gated import (
    STEP,
    Gated,
    is_dense,
    require_gated,
    with_name,
)
from sparsebench.harness.models.pruning.layer import ACTIVATIONS
from sparsebench.harness.models.pruning.left_dense import (
    Remainder,
    exceptions,
    outside,
    sentence,
    totals,
)
from sparsebench.harness.models.pruning.state import (
    CONFIG,
    Names,
    load_complete,
    on_meta,
    require_finite,
)
from sparsebench.kernels._kernel import NAMES
from sparsebench.kernels.nn import BitmapLinear, SpenseGatedMLP, SpenseLinear
from sparsebench.results.model_files import DenseWeights
from sparsebench.results.run.store import new_directory, write_json

E4M3, HALF = torch.float8_e4m3fn, (torch.float16, torch.bfloat16)
SHARD_BYTES = 4 * 10**9
TO_16_BITS = "--dtype bfloat16 multiplies by the scales and rounds"
MERGED = "linear layers whose weights transformers merges or splits"
COMPRESSED = "compressed weights outside of linear layers"
INPUTS = "tokenizer*", "vocab*", "*.model", "preprocessor_config.json", "processor_config.json"
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".py"}


@dataclass
class Conversion:
    """The outcome of a conversion.

    layers   number of sparse layers by class
    dense    the weights that stayed dense, by reason, in the words of sparsify_
    unused   number of tensors that were left out, by the last part of their name
    dtype    of the model
    before   bytes of the tensors that were read; `after`: of those that were written
    """

    layers: dict[str, int]
    dense: dict[str, DenseWeights]
    unused: dict[str, int]
    dtype: str
    before: int
    after: int


def convert(
    source: Path, out: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Conversion:
    """Write a checkpoint directory with sparse layers.

    dtype   fp16 or bf16, to which all weights are rounded, after multiplication by their scales;
            None keeps 16-bit and fp8 weights
    device  where weights are packed

    Raises SuiteError, FormatError or ResultError, and then writes nothing: also if a tensor of the
    model is missing, has another shape or is not finite, or if the model has no place for one.
    """
    if not source.is_dir():
        raise SuiteError(f"{source}: expected the directory of a checkpoint, found none")
    if out.exists() or not out.parent.is_dir():
        actual = "an existing one" if out.exists() else f"no {out.parent}"
        raise SuiteError(f"{out}: expected a new directory to write, found {actual}")
    if dtype not in (None, *HALF):
        raise SuiteError(f"dtype: expected float16 or bfloat16, found {dtype}")
    stored = Checkpoint(source)
    with new_directory(out) as fresh:
        for file in source.iterdir():
            index = file.name.endswith(".index.json") or file.name == CONFIG
            if file.is_file() and file.suffix not in NOT_COPIED and not index:
                shutil.copyfile(file, fresh / file.name)
        return _Converter(stored, fresh, dtype, torch.device(device)).run()


@dataclass(frozen=True)
class _Weight:
    """A weight as it is stored: `format` is sparse-24-bitmask, sparse-bitmask or dense."""

    format: str
    values: Tensor
    scale: Tensor | None

    @classmethod
    def read(cls, name: str, stored: Checkpoint, dtype: torch.dtype | None) -> Self:
        """Read the weight of a module, rounded to `dtype` if there is one. Raises FormatError."""
        module = stored.modules[name]
        values, scale = stored.weight(module), stored.scale(module)
        rows = len(values) if values.dim() else 1
        fits = scale is None or scale.numel() == 1 or scale.shape in ((rows,), (rows, 1))
        actual = list(scale.shape) if scale is not None else []
        require(fits, f"weight_scale: expected one for each of {rows} rows or one, found {actual}")
        scaled = values.is_floating_point() or scale is not None
        require(scaled, f"weight: expected a weight_scale with {values.dtype}, found none")
        is_compressed = len(module.packed) > 1
        weight = cls(stored.sparse if is_compressed else "dense", values, scale)
        if dtype is not None:
            weight = cls(weight.format, weight.scaled(dtype), None)
        expected = "weight: expected floating-point values"
        kind = weight.values.dtype
        require(kind.is_floating_point, f"{expected}, found {kind}: {TO_16_BITS}")
        require_finite("weight", weight.values)
        if weight.scale is not None:
            require_finite("weight_scale", weight.scale)
        return weight

    def dense(self) -> Tensor:
        """Return the weight without a scale, in 16 bits if it has fewer. Raises FormatError."""
        if self.scale is None and self.values.itemsize > 1:
            return self.values
        half = self.values.dtype in HALF
        weight = self.scaled(self.values.dtype if half else torch.bfloat16)
        require_finite("weight", weight)
        return weight

    def scaled(self, dtype: torch.dtype) -> Tensor:
        if self.scale is None:
            return self.values.to(dtype)
        scale = self.scale.view(-1, *(1,) * (self.values.dim() - 1))
        return (self.values.float() * scale).to(dtype)


class _Converter:
    """Packs the modules of a checkpoint one by one. Modules have the names of the model."""

    def __init__(
        self, stored: Checkpoint, folder: Path, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.stored, self.folder, self.dtype, self.device = stored, folder, dtype, device
        self.model = on_meta(stored.folder, folder, stored.config, stored.shapes)
        self.modules = dict(self.model.named_modules())
        self.users = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        self.exception = exceptions(self.model, with_heads=True)
        self.files = Names(self.model).unchanged(stored.shapes)
        self.outside = dtype  # dtype of the model: that of its 16-bit weights, or bf16 beside fp8
        self.sparse: dict[str, _Sparse] = {}
        self.reasons = dict.fromkeys(self.modules, MERGED)  # until a weight has another
        self.compressed: list[Remainder] = []
        self.tensors: dict[str, Tensor] = {}

    def run(self) -> Conversion:
        """Write all tensors, and config.json with the description of the sparse layers."""
        for owner, files in self._units():
            self._convert(owner, files)
        dense = totals([*self.compressed, *outside(self.model, [*self.sparse], self.reasons)])
        if not self.sparse:
            expected = "expected 2:4 or bitmask weights of linear layers"
            raise SuiteError(f"{self.stored.folder}: {expected}, found {sentence(dense)}")
        for name in self.stored.others:
            if name not in self.tensors:
                self.tensors[name] = self._other(name)
        self._name_sparse()
        after = sum(tensor.nbytes for tensor in self.tensors.values())
        self._write()
        unused = Counter(name.rpartition(".")[2] for name in self.stored.unused)
        layers = Counter(type(sparse.layer).__name__ for sparse in self.sparse.values())
        dtype = str(self.outside).removeprefix("torch.")
        return Conversion({**layers}, dense, {**unused}, dtype, self.stored.size, after)

    def _units(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield gated MLPs with their layers, then all other modules alone.

        The layers are names in the file by names in the model. What transformers merges or splits
        has no name in the model, and comes last.
        """
        weights = {f"{name}.weight": name for name in self.stored.modules}
        files = {
            name.removesuffix(".weight"): weights.pop(file)
            for name, file in self.files.items()
            if file in weights and name.endswith(".weight")
        }
        for name, module in [*self.model.named_modules()]:
            parts = Gated.of(module)
            names = [f"{name}.{part}" for part in parts.layers] if parts else []
            if names and all(part in files for part in names):
                yield name, {part: files.pop(part) for part in names}
        yield from ((name, {name: file}) for name, file in files.items())
        for file in weights.values():
            weight = with_name(file, _Weight.read, file, self.stored, self.dtype)
            self.tensors[f"{file}.weight"] = weight.dense()

    def _convert(self, owner: str, files: dict[str, str]) -> None:
        read = self.stored, self.dtype
        weights = {name: with_name(f, _Weight.read, f, *read) for name, f in files.items()}
        reasons = {name: self._dense_reason(name, weight) for name, weight in weights.items()}
        whole = len(files) > 1 and not any(reason is not None for reason in reasons.values())
        if whole and all(self._fits_mlp(name, weight) for name, weight in weights.items()):
            mlp = with_name(owner, self._gated_mlp, owner, [w.values for w in weights.values()])
            if mlp is not None:
                last = files[f"{owner}.down_proj"]
                self._place(owner, mlp, last.removesuffix(".down_proj"))
                return
        for name, weight in weights.items():
            reason, file = reasons[name], files[name]
            if reason is None:
                layer = with_name(name, self._linear, weight, self._bias(name))
                self._place(name, layer, file)
                continue
            self.reasons[name] = reason
            self.tensors[f"{file}.weight"] = with_name(name, weight.dense)

    def _dense_reason(self, name: str, weight: _Weight) -> str | None:
        """Return why a weight stays dense, or "" if it would anyway; None if it becomes sparse.

        Raises FormatError for a linear layer whose weight has a dtype that no sparse layer has.
        """
        module, values = self.modules[name], weight.values
        bitmask, compressed = weight.format == BITMASK, weight.format != "dense"
        if not is_dense(module):
            if compressed:
                self.compressed.append((COMPRESSED, name, values.numel()))
            return ""
        if (reason := self.exception(module, name)) is not None:
            return reason
        if self.users[id(module.weight)] > 1:
            return "weights shared with another layer"
        if not bitmask and not is_two_four(values):
            return "linear layers without 2:4"
        step = 2 * STEP if values.dtype == E4M3 else STEP
        if not bitmask and (values.shape[1] % step or values.shape[0] % STEP):
            return f"linear layers whose sizes are no multiples of {step}"
        actual = f"{values.dtype}{' with a scale' if weight.scale is not None else ''}"
        if bitmask:
            fits = values.dtype in NAMES and weight.scale is None
        else:
            fits = values.dtype in HALF or values.dtype == E4M3
        require(fits, f"{name}: expected 16 bits, found {actual}: {TO_16_BITS}")
        return None

    def _other(self, name: str) -> Tensor:
        """Return a tensor that belongs to no weight, such as a bias. Raises FormatError."""
        tensor = self.stored.tensor(name)
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        require_finite(name, tensor)
        return tensor

    def _bias(self, name: str) -> Tensor | None:
        file = self.files.get(f"{name}.bias")
        return self._other(file) if file else None

    def _fits_mlp(self, name: str, weight: _Weight) -> bool:
        half = weight.format != BITMASK and weight.values.dtype in HALF and weight.scale is None
        return half and self._bias(name) is None

    def _gated_mlp(self, name: str, weights: list[Tensor]) -> SpenseGatedMLP | None:
        """Return gate, up and down in one layer; None if the module computes something else."""
        module = deepcopy(self.model.get_submodule(name)).to_empty(device=self.device)
        parts = Gated.of(module)
        assert parts is not None
        for layer, weight in zip(parts.layers.values(), weights, strict=True):
            layer.weight = nn.Parameter(weight.to(self.device), requires_grad=False)
        try:
            parts, activation = require_gated(module, tuple(ACTIVATIONS))
        except FormatError:
            return None
        return SpenseGatedMLP.from_dense(*parts.weights, dense=0, activation=activation)

    def _linear(self, weight: _Weight, bias: Tensor | None) -> SpenseLinear | BitmapLinear:
        values = weight.values.to(self.device)
        if weight.format == BITMASK:
            return BitmapLinear.from_dense(values, bias)
        return SpenseLinear.from_dense(values, bias=bias, scale=weight.scale)

    def _place(
        self, name: str, layer: SpenseGatedMLP | SpenseLinear | BitmapLinear, file: str
    ) -> None:
        """Keep the state of a sparse layer, and put it into the model without its tensors."""
        dtype = (layer.down if isinstance(layer, SpenseGatedMLP) else layer).dtype
        outside = torch.bfloat16 if dtype == E4M3 else dtype
        self.outside = self.outside or outside
        expected = f"{name}: expected {self.outside} as in the layers before, found {outside}"
        require(self.outside == outside, f"{expected}: {TO_16_BITS}")
        state = {key: tensor.detach().cpu() for key, tensor in layer.state_dict().items()}
        self.model.set_submodule(name, layer.to("meta"))
        self.sparse[name] = _Sparse(layer, file, state)
        if bias := self.files.get(f"{name}.bias"):
            self.stored.others.remove(bias)

    def _name_sparse(self) -> None:
        """Give the tensors of sparse layers the names of the file, as `save_pretrained` would."""
        names = Names(self.model)
        for module, sparse in self.sparse.items():
            for part, tensor in sparse.state.items():
                name, file = f"{module}.{part}", f"{sparse.file}.{part}"
                self.tensors[file if names.in_model(file) == (name, None) else name] = tensor

    def _write(self) -> None:
        """Write tensors and config.json. Raises SuiteError unless transformers loads them all."""
        import_module("huggingface_hub").save_torch_state_dict(
            self.tensors, self.folder, max_shard_size=SHARD_BYTES
        )
        self.tensors.clear()
        dtype = str(self.outside).removeprefix("torch.")
        method: dict[str, Any] = {"quant_method": checkpoint.METHOD, "version": checkpoint.VERSION}
        method["layers"] = checkpoint.describe(self.model)
        config = {key: value for key, value in self.stored.config.items() if key != "torch_dtype"}
        config |= {"dtype": dtype, "quantization_config": method}
        write_json(self.folder / CONFIG, config)
        checkpoint.register()
        load_complete(type(self.model), self.stored.folder, self.folder)


@dataclass(frozen=True)
class _Sparse:
    """A sparse layer without tensors, the name of the layer in the file, and the tensors."""

    layer: nn.Module
    file: str
    state: Mapping[str, Tensor]


def lines(out: Path, conversion: Conversion) -> Iterator[str]:
    """Yield the lines that describe a conversion in a terminal."""
    layers = ", ".join(f"{count} {kind}" for kind, count in conversion.layers.items())
    after, before = (
        f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
        for size in (conversion.after, conversion.before)
    )
    yield f"{out}: {layers}, {conversion.dtype}, {after} in place of {before}"
    yield f"leaves dense: {sentence(conversion.dense)}"
    for name, count in conversion.unused.items():
        yield f"left out: {count} {name}; fp8 layers scale each token by its largest element"
    if not any(file for pattern in INPUTS for file in out.glob(pattern)):
        yield "expected a tokenizer or processor beside the weights, found none: save one there"
    yield f"from_pretrained({str(out)!r}) loads it after import sparsebench.nn"

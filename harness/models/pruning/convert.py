"""Convert a checkpoint of compressed-tensors, or one with 2:4 zeros, into sparse layers.

    stored as                            becomes
    sparse-24-bitmask, or 2:4 with its zeros     SpenseLinear, in 16 bits or in fp8 with scales
        gate, up and down, 16 bits, no bias      SpenseGatedMLP
    sparse-bitmask                               BitmapLinear
    everything else                              dense, in the model's dtype

The model is built on the meta device, and one module at a time is read and packed, so that memory
holds the largest gated MLP beside what is written at the end. The output loads by
`from_pretrained`, as what `save_pretrained` writes of a sparse model does (checkpoint.py).
"""

import shutil
from collections import Counter
from collections.abc import Iterator
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
    head_of,
    is_dense,
    require_gated,
    with_name,
)
from sparsebench.harness.models.pruning.layer import ACTIVATIONS
from sparsebench.harness.models.pruning.model import quiet, usable
from sparsebench.harness.models.reporting import transformers_for
from sparsebench.kernels._kernel import NAMES
from sparsebench.kernels.nn import BitmapLinear, SpenseGatedMLP, SpenseLinear
from sparsebench.results.run.store import new_directory, write_json

E4M3, HALF = torch.float8_e4m3fn, (torch.float16, torch.bfloat16)
SHARD_BYTES = 4 * 10**9
TO_16_BITS = "--dtype bfloat16 multiplies by the scales and rounds"
CONFIG = "config.json"
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".py"}


@dataclass
class Conversion:
    """The outcome of a conversion.

    layers   number of sparse layers by class
    dense    number of compressed or linear layers that stayed dense, by reason
    unused   number of tensors that were left out, by the last part of their name
    dtype    of the model
    before   bytes of the tensors that were read; `after`: of those that were written
    """

    layers: dict[str, int]
    dense: dict[str, int]
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

    Raises SuiteError, FormatError or ResultError, and then writes nothing.
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
            return cls(weight.format, weight.scaled(dtype), None)
        expected = "weight: expected floating-point values"
        require(values.is_floating_point(), f"{expected}, found {values.dtype}: {TO_16_BITS}")
        return weight

    def scaled(self, dtype: torch.dtype) -> Tensor:
        if self.scale is None:
            return self.values.to(dtype)
        scale = self.scale.view(-1, *(1,) * (self.values.dim() - 1))
        return (self.values.float() * scale).to(dtype)


class _Converter:
    """Packs the modules of a checkpoint one by one."""

    def __init__(
        self, stored: Checkpoint, folder: Path, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.stored, self.folder, self.dtype, self.device = stored, folder, dtype, device
        self.model = _on_meta(stored, folder)
        self.head = head_of(self.model)
        self.users = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        self.outside = dtype  # dtype of the model: that of its 16-bit weights, or bf16 beside fp8
        self.sparse: dict[str, str] = {}
        self.dense = Counter[str]()
        self.tensors: dict[str, Tensor] = {}

    def run(self) -> Conversion:
        """Write all tensors, and config.json with the description of the sparse layers."""
        for owner, names in self._units():
            self._convert(owner, names)
        if not self.sparse:
            dense = "; ".join(f"{count} {reason}" for reason, count in self.dense.items())
            expected = "expected 2:4 or bitmask weights of linear layers"
            raise SuiteError(f"{self.stored.folder}: {expected}, found {dense or 'none'}")
        for name in self.stored.others:
            if name not in self.tensors:  # as the bias of a sparse layer is
                tensor = self.stored.tensor(name)
                rounds = self.dtype is not None and tensor.is_floating_point()
                self.tensors[name] = tensor.to(self.dtype) if rounds else tensor
        after = sum(tensor.nbytes for tensor in self.tensors.values())
        import_module("huggingface_hub").save_torch_state_dict(
            self.tensors, self.folder, max_shard_size=SHARD_BYTES
        )
        dtype = str(self.outside).removeprefix("torch.")
        method: dict[str, Any] = {"quant_method": checkpoint.METHOD, "version": checkpoint.VERSION}
        method["layers"] = checkpoint.describe(self.model)
        config = {key: value for key, value in self.stored.config.items() if key != "torch_dtype"}
        config |= {"dtype": dtype, "quantization_config": method}
        write_json(self.folder / CONFIG, config)
        unused = Counter(name.rpartition(".")[2] for name in self.stored.unused)
        before = sum(path.stat().st_size for path in {*self.stored.places.values()})
        layers = Counter(self.sparse.values())
        return Conversion({**layers}, {**self.dense}, {**unused}, dtype, before, after)

    def _units(self) -> Iterator[tuple[str, list[str]]]:
        """Yield gated MLPs with the names of their layers, then all other modules alone."""
        done: set[str] = set()
        for name, module in [*self.model.named_modules()]:
            parts = Gated.of(module)
            names = [f"{name}.{part}" for part in parts.layers] if parts else []
            if names and all(part in self.stored.modules for part in names):
                done.update(names)
                yield name, names
        yield from ((name, [name]) for name in self.stored.modules if name not in done)

    def _convert(self, owner: str, names: list[str]) -> None:
        read = self.stored, self.dtype
        weights = {name: with_name(name, _Weight.read, name, *read) for name in names}
        reasons = {name: self._dense_reason(name, weight) for name, weight in weights.items()}
        whole = len(names) > 1 and not any(reason is not None for reason in reasons.values())
        if whole and all(self._fits_mlp(name, weight) for name, weight in weights.items()):
            mlp = with_name(owner, self._gated_mlp, owner, [w.values for w in weights.values()])
            if mlp is not None:
                self._place(owner, mlp)
                return
        for name, weight in weights.items():
            reason = reasons[name]
            if reason is None:
                self._place(name, with_name(name, self._linear, weight, self._bias(name)))
                continue
            if reason:
                self.dense[reason] += 1
            fp8 = weight.values.itemsize == 1
            values = weight.scaled(torch.bfloat16) if fp8 else weight.values
            self.tensors[f"{name}.weight"] = values

    def _dense_reason(self, name: str, weight: _Weight) -> str | None:
        """Return why a weight stays dense, or "" if it would anyway; None if it becomes sparse.

        Raises FormatError for a linear layer whose weight has a dtype that no sparse layer has.
        """
        module = dict(self.model.named_modules()).get(name)
        bitmask, compressed = weight.format == BITMASK, weight.format != "dense"
        values = weight.values
        if not bitmask and not is_two_four(values):
            linear = is_dense(module) and module is not self.head
            return "linear layers without 2:4" if linear else ""
        if not is_dense(module):
            kind = "2:4 or compressed weights outside of linear layers"
            return kind if compressed or values.dim() == 2 else ""
        if (module is self.head and not compressed) or self.users[id(module.weight)] > 1:
            return "heads"
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

    def _bias(self, name: str) -> Tensor | None:
        bias = f"{name}.bias"
        return self.stored.tensor(bias) if bias in self.stored.places else None

    def _fits_mlp(self, name: str, weight: _Weight) -> bool:
        return weight.format != BITMASK and weight.values.dtype in HALF and self._bias(name) is None

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

    def _place(self, name: str, layer: SpenseGatedMLP | SpenseLinear | BitmapLinear) -> None:
        """Write the state of a sparse layer, and put it into the model without its tensors."""
        dtype = (layer.down if isinstance(layer, SpenseGatedMLP) else layer).dtype
        outside = torch.bfloat16 if dtype == E4M3 else dtype
        self.outside = self.outside or outside
        expected = f"{name}: expected {self.outside} as in the layers before, found {outside}"
        require(self.outside == outside, f"{expected}: {TO_16_BITS}")
        state = layer.state_dict(prefix=f"{name}.")
        self.tensors |= {key: tensor.detach().cpu() for key, tensor in state.items()}
        self.model.set_submodule(name, layer.to("meta"))
        self.sparse[name] = type(layer).__name__


def _on_meta(stored: Checkpoint, folder: Path) -> nn.Module:
    """Return the model of a configuration on the meta device. Raises SuiteError."""
    write_json(folder / CONFIG, stored.config)
    transformers, names = transformers_for(stored.folder), stored.config.get("architectures")
    with usable(stored.folder), quiet(transformers):
        options = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        for name in names if isinstance(names, list) else ():
            kind: Any = getattr(transformers, str(name), None)
            is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
            if is_model:
                with torch.device("meta"):
                    model: nn.Module = kind._from_config(config)
                return model
    actual = f"{names!r:.80}"
    raise SuiteError(f"{stored.folder}: expected architectures of transformers, found {actual}")


def lines(out: Path, conversion: Conversion) -> Iterator[str]:
    """Yield the lines that describe a conversion in a terminal."""
    layers = ", ".join(f"{count} {kind}" for kind, count in conversion.layers.items())
    after, before = (
        f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
        for size in (conversion.after, conversion.before)
    )
    yield f"{out}: {layers}, {conversion.dtype}, {after} in place of {before}"
    for reason, count in conversion.dense.items():
        yield f"dense: {count} {reason}"
    for name, count in conversion.unused.items():
        yield f"left out: {count} {name}; fp8 layers scale each token by its largest element"
    yield f"from_pretrained({str(out)!r}) loads it after import sparsebench.nn"

"""Convert a checkpoint of compressed-tensors, or one with 2:4 zeros, into sparse layers.

    stored as                            becomes
    sparse-24-bitmask, or 2:4 with its zeros     SpenseLinear, in 16 bits or in fp8 with scales
        gate, up and down, 16 bits, no bias      SpenseGatedMLP
        all experts of a layer, 16 bits          SparseExperts
    sparse-bitmask                               BitmapLinear
    everything else                              dense, in the model's dtype

The model is built on the meta device, where transformers compares its state with the tensors of the
checkpoint, by the names that it gives them (state.py). Then one module at a time is read and
packed, so that memory holds the largest one, such as the experts of a layer, beside what is written
at the end. At last the output is loaded by `from_pretrained`, as what `save_pretrained` writes of a
sparse model (checkpoint.py), and compared again.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.errors import FormatError, SuiteError
from sparsebench.formats._format import require
from sparsebench.harness.models.pruning import checkpoint
from sparsebench.harness.models.pruning.compressed import (
    BITMASK,
    HALF,
    TO_16_BITS,
    Checkpoint,
    StoredWeight,
    is_two_four,
)
from sparsebench.harness.models.pruning.experts import (
    Experts,
    experts_of,
    in_two_four,
    require_two_four,
)
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
from sparsebench.kernels.nn import BitmapLinear, SparseExperts, SpenseGatedMLP, SpenseLinear
from sparsebench.results.model_files import DenseWeights
from sparsebench.results.run.store import new_directory, write_json

E4M3 = torch.float8_e4m3fn
SHARD_BYTES = 4 * 10**9
_Layer = SparseExperts | SpenseGatedMLP | SpenseLinear | BitmapLinear
MERGED = "linear layers whose weights transformers merges or splits"
COMPRESSED = "compressed weights outside of linear layers"
OF_EXPERTS = "gate_up_proj", "down_proj"  # which transformers merges
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
        weights = {f"{name}.weight": name for name in self.stored.modules}
        for owner, kinds in self._experts():
            if all(file in weights for files in kinds for file in files):
                self._convert_experts(owner, [[weights.pop(f) for f in files] for files in kinds])
        for owner, files in self._units(weights):
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

    def _experts(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield experts, with the names in the file of all their gates, ups and downs."""
        merged = Names(self.model).merged(self.stored.shapes)
        for name, module in [*self.model.named_modules()]:
            if (experts := Experts.of(module)) is not None:
                gate_up, down = (merged.get(f"{name}.{part}", []) for part in OF_EXPERTS)
                kinds = [*gate_up, *down]
                if [len(files) for files in kinds] == experts.sizes[:1] * 3 and len(down) == 1:
                    yield name, kinds

    def _convert_experts(self, owner: str, kinds: list[list[str]]) -> None:
        """Pack the experts of a layer, or keep them dense if some are not 2:4 in 16 bits."""
        gates, ups, downs = (
            [with_name(file, StoredWeight.read, file, self.stored, self.dtype) for file in files]
            for files in kinds
        )
        every = [*gates, *ups, *downs]
        if all(w.scale is None and w.values.dtype in HALF and is_two_four(w.values) for w in every):
            gate_up = torch.stack(
                [torch.cat([g.values, u.values]) for g, u in zip(gates, ups, strict=True)]
            )
            down = torch.stack([w.values for w in downs])
            layer = with_name(owner, self._packed_experts, owner, gate_up, down)
            if layer is not None:
                self._place(owner, layer, kinds[0][0].rsplit(".", 2)[0])
                return
        for file, weight in zip(chain(*kinds), every, strict=True):
            self.tensors[f"{file}.weight"] = with_name(file, weight.dense)

    def _packed_experts(self, name: str, gate_up: Tensor, down: Tensor) -> SparseExperts | None:
        """Return the experts of a module in 2:4; None if no kernel runs them."""
        module = deepcopy(self.model.get_submodule(name)).to(gate_up.dtype)
        experts = experts_of(module.to_empty(device=self.device))
        experts.write(gate_up.to(self.device), down.to(self.device), None)
        try:
            require_two_four(module, 0.0)
        except FormatError:
            return None
        return in_two_four(module, 0.0)

    def _units(self, weights: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield gated MLPs with their layers, then all other modules alone.

        weights  names of modules in the file by names of weights, from which these are taken

        The layers are names in the file by names in the model. What else transformers merges or
        splits has no name in the model, and comes last.
        """
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
            weight = with_name(file, StoredWeight.read, file, self.stored, self.dtype)
            self.tensors[f"{file}.weight"] = weight.dense()

    def _convert(self, owner: str, files: dict[str, str]) -> None:
        read = self.stored, self.dtype
        weights = {name: with_name(f, StoredWeight.read, f, *read) for name, f in files.items()}
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

    def _dense_reason(self, name: str, weight: StoredWeight) -> str | None:
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

    def _fits_mlp(self, name: str, weight: StoredWeight) -> bool:
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

    def _linear(self, weight: StoredWeight, bias: Tensor | None) -> SpenseLinear | BitmapLinear:
        values = weight.values.to(self.device)
        if weight.format == BITMASK:
            return BitmapLinear.from_dense(values, bias)
        return SpenseLinear.from_dense(values, bias=bias, scale=weight.scale)

    def _place(self, name: str, layer: _Layer, file: str) -> None:
        """Keep the state of a sparse layer, and put it into the model without its tensors."""
        part: Any = layer.down if isinstance(layer, SpenseGatedMLP | SparseExperts) else layer
        outside: torch.dtype = part.weight.dtype
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

"""Read the checkpoints that compressed-tensors 0.14 and older wrote, without that package.

    config.json    quantization_config (older: compression_config)
                       format            dense, float-quantized, naive-quantized, int-quantized
                       sparsity_config   format: sparse-24-bitmask, sparse-bitmask or dense
    safetensors    of a module, with the prefix `MODULE.`, or before 0.9 `MODULE.weight.`
                       shape             int64 [2, 1] or [2]: n, k
                       compressed        the elements whose bit is set, row by row
                       bitmask           uint8 [n, ceil(k / 8)]; bit i of byte j is column 8 j + i
                       row_offsets       int64 [n], sparse-bitmask only: elements before each row
                   or  weight            with its zeros
                   and weight_scale      [n, 1] or one number; weight_zero_point, input_scale

In sparse-24-bitmask two bits of every group of 4 are set, so a bit may mark a zero. Format names
are compared with those above and are never looked up. Source: compressed-tensors 0.14.0.1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.formats._format import BITS, has_value, require
from sparsebench.harness.inputs import sources
from sparsebench.harness.models.pruning.gated import with_name
from sparsebench.harness.models.pruning.layer import require_one_of
from sparsebench.harness.models.pruning.state import headers, require_finite
from sparsebench.results.files import from_json

TWO_FOUR, BITMASK = "sparse-24-bitmask", "sparse-bitmask"
SPARSE = TWO_FOUR, BITMASK, "dense"
QUANTIZED = "dense", "float-quantized", "naive-quantized", "int-quantized", "mixed-precision"
PACKED = ("shape", "compressed", "bitmask", "row_offsets")
UNUSED = ("input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "output_scale")
UNREADABLE = ("weight_packed", "weight_g_idx", "weight_global_scale", "scale_packed", "meta")
MOST = 2**24  # rows or columns
HALF = torch.float16, torch.bfloat16
TO_16_BITS = "--dtype bfloat16 multiplies by the scales and rounds"
VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})")
LAST = 0, 14  # version that wrote bitmasks; later ones of 0.x still store zeros


@dataclass
class Module:
    """The tensors of a module that make up its weight, by what they are: name in the file.

    packed  shape, compressed, bitmask and perhaps row_offsets; or only weight
    """

    packed: dict[str, str] = field(default_factory=dict)
    scale: str | None = None
    zero_point: str | None = None


class Checkpoint:
    """A local checkpoint directory.

    config   the content of config.json without the compression
    sparse   the format of the sparse weights: one of SPARSE
    modules  those with a weight, by name
    others   names of all tensors that belong to no weight, such as biases
    unused   names of tensors that only compressed-tensors uses

    Raises SuiteError, or ResultError for a file that is no JSON, if this is no such checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = from_json(folder / "config.json")
        compression = self.config.pop("quantization_config", None)
        compression = self.config.pop("compression_config", None) or compression or {}
        self.sparse = _sparse_format(folder, compression)
        self.modules, self.others, self.unused = _modules([*self.headers])
        bitmask = next((name for name, m in self.modules.items() if len(m.packed) > 1), None)
        if bitmask and self.sparse == "dense":
            expected = f"{TWO_FOUR} or {BITMASK} for the bitmask of {bitmask}"
            raise SuiteError(f"{folder}: sparsity_config.format: expected {expected}, found dense")

    @cached_property
    def headers(self) -> dict[str, tuple[Path, list[int]]]:
        """Return the file and the shape of each tensor by name. Raises SuiteError."""
        return headers(self.folder)

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of weights and of `others`, by name, without reading values.

        The shape of a bitmask is read. Raises SuiteError or FormatError.
        """
        shapes = {name: self.headers[name][1] for name in self.others}
        for name, module in self.modules.items():
            weight = module.packed.get("weight")
            shapes[f"{name}.weight"] = (
                self.headers[weight][1]
                if weight
                else with_name(name, shape_of_bitmask, self.tensor(module.packed["shape"]))
            )
        return shapes

    @property
    def size(self) -> int:
        """Return the size of the files in bytes."""
        return sum(path.stat().st_size for path in {path for path, _ in self.headers.values()})

    def tensor(self, name: str) -> Tensor:
        """Read a tensor. Raises SuiteError."""
        return sources.load_tensor(self.headers[name][0], name)

    def weight(self, module: Module) -> Tensor:
        """Return the weight with its zeros, as stored: without its scale. Raises FormatError."""
        parts = {part: self.tensor(name) for part, name in module.packed.items()}
        return parts["weight"] if "weight" in parts else unpack_bitmask(parts)

    def scale(self, module: Module) -> Tensor | None:
        """Return the factor of the stored values, fp32 [n, 1] or one. Raises FormatError."""
        if module.scale is None:
            return None
        if module.zero_point is not None:
            zero = not self.tensor(module.zero_point).float().any()
            require(zero, f"{module.zero_point}: expected 0, found an asymmetric quantization")
        return self.tensor(module.scale).float()


@dataclass(frozen=True)
class StoredWeight:
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


def unpack_bitmask(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of a bitmask and its values. Raises FormatError unless they fit."""
    shape, values, bitmask = shape_of_bitmask(parts["shape"]), parts["compressed"], parts["bitmask"]
    expected = [*shape[:-1], -(-shape[-1] // 8)]
    layout = f"{bitmask.dtype} {list(bitmask.shape)}"
    fits = [*bitmask.shape] == expected and bitmask.dtype == torch.uint8
    require(fits, f"bitmask: expected uint8 {expected}, found {layout}")
    bits = (bitmask[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    stored = bits.flatten(-2).bool()
    require(not stored[..., shape[-1] :].any(), "bitmask: expected no bit beyond the last column")
    stored = stored[..., : shape[-1]]
    counts, count = stored.sum(-1), values.numel()
    require(int(counts.sum()) == count, f"compressed: expected {int(counts.sum())}, found {count}")
    offsets = parts.get("row_offsets")
    follow = offsets is None or torch.equal(offsets.flatten(), counts.cumsum(0).flatten() - counts)
    require(follow, "row_offsets: expected the counts of the bitmask, found others")
    weight = torch.zeros(shape, dtype=values.dtype)
    whole = BITS[values.element_size()]
    weight.view(whole)[stored] = values.view(whole).flatten()
    return weight


def shape_of_bitmask(stored: Tensor) -> list[int]:
    """Return the shape of a bitmask's weight. Raises FormatError unless it is n and k."""
    shape: list[int] = stored.flatten().tolist()
    sizes = all(isinstance(size, int) and 0 < size <= MOST for size in shape)
    require(sizes and len(shape) in (1, 2), f"shape: expected n and k, found {shape}")
    return shape


def _modules(names: list[str]) -> tuple[dict[str, Module], list[str], list[str]]:
    """Group tensors by module; return modules, the other tensors, and those that are not used."""
    modules: dict[str, Module] = {}
    others, unused = [], []
    of_bitmasks = (name for name in names if name.endswith((".bitmask", ".compressed")))
    compressed_names = {name.rpartition(".")[0] for name in of_bitmasks}
    for name in names:
        prefix, _, part = name.rpartition(".")
        owner = prefix.removesuffix(".weight") if prefix in compressed_names else prefix
        module = modules.setdefault(owner, Module())
        if (part in PACKED and prefix in compressed_names) or part == "weight":
            module.packed[part] = name
        elif part == "weight_scale":
            module.scale = name
        elif part == "weight_zero_point":
            module.zero_point = name
        elif part in UNUSED:
            unused.append(name)
        elif part in UNREADABLE:
            raise SuiteError(f"{name}: expected values of 8 bits or more, found packed ones")
        else:
            others.append(name)
    for name, module in modules.items():
        missing = [part for part in PACKED[:3] if part not in module.packed]
        if len(missing) < 3 and ("weight" in module.packed or missing):
            expected = f"{', '.join(PACKED[:3])} and no weight"
            raise SuiteError(f"{name}: expected {expected}, found {', '.join(module.packed)}")
        if module.scale and not module.packed:
            raise SuiteError(f"{name}: expected a weight for its scale, found none")
    return {name: m for name, m in modules.items() if m.packed}, others, unused


def _sparse_format(folder: Path, compression: Any) -> str:
    """Return the sparse format. Raises SuiteError for anything that cannot be read."""
    where = f"{folder / 'config.json'}: quantization_config"
    if not isinstance(compression, dict):
        raise SuiteError(f"{where}: expected an object, found {compression!r:.60}")
    method = compression.get("quant_method", "compressed-tensors")
    require_one_of(f"{where}.quant_method", method, ("compressed-tensors",))
    if compression.get("transform_config"):
        raise SuiteError(f"{where}.transform_config: expected none, found one")
    sparsity = compression.get("sparsity_config") or {}
    groups = compression.get("config_groups") or {}
    if not isinstance(sparsity, dict) or not isinstance(groups, dict):
        raise SuiteError(f"{where}: expected objects in sparsity_config and config_groups")
    formats = {"format": compression.get("format")}
    formats |= {
        f"config_groups.{name}.format": group.get("format")
        for name, group in groups.items()
        if isinstance(group, dict)
    }
    for key, quantized in formats.items():
        accepted = (*SPARSE[:2], *QUANTIZED) if key == "format" else QUANTIZED
        require_one_of(f"{where}.{key}", quantized or "dense", accepted)
    sparse = sparsity.get("format") or (formats["format"] if formats["format"] in SPARSE else None)
    form = require_one_of(f"{where}.sparsity_config.format", sparse or "dense", SPARSE)
    _require_version(where, compression.get("version") or "0.14", form)
    return form


def _require_version(where: str, version: object, form: str) -> None:
    """Raise SuiteError unless a version of compressed-tensors wrote this format."""
    parts = VERSION.match(version) if isinstance(version, str) else None
    numbers = tuple(map(int, parts.groups())) if parts else (1, 0)
    if numbers > (LAST if form != "dense" else (0, MOST)):
        expected = f"0.{LAST[1]} or older for {form}" if form != "dense" else "0.x"
        raise SuiteError(f"{where}.version: expected {expected}, found {version!r:.40}")


def is_two_four(weight: Tensor) -> bool:
    """Return whether this is a matrix [n, k] with at most 2 values in every 4 of a row."""
    if weight.dim() != 2 or weight.shape[1] % 4 or not weight.numel():
        return False
    stored = has_value(weight.view(BITS[weight.element_size()]))
    return int(stored.unflatten(1, (-1, 4)).sum(-1, dtype=torch.uint8).max()) <= 2

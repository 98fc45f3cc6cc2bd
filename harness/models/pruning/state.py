"""Match the tensors of a checkpoint with the state of a model of transformers.

    in the file                             in the model
    model.layers.0.mlp.up_proj.weight       model.language_model.layers.0.mlp.up_proj.weight
    model.layers.0.mlp.experts.1.w1.weight  model.layers.0.mlp.experts.gate_up_proj

The rules are those of `from_pretrained`: transformers renames tensors, adds or removes the prefix
of the base model, and merges or splits some, such as the weights of experts. `load_complete`
compares names and shapes, also on the meta device.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.formats._format import require
from sparsebench.harness.inputs import sources
from sparsebench.harness.models.reporting import transformers_for
from sparsebench.results.files import from_json
from sparsebench.results.run.store import write_json

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"


class Names:
    """The names in a model, by the names in a file.

    model  of transformers; its current layers decide about the prefix of the base model
    """

    def __init__(self, model: Any) -> None:
        mapping = import_module("transformers.conversion_mapping")
        self.loading = import_module("transformers.core_model_loading")
        rules = mapping.get_model_conversion_mapping(model)
        self.renamings = [rule for rule in rules if isinstance(rule, self.loading.WeightRenaming)]
        self.merges = [rule for rule in rules if isinstance(rule, self.loading.WeightConverter)]
        self.prefix, self.state = model.base_model_prefix, model.state_dict()

    def in_model(self, name: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern by which the tensor is merged or split."""
        options = self.prefix, self.state
        rename = self.loading.rename_source_key
        renamed, pattern = rename(name, self.renamings, self.merges, *options)
        if renamed not in self.state and name in self.state:
            renamed, pattern = rename(name, [], [], *options)
        return renamed, pattern

    def unchanged(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names in the file of tensors that are only renamed, by those in the model.

        Raises FormatError if two tensors have one name in the model.
        """
        files: dict[str, str] = {}
        for name in names:
            target, pattern = self.in_model(name)
            if target in self.state and pattern is None:
                other = files.setdefault(target, name)
                require(other == name, f"{target}: expected one tensor, found {other} and {name}")
        return files

    def merged(self, names: Iterable[str]) -> dict[str, list[list[str]]]:
        """Return the names in the file of tensors that are merged, by those in the model.

        There is a list for each kind of tensor, such as gate and up, in the order in which they
        are joined. It is in the order of the numbers in the names, such as those of experts.
        Raises FormatError if a kind lacks some.
        """
        order = {pattern: i for i, pattern in enumerate(self._patterns())}
        kinds: dict[str, dict[str, list[str]]] = {}
        for name in names:
            target, pattern = self.in_model(name)
            if target in self.state and pattern is not None:
                kinds.setdefault(target, {}).setdefault(pattern, []).append(name)
        merged: dict[str, list[list[str]]] = {}
        for target, parts in kinds.items():
            few, many = min(parts.values(), key=len), max(parts.values(), key=len)
            actual = f"{len(many)} such as {many[0]} and {len(few)} such as {few[0]}"
            equal = len(few) == len(many)
            require(equal, f"{target}: expected as many tensors of each kind, found {actual}")
            lists = (parts[pattern] for pattern in sorted(parts, key=order.__getitem__))
            merged[target] = [sorted(each, key=_numbers) for each in lists]
        return merged

    def _patterns(self) -> Iterator[str]:
        for rule in self.merges:
            yield from rule.source_patterns


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def on_meta(
    source: Path, folder: Path, content: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> nn.Module:
    """Return the model of a checkpoint on the meta device. Raises what `load_complete` does.

    source   the checkpoint
    folder   where its config.json is written, with this content
    content  of config.json
    shapes   of the tensors, by their names in the file
    """
    write_json(folder / CONFIG, content)
    transformers, names = transformers_for(source), content.get("architectures")
    with usable(source), quiet(transformers):
        options = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(folder, **options)
    for name in names if isinstance(names, list) else ():
        kind: Any = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            state = {key: torch.empty(s, device="meta") for key, s in shapes.items()}
            return load_complete(
                *(kind, source, None),
                config=config,
                state_dict=state,
                device_map={"": "meta"},
                dtype=torch.float32,
            )
    actual = f"{names!r:.80}"
    raise SuiteError(f"{source}: expected architectures of transformers, found {actual}")


def load_complete(kind: Any, source: Path, folder: Path | None, **options: Any) -> nn.Module:
    """Load a model. Raises SuiteError if a tensor is missing, left over or of another shape.

    source  what an error names
    folder  what to load, if the options have no state_dict
    """
    with usable(source), quiet(transformers_for(source)):
        model, report = kind.from_pretrained(
            folder,
            **options,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    loaded: nn.Module = model
    for name, actual, expected in sorted(report["mismatched_keys"])[:1]:
        sizes = f"expected {[*expected]}, found {[*actual]}"
        raise SuiteError(f"{source}: {name}: {sizes}")
    problems = {
        "missing_keys": ("", f" of {type(loaded).__name__}"),
        "unexpected_keys": ("a place for ", f" in {type(loaded).__name__}"),
    }
    for key, (before, after) in problems.items():
        if names := sorted(report[key]):
            more = f", nor {before and 'for '}{len(names) - 1} others" if len(names) > 1 else ""
            expected = f"{before}{names[0]}{after}"
            raise SuiteError(f"{source}: expected {expected}, found none{more}")
    return loaded


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise FormatError if a tensor has NaN or infinity."""
    values = tensor.float() if tensor.itemsize == 1 and tensor.is_floating_point() else tensor
    expected = f"{name}: expected finite values in {tensor.dtype}"
    require(bool(values.isfinite().all()), f"{expected}, found NaN or infinity")


def headers(folder: Path) -> dict[str, tuple[Path, list[int]]]:
    """Return the file and the shape of each tensor of a checkpoint by name. Raises SuiteError."""
    places = _index(folder)
    tensors: dict[str, tuple[Path, list[int]]] = {}
    for file in sorted({*places.values()}) or [WHOLE]:
        path = folder / file
        for name, (shape, _) in sources.header(path).items():
            other, _ = tensors.setdefault(name, (path, shape))
            if other != path:
                where = f"{other.name} and {file}"
                raise SuiteError(f"{folder}: expected {name} in one file, found {where}")
    for name, file in places.items():
        if name not in tensors or tensors[name][0].name != file:
            raise SuiteError(f"{folder / file}: expected {name} as in the index, found none")
    return tensors


def _index(folder: Path) -> dict[str, str]:
    """Return the name of the file of each tensor; none without an index. Raises SuiteError."""
    index = folder / INDEX
    if not index.exists():
        return {}
    places = from_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise SuiteError(f"{index}: expected a weight_map of files, found {places!r:.60}")
    outside = [name for name in places.values() if name != Path(str(name)).name or not name]
    if outside:
        raise SuiteError(f"{index}: expected files beside it, found {outside[0]!r:.60}")
    names = sorted({*places.values()})
    if absent := [name for name in names if not (folder / name).is_file()]:
        more = f", nor {len(absent) - 1} others" if len(absent) > 1 else ""
        raise SuiteError(f"{index}: expected {absent[0]} beside it, found none{more}")
    if WHOLE not in names and (folder / WHOLE).exists():
        raise SuiteError(f"{folder}: expected {WHOLE} or its index, found both")
    return places


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turn any error into a SuiteError with one line that the files are not a usable model."""
    try:
        yield
    except Exception as error:
        detail = " ".join(str(error).split())[:200]
        if not isinstance(error, SparsebenchError):
            detail = f"{type(error).__name__}: {detail}"
        raise SuiteError(f"{path}: expected a usable model; found {detail}") from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence the logs, progress bars and warnings of transformers."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()

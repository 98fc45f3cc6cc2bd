"""Operands from files, as a suite's `source: {file: GLOB, tensor: GLOB}` names them.

    file    pattern files or safetensors files below --data
    tensor  their tensors; for an op that takes recorded operands, such as ffn, groups of tensors

    sources_of        each file and tensor that match, with the digest of the file
    fields_of_source  the fields that follow: sizes, and the level of a pattern file
    require_enough    no problem has more tokens than were recorded

Every error is a SuiteError that says where in the suite, or in which file.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from sparsebench._discovery import did_you_mean
from sparsebench.errors import SuiteError
from sparsebench.harness.inputs import sources
from sparsebench.harness.ops._op import Op
from sparsebench.results import files
from sparsebench.results.record import Source

HIGHEST = 1 - 1e-6
"""The highest level of a problem: a pattern of a few entries, or of none, rounds to 1."""


def sources_of(where: str, source: Any, data: Path | None, op: Op) -> Iterator[Source | None]:
    """Yield a Source for each file and tensor that match, or None if there is no source."""
    if source is None:
        yield None
        return
    if not isinstance(source, dict) or not {"file"} <= source.keys() <= {"file", "tensor"}:
        raise SuiteError(f"{where}.source: expected {{file: GLOB, tensor: GLOB}}, found {source!r}")
    if data is None:
        raise SuiteError(f"{where}.source: expected --data DIR, the folder of {source['file']}")
    for path in _matches(f"{where}.source", source["file"], data):
        for tensor in _tensors(path, source.get("tensor"), op):
            yield Source(str(path.relative_to(data)), sources.sha256(path), tensor)


def _matches(where: str, glob: Any, data: Path) -> list[Path]:
    outside = not isinstance(glob, str) or PurePath(glob).is_absolute() or ".." in glob.split("/")
    if outside or not glob.strip("/."):
        raise SuiteError(f"{where}: expected a GLOB of files below --data, found {glob!r}")
    expected = f"{where}: expected files {glob} in {data}"
    try:
        paths = sorted(path for path in data.glob(glob) if path.is_file())
    except (OSError, ValueError) as error:
        raise SuiteError(f"{expected}, found {error}") from error
    if not paths:
        raise SuiteError(f"{expected}, found none")
    for path in paths:
        if not files.utf8(str(path)):
            raise SuiteError(f"{where}: expected names in UTF-8, found {str(path)!a}")
    return paths


def _tensors(path: Path, glob: Any, op: Op) -> list[str | None]:
    """Return the tensors of a safetensors file that match; [None] for a pattern file."""
    if glob is None:
        return [None]
    if not isinstance(glob, str):
        raise SuiteError(f"source.tensor: expected a GLOB, found {glob!r}")
    names = sources.groups(path, op.operands) if op.recorded else sources.tensor_names(path)
    matches: list[str | None] = [name for name in names if fnmatchcase(name, glob)]
    if not matches:
        group = f"a group {glob!r} of {', '.join(op.operands)}"
        what, hint = group if op.recorded else f"a tensor {glob!r}", did_you_mean(glob, names)
        raise SuiteError(f"{path}: expected {what}, found no match{hint}")
    return matches


def fields_of_source(op: Op, source: Source | None, data: Path | None) -> dict[str, Any]:
    """Return the fields that a source determines: sizes, and the level of a pattern file."""
    if source is None:
        return {}
    if op.recorded and source.tensor is not None:
        return _recording_fields(op, source, sources.locate(source, data))
    if len(op.weights) != 1:
        raise SuiteError(f"source: expected an op with one weight, found {', '.join(op.weights)}")
    path = sources.locate(source, data)
    *sides, level = sources.shape_and_level(path, source.tensor)
    names = op.operands[op.weights[0]].shape
    # The cells of a mask are fewer than its tokens.
    from_source: dict[str, Any] = {} if op.mask else dict(zip(names, sides, strict=True))
    return from_source | ({} if level is None else {"sparsity": min(round(level, 6), HIGHEST)})


def _recording_fields(op: Op, source: Source, path: Path) -> dict[str, Any]:
    """Return the sizes of a group's weights, and the fields computed from its operands."""
    assert op.recorded
    tensors = {
        name: sources.load_weights(path, sources.member(source, name)) for name in op.operands
    }
    sizes: dict[str, int] = {}
    for name, operand in op.operands.items():
        operand_sizes = dict(zip(operand.shape, tensors[name].shape, strict=True))
        if operand.role == "activation":
            del operand_sizes[operand.shape[0]]  # tokens: a problem names its own number
        for field, size in operand_sizes.items():
            if sizes.setdefault(field, size) != size:
                expected = f"{sources.member(source, name)} with {field} = {sizes[field]}"
                raise SuiteError(f"{path}: expected {expected}; found {size}")
    return sizes | op.recorded(tensors)


def require_enough(
    where: str, op: Op, fields: Mapping[str, Any], source: Source | None, data: Path | None
) -> None:
    """Raise SuiteError if a problem has more tokens than were recorded."""
    if source is None or not op.recorded:
        return
    path = sources.locate(source, data)
    for name in op.activations:
        field = op.operands[name].shape[0]
        tokens, *_ = sources.shape_and_level(path, sources.member(source, name))
        if tokens < fields[field]:
            expected = f"expected up to {tokens}, as many as {source.label} has"
            raise SuiteError(f"{where}.{field}: {expected}; found {fields[field]}")

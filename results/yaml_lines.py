"""Lines of a YAML document: of one of its parts, and of the first error of its model."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from sparsebench._discovery import did_you_mean


def first_error(error: ValidationError, root: yaml.Node, keys: Collection[str]) -> str:
    """Write the first error: its line, its place, what was expected and found.

    An unknown key comes before a missing one, because it may be that key misspelt. `keys` are all
    that a document may have.
    """
    first = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    path = [part for part in first["loc"] if not _is_branch(part)]
    place = ".".join(map(str, path)) or "top"
    line = f"{line_of(root, path)}: {place}"
    if first["type"] == "missing":
        return f"{line}: expected a value, found none"
    if first["type"] == "extra_forbidden":
        return f"{line}: unknown key{did_you_mean(str(path[-1]), keys)}"
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    actual = "" if first["type"] == "value_error" else f"; found {str(first['input'])[:60]!r}"
    return f"{line}: expected {expected}{actual}"


def _is_branch(part: str | int) -> bool:
    """Return whether pydantic added this part to a place to name a type of a union."""
    return part in ("str", "int", "float", "bool") or (isinstance(part, str) and "[" in part)


def line_of(node: yaml.Node, path: Sequence[str | int]) -> int:
    """Return the line of a part of a document; if it is missing, of its nearest parent."""
    line = node.start_mark.line
    for part in path:
        parts: Mapping[Any, tuple[int, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            parts = {key.value: (key.start_mark.line, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            parts = {i: (item.start_mark.line, item) for i, item in enumerate(node.value)}
        if part not in parts:
            break
        line, node = parts[part]
    return line + 1

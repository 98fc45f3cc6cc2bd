"""What the commands about models share: options, files and tables."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from math import nan
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from sparsebench.errors import SuiteError


def transformers_for(path: Path) -> Any:
    """Import transformers. Raises SuiteError with the path if it is missing."""
    try:
        return import_module("transformers")
    except ImportError as error:
        expected = "the package transformers (pip install 'sparsebench[models]')"
        raise SuiteError(f"{path}: expected {expected}; found none") from error


def numbers(option: str, text: str, expected: str, fits: Callable[[float], bool]) -> list[float]:
    """Parse a list such as `0.8,0.9`. Raises SuiteError unless all numbers fit."""
    try:
        parsed = [float(part) for part in text.split(",")]
    except ValueError:
        parsed = [nan]
    if not all(map(fits, parsed)):
        raise SuiteError(f"{option}: expected {expected}; found {text!r}")
    return parsed


def require_writable(path: Path | None) -> None:
    """Raise SuiteError unless an output file, or a new folder, can be written: before the work."""
    if not path:
        return
    if path.is_dir():
        raise SuiteError(f"{path}: expected a new folder or a file to write, found a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        actual = "one that is read-only" if path.parent.is_dir() else f"no {path.parent}"
        raise SuiteError(f"{path}: expected a folder to write into; found {actual}")


def sheet(title: str, left: Sequence[str], right: Sequence[str], last: Sequence[str] = ()) -> Table:
    """Return an empty table with columns aligned left, then right, then left again."""
    aligned = (Column(name, justify="right") for name in right)
    columns: list[str | Column] = [*left, *aligned, *last]
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=None)

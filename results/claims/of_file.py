"""What commands wrote that claims are judged by, beside runs: one file each, known by its schema.

sparsebench/widths@1    `train-lm --pattern`      trained.py
sparsebench/whole@1     `whole`                   whole.py
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.results import whole as wholes
from sparsebench.results import widths
from sparsebench.results.claims.cells import Cell
from sparsebench.results.claims.schema import Test
from sparsebench.results.claims.trained import trained
from sparsebench.results.claims.whole import whole
from sparsebench.results.files import JSON_BYTES, content
from sparsebench.results.whole import Whole
from sparsebench.results.widths import Widths

READ: dict[str, Callable[[Path], Widths | Whole]] = {
    widths.SCHEMA: widths.read,
    wholes.SCHEMA: wholes.read,
}


def read_file(path: Path) -> Widths | Whole:
    """Read a file; ResultError says what is wrong with it."""
    try:
        data = json.loads(content(path, JSON_BYTES))
        schema = data["schema"] if isinstance(data, dict) else None
    except (ValueError, KeyError):
        schema = None
    if schema not in READ:
        raise ResultError(f"{path}: expected {' or '.join(READ)}; found {str(schema)[:60]!r}")
    return READ[schema](path)


def of_file(test: Test, found: Widths | Whole, name: str) -> Iterator[Cell]:
    """Yield the cells of a test in a file; `name` is the file's."""
    if isinstance(found, Widths):
        yield from trained(test, found, name)
    else:
        yield from whole(test, found, name)

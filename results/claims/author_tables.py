"""Tables that authors have published as CSV: their rows, beside ours and never mixed with them.

    tables:                               a claim's list
      - of: H100, bf16, Qwen2.5-7B        where and what the authors measured
        file: results/h100/bf16.csv       below a folder that the user names, or below one in it
        columns: [M, cuBLAS, sparse]      the header; a file with any other header is refused
        show: {tokens: M, "2:4": sparse}  our heading, and the column
        only: {batch: "1"}                rows with these values; default: all

Verdicts never read them. The files belong to their authors, so none is part of this package.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.results import files
from sparsebench.results.claims.schema import Table

CSV_BYTES = 2**22
MOST_ROWS = 200


@dataclass(frozen=True)
class AuthorTable:
    """The rows of a file that a claim shows, in the order of `table.show`."""

    table: Table
    rows: Sequence[Sequence[str]]


def read_tables(tables: Sequence[Table], folder: Path) -> list[AuthorTable]:
    """Return the tables whose files are below a folder, a checkout or a folder of checkouts.

    Raises ResultError if a file has other columns than the claim names, or a row of another length.
    """
    present = []
    for table in tables:
        places = (at / table.file for at in (folder, *sorted(folder.glob("*/"))))
        if file := next((place for place in places if place.is_file()), None):
            present.append(AuthorTable(table, _rows(table, file)))
    return present


def _rows(table: Table, file: Path) -> list[list[str]]:
    text = files.text(file, CSV_BYTES, ResultError)
    header, *lines = [*csv.reader(text.splitlines())] or [[]]
    if header != table.columns:
        expected, actual = ", ".join(table.columns), ", ".join(header)
        raise ResultError(f"{file}: expected the columns {expected}; found {actual or 'none'}")
    rows = []
    for number, line in enumerate(lines, 2):
        if len(line) != len(header):
            raise ResultError(f"{file}:{number}: expected {len(header)} values, found {len(line)}")
        values = dict(zip(header, line, strict=True))
        if all(values[name] == value for name, value in table.only.items()):
            rows.append([values[column] or "–" for column in table.show.values()])
    if not 0 < len(rows) <= MOST_ROWS:
        raise ResultError(f"{file}: expected 1 to {MOST_ROWS} rows to show, found {len(rows)}")
    return rows

"""Published cells, and a search over them: the fastest contender of each format in each problem.

    lines of cards ─> cells   a cell for each problem, row of a grid and GPU, of the run that counts
                         ├─> results/published/cells.json.gz   for `sparsebench find` and `compare`
                         └─> cells.js                       for the page find.html of a site
    "2:4 14336x4096 m=64 H100" ─> find ─> the cells that fit every word; without one, the nearest
                                          with what differs, and the command that measures it

A word is FIELD=VALUE, a size n × k, a percentage of zeros, a number that some field has, or a term:
of a GPU, an op, a dtype, a format or a pattern, a kernel, a suite. Words that make up a row name
its format: 2:4 is neither half 2:4 nor 2:4 int4. templates/find.js is the same search for pages:
it reads MISFITS, and a test compares both.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf, log2
from pathlib import Path
from typing import Any, Final

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from sparsebench._discovery import did_you_mean
from sparsebench._gpus import unknown_gpu
from sparsebench.errors import ResultError
from sparsebench.reports.grids import WEIGHTS
from sparsebench.reports.tables import Table
from sparsebench.results.files import parse_json, unzip
from sparsebench.results.formatting import PATTERNS, amount, between, duration
from sparsebench.results.tables.contests import multiplies_zeros
from sparsebench.results.tables.frame import records

SCHEMA: Final = "sparsebench/cells@2"
FILE = "cells.json.gz"
BYTES = 2**25  # unzipped; the published cells have 3 MB
MOST = 12
MISFITS = {"gpu": 3.0, "op": 4.0, "dtype": 2.0, "format": 3.5}
MISFITS |= dict.fromkeys(("kind", "kernel", "model", "run"), 8.0)
"""How far away a cell is without a term; without a value, 4, and an octave of a number is 1."""

NUMBERS = ["gpu", "op", "m", "shape", "problem_id", "row"]
NUMBERS += ["median_us", "gain", "zeros_gain", "over"]
"""What `compare` needs of a cell (workloads.py)."""

CellRecord = Mapping[str, Any]
"""A cell, as `cells` returns it."""


@dataclass(frozen=True)
class SearchResult:
    """The cells that fit a query, or the nearest one, with what differs and what measures it.

    command  "" if cells fit, or if no command can be derived from the nearest cell
    """

    query: str
    cells: Sequence[CellRecord]
    differs: Sequence[str] = ()
    command: str = ""


def cells(lines: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a cell for each problem, row and GPU of the lines of cards, dense ones left out."""
    best = that_count(lines).sort_values(["gpu", "problem", "row", "run"])
    return [_cell(line) for line in records(best.assign(zeros=multiplies_zeros(best)))]


def that_count(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest sparse line of each problem, row and GPU, from the run that counts."""
    return best_lines(lines[lines.side != "dense"], ["gpu", "problem_id", "row"])


def best_lines(sparse: pd.DataFrame, cell: list[str], first: Sequence[str] = ()) -> pd.DataFrame:
    """Return the fastest of some lines in each cell (their values of columns), from a single run.

    Lines that have the columns `first` come first, then verdicts, then runs with the kernel that is
    the fastest of all runs, then those with the most contenders, the most processes, the latest.
    """
    fast = sparse.assign(rate=-sparse.median_us)
    fast = fast.sort_values(["verdict", "rate"], ascending=False, ignore_index=True)
    names, columns = fast.name.str.removesuffix(" (by default)"), [fast[each] for each in cell]
    lead = names == names.groupby(columns, dropna=False).transform("first")
    lead = lead.groupby([fast.run, *columns], dropna=False).transform("any")
    fast = fast.assign(lead=lead, rivals=fast.groupby(["run", "problem_id"]).run.transform("size"))
    order = [*first, "verdict", "lead", "rivals", "processes", "day", "gain", "rate"]
    return fast.sort_values(order, ascending=False, kind="stable").drop_duplicates(cell)


def _cell(line: Mapping[Any, Any]) -> dict[str, Any]:
    pattern = line["pattern"]
    terms = {
        "gpu": line["gpu"],
        "op": line["op"],
        "dtype": line["dtype"],
        "kind": " ".join([line["row"], line["kind"], pattern, PATTERNS.get(pattern, "")]),
        "kernel": f"{line['kernel']} {line['name']}",
        "model": "" if line["shape"][:1].isdigit() and " × " in line["shape"] else line["shape"],
        "run": f"{line['suite']} {line['name_of_run']}",
    }
    gain = between(line["gain"], line["low"], line["high"])
    over = f" {WEIGHTS[line['over']]}" if line["zeros"] and line["over"] in WEIGHTS else ""
    dense = f" over dense{over} ({line['dense_name']}, {duration(line['dense_us'])})"
    has_gain = pd.notna(line["gain"])
    return {
        "head": f"{line['row']}: {line['problem']}, on {line['gpu']}",
        "row": line["row"].lower(),
        "answer": f"{gain}{dense}" if has_gain else "no dense contender has a time",
        "speedup": gain if has_gain else "",
        "settled": bool(line["decided"]),
        "gain": float(line["gain"]) if has_gain else 0.0,
        "winner": f"{line['name']}, {duration(line['median_us'])}",
        "configuration": line["configuration"],
        "measured": f"{amount(int(line['processes']), 'process')}, {line['day']}",
        "verdict": bool(line["verdict"]),
        "run": line["run"],
        "case": line["case_id"],
        "commands": [command for command in (line["again"], line["trial"]) if command],
        "fields": line["fields"],
        "terms": {name: _terms(str(text)) for name, text in terms.items()},
        "numbers": {name: None if pd.isna(line[name]) else line[name] for name in NUMBERS},
    }


def _terms(text: str) -> str:
    return " ".join(dict.fromkeys(re.findall(r"[^\s,()]+", text.lower())))


def text_of(every: Iterable[Mapping[str, Any]]) -> str:
    """Return the JSON of cells, with a line for each."""
    lines = ",\n".join(json.dumps(cell, ensure_ascii=False) for cell in every)
    return f'{{"schema": "{SCHEMA}", "cells": [\n{lines}\n]}}\n'


def script(every: Sequence[Mapping[str, Any]]) -> str:
    """Return cells.js; no text in it can end a script element."""
    shown = [{name: cell[name] for name in cell if name != "numbers"} for cell in every]
    data = json.dumps({"misfits": MISFITS, "most": MOST, "cells": shown}, ensure_ascii=False)
    return f"const CELLS = {data.replace('<', chr(92) + 'u003c')};\n"


@cache
def packaged_cells() -> Sequence[CellRecord]:
    """Return the published cells; raises ResultError if this installation has none."""
    file = Path(str(files("sparsebench.results"))) / "published" / FILE
    data = parse_json(unzip(file, BYTES).decode())
    if data.get("schema") != SCHEMA:
        raise ResultError(f"{file}: expected schema {SCHEMA}, found {data.get('schema')}")
    every: Sequence[CellRecord] = data["cells"]
    return every


def numbers() -> pd.DataFrame:
    """Return the published cells with the columns of NUMBERS."""
    return pd.DataFrame([cell["numbers"] for cell in packaged_cells()])


def find(every: Sequence[CellRecord], query: str) -> SearchResult:
    """Return the cells that fit every word of a query, verdicts with the largest gain first.

    Raises ResultError for a query without words, and for a word that fits no cell.
    """
    words = [QueryWord.of(text, every) for text in query_words(query)]
    if not words:
        raise ResultError("find: expected words such as 2:4 14336x4096 m=64 H100, found none")
    words += _format(words, every)
    ranked = sorted(every, key=lambda cell: _distance(cell, words))
    if fits := [cell for cell in ranked if not any(word.misfit(cell) for word in words)]:
        return SearchResult(query, fits)
    nearest = ranked[0]
    misfits = [word for word in words if word.misfit(nearest)]
    differs = [word.difference(nearest) for word in misfits]
    return SearchResult(query, [nearest], differs, _command(nearest, misfits))


def _format(words: Sequence["QueryWord"], every: Sequence[CellRecord]) -> list["QueryWord"]:
    """Return a word for the format that a query names, the longest row of its terms, or none.

    Cells of the format have all its kinds: `2:4 spense_hidden`, a pattern of half 2:4, names none.
    """
    kinds = {word.value for word in words if word.name == "kind"}
    pairs = {(cell["row"], cell["terms"]["kind"]) for cell in every}
    rows = sorted(row for row, terms in pairs if {*row.split()} <= kinds <= {*terms.split()})
    return [QueryWord("format=", "format", max(rows, key=len))] if rows else []


def query_words(query: str) -> list[str]:
    """Return the words of a query: `64 tokens` is m=64, `4096 × 512` is n=4096 and k=512."""
    text = re.sub(r"(\d)\s*[x×]\s*(?=\d)", r"\1x", query.lower()).replace(",", " ")
    text = re.sub(r"(\d+) tokens?\b", r"m=\1", text)
    text = re.sub(r"(?<![=\w])(\d{3,})x(\d{3,})\b", r"n=\1 k=\2", text)
    text = re.sub(r"([\d.]+) ?%", lambda share: f"sparsity={float(share[1]) / 100:.6g}", text)
    return text.split()


@dataclass(frozen=True)
class QueryWord:
    """A word of a query: FIELD=VALUE, a term, or a number.

    name  the field, or the first terms of a cell that have such a term; "" for a number
    """

    text: str
    name: str
    value: str

    @classmethod
    def of(cls, text: str, every: Sequence[CellRecord]) -> "QueryWord":
        """Return the word of a text; raises ResultError if no cell has such a field or term."""
        name, _, value = text.partition("=")
        if is_field := value and any(name in cell["fields"] for cell in every):
            word = cls(text, name, value)
        else:
            of_term = [n for n in MISFITS for cell in every if _has(cell, n, value or text)]
            word = cls(text, name if value else next(iter(of_term), ""), value or text)
        is_number = is_field and _number(value) is not None
        if is_number or any(not word.misfit(cell) for cell in every):
            return word
        terms = {t for cell in every for terms in cell["terms"].values() for t in terms.split()}
        expected = "find: expected a GPU, an op, a format, a kernel, 4096x4096, m=64 or 90 %"
        if hint := unknown_gpu(text, ()):
            raise ResultError(f"{expected}; found {text!r}{hint}")
        close = did_you_mean(text, sorted(terms))
        raise ResultError(f"{expected}; found {text!r}, which no published cell has{close}")

    def misfit(self, cell: CellRecord) -> float:
        """Return 0 if a cell fits, or how far away it is."""
        cost, actual = MISFITS.get(self.name, 1.0), self.actual(cell)
        names, values = cell["terms"], cell["fields"].values()
        if "=" in self.text:
            names, values = [self.name], [actual.lower()]
        if any(_has(cell, name, self.value) for name in names) or self.value in values:
            return 0.0
        a, b = _number(self.value), _number(actual)
        return cost * (abs(log2(a / b)) if a and b else 4.0 if self.name not in MISFITS else 1.0)

    def actual(self, cell: CellRecord) -> str:
        """Return what a cell has as the format or the field that this word names, or ""."""
        return str(cell["row"] if self.name == "format" else cell["fields"].get(self.name, ""))

    def difference(self, cell: CellRecord) -> str:
        """Say what a cell has in place of this word."""
        actual = self.actual(cell) or cell["terms"].get(self.name) or "another problem"
        return f"{self.name} {actual} in place of {self.value}" if self.name else f"no {self.text}"


def _has(cell: CellRecord, name: str, term: str) -> bool:
    return term in cell["terms"].get(name, "").split()


def _distance(cell: CellRecord, words: Sequence[QueryWord]) -> tuple[float, bool, float]:
    """Order cells: by misfit, then verdicts first, then by the largest gain."""
    return sum(word.misfit(cell) for word in words), not cell["verdict"], -cell["gain"]


def _command(nearest: CellRecord, misfits: Sequence[QueryWord]) -> str:
    """Return the trial of a cell with the values of words that it does not fit, or "".

    Kernels and options differ by op and by format: there, a trial of the nearest cell says nothing.
    """
    trial = str(nearest["commands"][-1])
    for word in misfits:
        if word.name != "gpu":
            trial, count = re.subn(rf" {word.name}=\S+", f" {word.name}={word.value}", trial)
            if not count or word.name in ("op", "format"):
                return ""
    return trial if trial.startswith("sparsebench try") else ""


def _number(text: str) -> float | None:
    """Return a finite number from 0 on, or None for another text: distances are ratios."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < inf else None


@dataclass(frozen=True)
class SearchAnswer:
    """SearchResult for a rich console: the first cell in full, the others in a line each."""

    result: SearchResult

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        first, *others = self.result.cells
        if self.result.differs:
            differs = "; ".join(self.result.differs)
            yield Text(f"Not measured. The nearest cell has {differs}.", "bold yellow")
        yield Text(first["head"], "bold")
        yield Text(first["answer"], "bold")
        doubts = ["a look"] * (not first["verdict"]) + ["not settled"] * (not first["settled"])
        yield Text(", ".join([first["winner"], first["measured"], *doubts, first["run"]]))
        yield Text(f"configuration: {first['configuration'] or 'none'}", "dim")
        if others:
            yield Text()
            lines = [[c["speedup"], c["winner"], c["head"]] for c in others]
            title, columns = f"{len(others) + 1} cells fit", ["speedup", "winner", "cell"]
            table = Table(columns=columns, lines=lines, title=title, words=columns)
            yield table.shortened(MOST - 1, "more: add a word")

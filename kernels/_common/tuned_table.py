"""Tables of tuned configurations: results of a long search on a kind of GPU (`sparsebench tune`).

    $SPARSEBENCH_TUNED, else $XDG_CACHE_HOME/sparsebench/tuned     tables of the user
    kernels/tuned                                                  tables of the package
      └─ sm90_132.json                   a table: compute capability, number of multiprocessors

An entry has the fastest configuration of a kernel at some sizes. A problem takes an entry with

    the same kernel, dtype and block      and the caller's path, if the caller names one
    the same code of the kernel           by a digest without comments, docstrings and imports
    m, n, k and density within 2x         the nearest: least sum of |log2| of the ratios

The user's table comes first, then the package's. If neither has an entry, `prepare` times a few
configurations, and a layer takes the first of them.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from io import StringIO
from math import ceil, log2
from pathlib import Path
from tokenize import COMMENT, DEDENT, INDENT, NEWLINE, NL, STRING, generate_tokens
from typing import Any, Final, Literal, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from sparsebench._writing import write_file
from sparsebench.errors import TableError, Unsupported
from sparsebench.kernels._common.machine_code import cache_folder
from sparsebench.kernels._kernel import Operands

SCHEMA: Final = "sparsebench/tuned@1"
REACH = 1.0  # |log2| of a ratio of sizes, at most: a factor of 2
BREAKS = {NEWLINE: ";", INDENT: "{", DEDENT: "}"}  # tokens before a statement

Tuned = bool | Literal["wide"]
"""A kernel's option `tuned`: true takes a table's entry or makes a short search; false takes the
default configuration; "wide" searches the kernel's whole space, to make tables."""

C = TypeVar("C")  # a kernel's dataclass of a configuration


@dataclass(frozen=True)
class Sizes:
    """The sizes of a problem in a table: Y[m, n] = X[m, k] @ W[n, k].T or one of its gradients.

    dtype    name of the dtype in a suite
    block    r and c of W's blocks; None where W is dense
    density  stored blocks over all blocks
    """

    m: int
    n: int
    k: int
    dtype: str
    block: tuple[int, int] | None = None
    density: float = 1.0


def blocked(m: int, n: int, k: int, dtype: str, block: tuple[int, int], stored: int) -> Sizes:
    """Return the sizes of a layer whose weights store `stored` blocks of r x c."""
    (r, c), every = block, ceil(n / block[0]) * ceil(k / block[1])
    return Sizes(m, n, k, dtype, (r, c), max(stored, 1) / every)


@dataclass(frozen=True)
class Entry:
    """A line of a table: at `sizes` the fastest configuration of `kernel` was `choice`.

    time_us     median of this configuration
    untuned_us  median of the default configuration, timed in turn with it; None if it did not run
    source      digest of the kernel's code at that time
    case        id of the measured case (results/record.py)
    versions    versions of driver and libraries
    """

    kernel: str
    sizes: Sizes
    choice: dict[str, Any]
    time_us: float
    untuned_us: float | None
    source: str
    case: str
    versions: dict[str, str | None]

    @property
    def current(self) -> bool:
        """Return whether the kernel's code has not changed since it was tuned."""
        return self.source == source(self.kernel)

    def distance(self, sizes: Sizes) -> float:
        """Return the sum of |log2| of the ratios of sizes; infinite if one exceeds REACH."""
        apart = [
            abs(log2(getattr(self.sizes, size) / getattr(sizes, size)))
            for size in ("m", "n", "k", "density")
        ]
        return sum(apart) if max(apart) <= REACH else float("inf")


@dataclass(frozen=True)
class Table:
    """A file: the entries of one kind of GPU; `gpu` is its name, for readers."""

    schema: Literal["sparsebench/tuned@1"]
    gpu: str
    entries: list[Entry]


def choose(
    kernel: str,
    config: Callable[..., C],
    operands: Operands,
    sizes: Sizes,
    tuned: Tuned,
    searched: Sequence[C],
    **fixed: Any,
) -> tuple[Sequence[C], dict[str, Any]]:
    """Return the configurations to time, and their origin; a pinned one is returned alone.

    searched  the configurations of a search, the default first
    fixed     values that an entry of a table must have

    The origin goes into Launch.choice, beside the configuration's fields. Raises Unsupported and
    TableError.
    """
    if tuned not in (True, False, "wide"):
        raise Unsupported(f"option tuned: expected true, false or wide, found {tuned!r}")
    if operands.pinned:
        names = {f.name for f in fields(config)}  # type: ignore[arg-type]
        pinned = {name: value for name, value in operands.pinned.items() if name in names}
        return [config(**pinned)], {k: v for k, v in operands.pinned.items() if k not in names}
    if tuned == "wide":
        return searched, {"by": "wide", "sizes": asdict(sizes)}
    if not tuned:
        return searched[:1], {"by": "default"}
    match = _find(kernel, sizes, operands.device, fixed)
    if match is None:
        return searched, {"by": "search"}
    owner, entry = match
    try:
        return [config(**entry.choice)], {"by": f"table of the {owner}"}
    except TypeError as error:
        file = file_in(folders()[owner], operands.device)
        raise TableError(f"{file}: entry of {kernel} at {sizes}: {error}") from error


def folders() -> dict[str, Path]:
    """Return the folders of tables by owner; the first has precedence."""
    package = Path(str(files("sparsebench.kernels"))) / "tuned"
    return {"user": cache_folder("tuned", "SPARSEBENCH_TUNED"), "package": package}


def file_in(folder: Path, device: torch.device) -> Path:
    gpu = torch.cuda.get_device_properties(device)
    return folder / file_name((gpu.major, gpu.minor), gpu.multi_processor_count)


def file_name(capability: tuple[int, int], multiprocessors: int) -> str:
    """Return the name of the table of a kind of GPU: sm90_132.json."""
    return f"sm{capability[0]}{capability[1]}_{multiprocessors}.json"


def in_force(device: torch.device) -> list[dict[str, Any]] | None:
    """Return owner, file, digest and number of entries of each table, or None without tables.

    A run records them. `current` counts the entries whose kernels have not changed since.
    """
    if device.type != "cuda":
        return None
    tables = []
    for owner, folder in folders().items():
        file = file_in(folder, device)
        if file.exists():
            entries = read(file).entries
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            counts = {"entries": len(entries), "current": sum(e.current for e in entries)}
            tables.append({"of": owner, "file": file.name, "sha256": digest, **counts})
    return tables or None


@cache
def read(file: Path) -> Table:
    """Read a table, once per process. Raises TableError."""
    try:
        return TypeAdapter(Table).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "top"
        expected, actual = first["msg"].removeprefix("Input should be "), repr(first["input"])[:60]
        if first["type"] == "missing":
            expected, actual = "a value", "none"
        raise TableError(f"{file}: {place}: expected {expected}; found {actual}") from error
    except OSError as error:
        raise TableError(f"{file}: expected a readable table, found {error}") from error


def write(file: Path, table: Table) -> None:
    """Replace the file in one step, one line for each entry."""
    head = f'{{"schema": "{table.schema}", "gpu": {json.dumps(table.gpu)}, "entries": [\n'
    lines = ",\n".join(json.dumps(asdict(entry)) for entry in table.entries)
    write_file(file, f"{head}{lines}\n]}}\n")
    read.cache_clear()


@cache
def source(kernel: str) -> str:
    """Return a digest of a kernel's code and of the kernels it imports; "" for no kernel.

    The digest leaves out comments, docstrings, layout, import lines and shared files (_NAME.py,
    NAME.cuh), so a file that moves keeps its entries. NAME_dgrad without a file has that of NAME.
    """
    python = next(Path(str(files("sparsebench.kernels"))).glob(f"*/{kernel}.py"), None)
    if python is None:
        forward = kernel.removesuffix("_dgrad")
        return source(forward) if forward != kernel else ""
    cuda = python.with_suffix(".cu")
    code = python.read_text("utf-8")
    parts = [_bare_python(code), _bare_cuda(cuda.read_text("utf-8")) if cuda.exists() else ""]
    parts += [source(name) for name in sorted(_kernels_imported(code))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def loads(programs: int, multiprocessors: int, depth: float, tokens: int, features: int) -> float:
    """Return how many elements the busiest multiprocessor copies into its shared memory.

    A long search leaves out the configurations that this model rates last. Each program multiplies
    `tokens` of X by `features` of W over `depth` of k, and reads both from the L2 cache.
    """
    return ceil(programs / multiprocessors) * depth * (tokens + features)


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # the stub lacks it
    return int(properties.shared_memory_per_block_optin)


def _find(
    kernel: str, sizes: Sizes, device: torch.device, fixed: Mapping[str, Any]
) -> tuple[str, Entry] | None:
    """Return the owner of a table and its nearest entry within reach, or None."""
    if device.type != "cuda":
        return None
    for owner, folder in folders().items():
        file = file_in(folder, device)
        fitting = [
            entry
            for entry in (read(file).entries if file.exists() else ())
            if (entry.kernel, entry.sizes.dtype, entry.sizes.block)
            == (kernel, sizes.dtype, sizes.block)
            and fixed.items() <= entry.choice.items()
            and entry.current
            and entry.distance(sizes) < float("inf")
        ]
        if fitting:
            return owner, min(fitting, key=lambda entry: entry.distance(sizes))
    return None


def _bare_python(code: str) -> str:
    """Return Python code without comments, layout, imports and statements that are a string.

    All spaces are removed, because Python 3.12 splits f-strings, which are one token in 3.11.
    """
    tokens, before, importing = [], NEWLINE, False
    for token in generate_tokens(StringIO(code).readline):
        if token.type in (COMMENT, NL):
            continue
        starts = before in BREAKS
        importing = token.string in ("import", "from") if starts else importing
        if not importing:
            is_text = starts and token.type == STRING
            tokens.append(BREAKS.get(token.type, "" if is_text else token.string))
        before = token.type
    return "".join("".join(tokens).split()).replace(";;", ";").replace("{;", "{")


def _bare_cuda(code: str) -> str:
    """Return C++ code without comments and layout."""
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", code, flags=re.DOTALL).split())


def _kernels_imported(code: str) -> set[str]:
    """Return the kernels that Python code imports; names with an underscore are not kernels."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    ours = (name.split(".")[2:] for name in names if name.startswith("sparsebench.kernels."))
    return {parts[1] for parts in ours if not any(part.startswith("_") for part in parts[:2])}

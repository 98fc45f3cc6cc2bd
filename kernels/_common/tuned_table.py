"""Tables of tuned configurations: what a long search on a kind of GPU found (`sparsebench tune`).

    $SPARSEBENCH_TUNED, else $XDG_CACHE_HOME/sparsebench/tuned     the user's, asked first
    kernels/tuned                                                  the package's
      └─ sm90_132.json                   a table: compute capability, number of multiprocessors

An entry says which configuration of a kernel won at some sizes. Other sizes take an entry of

    the same kernel, dtype and block      and the caller's path, where its choice has one
    the same code of the kernel           a digest of it; comments, docstrings, imports left out
    m, n, k and density at most 2x off    of several the nearest: least sum of |log2| of the ratios

Where the user's table has none the package's is asked. Where that has none there is none: `prepare`
times a few configurations, and a layer takes the first of them.
"""

import ast
import hashlib
import json
import os
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

from sparsebench.errors import TableError, Unsupported
from sparsebench.kernels._kernel import Operands

SCHEMA: Final = "sparsebench/tuned@1"
REACH = 1.0  # |log2| of a ratio of sizes: a factor of 2
BREAKS = {NEWLINE: ";", INDENT: "{", DEDENT: "}"}  # tokens before a statement

Tuned = bool | Literal["wide"]
"""What a kernel's option `tuned` may be: true, the table or a search of a few; false, the default,
with neither; wide, a search of the kernel's whole space, by which tables are made."""

C = TypeVar("C")  # a kernel's dataclass of a configuration


@dataclass(frozen=True)
class Sizes:
    """Y[m, n] = X[m, k] @ W[n, k].T or a gradient of it, as far as a table looks.

    dtype    as a suite names it
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
    """Return the sizes of a layer whose weights store so many blocks of r x c."""
    (r, c), every = block, ceil(n / block[0]) * ceil(k / block[1])
    return Sizes(m, n, k, dtype, (r, c), max(stored, 1) / every)


@dataclass(frozen=True)
class Entry:
    """A line of a table: at `sizes` the fastest configuration of `kernel` was `choice`.

    time_us     its median there; `untuned_us` that of the default, timed in turn with it, if it ran
    source      digest of the kernel's code then
    case        id of what was measured (results/record.py); `versions` of driver and libraries
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
        """Say whether the kernel's code is still what was tuned."""
        return self.source == source(self.kernel)

    def distance(self, sizes: Sizes) -> float:
        """Return the sum of |log2| of the ratios of sizes; infinite beyond REACH in one of them."""
        apart = [
            abs(log2(getattr(self.sizes, size) / getattr(sizes, size)))
            for size in ("m", "n", "k", "density")
        ]
        return sum(apart) if max(apart) <= REACH else float("inf")


@dataclass(frozen=True)
class Table:
    """A file: the entries of one kind of GPU, which `gpu` names for a reader."""

    schema: Literal["sparsebench/tuned@1"]
    gpu: str
    entries: list[Entry]


def lookup(
    kernel: str, sizes: Sizes, device: torch.device, **fixed: Any
) -> Mapping[str, Any] | None:
    """Return the configuration that a table has for these sizes, by field, or None.

    What is `fixed` (path="tma") it must have. Raises TableError.
    """
    found = _find(kernel, sizes, device, fixed)
    return found[1].choice if found else None


def choose(
    kernel: str,
    config: Callable[..., C],
    operands: Operands,
    sizes: Sizes,
    tuned: Tuned,
    searched: Sequence[C],
    **fixed: Any,
) -> tuple[Sequence[C], dict[str, Any]]:
    """Return the configurations to time, one alone where it is pinned, and how it came to them.

    `searched` is what a search would time, the default first. The second value belongs into
    Launch.choice, beside the configuration's own fields. Raises Unsupported and TableError.
    """
    if tuned not in (True, False, "wide"):
        raise Unsupported(f"option tuned: expected true, false or wide, found {tuned!r}")
    if operands.pinned:
        own = {f.name for f in fields(config)}  # type: ignore[arg-type]
        pinned = {name: value for name, value in operands.pinned.items() if name in own}
        return [config(**pinned)], {k: v for k, v in operands.pinned.items() if k not in own}
    if tuned == "wide":
        return searched, {"by": "wide", "sizes": asdict(sizes)}
    if not tuned:
        return searched[:1], {"by": "default"}
    found = _find(kernel, sizes, operands.device, fixed)
    if found is None:
        return searched, {"by": "search"}
    whose, entry = found
    try:
        return [config(**entry.choice)], {"by": f"table of the {whose}"}
    except TypeError as error:
        file = file_in(folders()[whose], operands.device)
        raise TableError(f"{file}: entry of {kernel} at {sizes}: {error}") from error


def folders() -> dict[str, Path]:
    """Return where tables are, by whose they are, in the order in which they are asked."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = os.environ.get("SPARSEBENCH_TUNED") or cache_home / "sparsebench" / "tuned"
    return {"user": Path(own), "package": Path(str(files("sparsebench.kernels"))) / "tuned"}


def file_in(folder: Path, device: torch.device) -> Path:
    """Return the file of a kind of GPU."""
    gpu = torch.cuda.get_device_properties(device)
    return folder / file_name((gpu.major, gpu.minor), gpu.multi_processor_count)


def file_name(capability: tuple[int, int], multiprocessors: int) -> str:
    """Return the name of the table of a kind of GPU: sm90_132.json."""
    return f"sm{capability[0]}{capability[1]}_{multiprocessors}.json"


def in_force(device: torch.device) -> list[dict[str, Any]] | None:
    """Return, for a run's record, the tables that are asked: whose, digest, and how many entries.

    `current` of them are of the kernels' present code, and can be found. None where there is none.
    """
    if device.type != "cuda":
        return None
    found = []
    for whose, folder in folders().items():
        file = file_in(folder, device)
        if file.exists():
            entries = read(file).entries
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            counts = {"entries": len(entries), "current": sum(e.current for e in entries)}
            found.append({"of": whose, "file": file.name, "sha256": digest, **counts})
    return found or None


@cache
def read(file: Path) -> Table:
    """Read a table, once a process. Raises TableError."""
    try:
        return TypeAdapter(Table).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "top"
        expected, found = first["msg"].removeprefix("Input should be "), repr(first["input"])[:60]
        if first["type"] == "missing":
            expected, found = "a value", "none"
        raise TableError(f"{file}: {place}: expected {expected}; found {found}") from error
    except OSError as error:
        raise TableError(f"{file}: expected a readable table, found {error}") from error


def write(file: Path, table: Table) -> None:
    """Replace the file at once, an entry a line."""
    head = f'{{"schema": "{table.schema}", "gpu": {json.dumps(table.gpu)}, "entries": [\n'
    lines = ",\n".join(json.dumps(asdict(entry)) for entry in table.entries)
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(f"{head}{lines}\n]}}\n")
    fresh.replace(file)
    read.cache_clear()


@cache
def source(kernel: str) -> str:
    """Return a digest of a kernel's code and of the kernels that it imports; "" if there is none.

    Comments, docstrings, layout, import lines and what many kernels share (_NAME.py, NAME.cuh)
    leave it as it is: a file that moves keeps its entries.
    """
    python = next(Path(str(files("sparsebench.kernels"))).glob(f"*/{kernel}.py"), None)
    if python is None:
        return ""
    cuda = python.with_suffix(".cu")
    code = python.read_text()
    parts = [_bare_python(code), _bare_cuda(cuda.read_text()) if cuda.exists() else ""]
    parts += [source(name) for name in sorted(_kernels_imported(code))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def loads(programs: int, multiprocessors: int, depth: float, tokens: int, features: int) -> float:
    """Return the elements that the busiest multiprocessor copies into its shared memory.

    The model by which a space is thinned before it is timed: each program multiplies tiles of
    `tokens` of X by `features` of W over `depth` of k, and reads both from the L2 cache.
    """
    return ceil(programs / multiprocessors) * depth * (tokens + features)


def multiprocessors(device: torch.device) -> int:
    """Return how many programs run side by side."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _find(
    kernel: str, sizes: Sizes, device: torch.device, fixed: Mapping[str, Any]
) -> tuple[str, Entry] | None:
    """Return the nearest entry within reach, and whose it is."""
    if device.type != "cuda":
        return None
    for whose, folder in folders().items():
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
            return whose, min(fitting, key=lambda entry: entry.distance(sizes))
    return None


def _bare_python(code: str) -> str:
    """Return Python code without comments, layout, imports and statements that are a string.

    Without any space: Python 3.12 takes f-strings to pieces where 3.11 has one token.
    """
    kept, before, importing = [], NEWLINE, False
    for token in generate_tokens(StringIO(code).readline):
        if token.type in (COMMENT, NL):
            continue
        starts = before in BREAKS
        importing = token.string in ("import", "from") if starts else importing
        if not importing:
            said = starts and token.type == STRING
            kept.append(BREAKS.get(token.type, "" if said else token.string))
        before = token.type
    return "".join("".join(kept).split()).replace(";;", ";").replace("{;", "{")


def _bare_cuda(code: str) -> str:
    """Return C++ code without comments and layout."""
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", code, flags=re.DOTALL).split())


def _kernels_imported(code: str) -> set[str]:
    """Return the kernels that Python code imports; what begins with an underscore is plumbing."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    ours = (name.split(".")[2:] for name in names if name.startswith("sparsebench.kernels."))
    return {parts[1] for parts in ours if not any(part.startswith("_") for part in parts[:2])}

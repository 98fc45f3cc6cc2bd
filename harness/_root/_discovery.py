"""Names to modules. A name in a suite is a file name, and there is no registry.

    kernels/bsr/bsr_wgmma.py                  bsr_wgmma    a folder is searched one level deep
    kernels/bsr/_wgmma_pairs.py, _common/     (none)       a leading underscore is plumbing
    kernels/nn/linear.py                      (none)       it names no KERNEL
    entry point diagonal of sparsebench.kernels            what another package adds
    package.module                                         likewise, without an entry point

What another package adds is code that runs when it is imported. `own_code_only` refuses it: a suite
out of somebody's bundle may name any module.

Two modules of one name in a folder are an error: a suite could not say which it means.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsebench.errors import SuiteError

CONSTANTS = {
    "formats": "FORMAT",
    "kernels": "KERNEL",
    "harness.ops": "OP",
    "harness.patterns": "PATTERN",
    "reports.figures": "TITLE",
}
"""What a file of each folder must name to be found."""

_others = ContextVar("whether modules of other packages are imported", default=True)


@cache  # reading the metadata of 250 installed packages takes 15 ms, and a suite asks for each case
def modules(folder: str) -> MappingProxyType[str, str]:
    """Return the module of every name in a folder ("kernels"), in order. Raises SuiteError."""
    found = dict(sorted(_own(folder).items()))
    group = f"sparsebench.{folder.rpartition('.')[2]}"
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        _add(found, entry.name, entry.module)
    return MappingProxyType(found)


def load(folder: str, name: str) -> Any:
    """Return the constant of a file, an entry point or a `package.module`. Raises SuiteError."""
    known, constant = modules(folder), CONSTANTS[folder]
    if name not in known and "." not in name:
        what, hint = folder.rpartition(".")[2], did_you_mean(name, [*known])
        raise SuiteError(f"expected one of the {what} {', '.join(known)}; found {name!r}{hint}")
    module = known.get(name, name)
    if not module.startswith("sparsebench.") and not _others.get():
        raise SuiteError(f"{name}: not imported, since {module} is no module of sparsebench")
    try:
        found = getattr(import_module(module), constant, None)
    except ModuleNotFoundError as error:
        raise SuiteError(f"{name}: expected to import {module}, found: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SuiteError(f"{name}: expected to import {module}, found {said}") from error
    if found is None:
        raise SuiteError(f"{name}: expected {module} to define {constant}, found no such name")
    return found


@contextmanager
def own_code_only() -> Iterator[None]:
    """Refuse, inside the block, to import what is not this package's. `load` raises SuiteError."""
    before = _others.set(False)
    try:
        yield
    finally:
        _others.reset(before)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean bsr?)`, or nothing when no name is close."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _own(folder: str) -> dict[str, str]:
    package, found = f"sparsebench.{folder}", dict[str, str]()
    root, names = Path(str(files(package))), re.compile(rf"^{CONSTANTS[folder]}\b", re.MULTILINE)
    for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        place = file.relative_to(root).with_suffix("").parts
        if not any(part.startswith("_") for part in place) and names.search(file.read_text()):
            _add(found, place[-1], ".".join([package, *place]))
    return found


def _add(found: dict[str, str], name: str, module: str) -> None:
    """Add a module. Raises SuiteError where its name is taken."""
    if name in found and found[name] != module:
        taken = f"found {found[name]} and {module}"
        raise SuiteError(f"{name}: expected one module of this name, {taken}")
    found[name] = module

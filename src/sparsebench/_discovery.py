"""Names to modules and files. A name in a suite is a file name, and there is no registry.

    kernels/bsr/bsr_wgmma.py                  bsr_wgmma    a folder is searched one level deep
      DGRAD = Kernel(...) in that file        bsr_wgmma_dgrad
    kernels/bsr/_wgmma_pairs.py, _common/     (none)       a leading underscore is plumbing
    kernels/nn/linear.py                      (none)       it names no KERNEL
    suites/decode.yaml                        decode       data: its text is what the name means

What another package adds:

    entry point diagonal = "acme.diagonal"         of sparsebench.kernels: the module's KERNEL
    entry point diagonal = "acme.kernels:FAST"     the object FAST of the module
    entry point acme = "acme.suites"               of sparsebench.suites, .claims: its *.yaml
    acme.diagonal, acme.kernels:FAST               in a suite, without an entry point

That is code that runs when it is imported. `own_code_only` refuses it: a suite out of somebody's
bundle may name any module. Two of one name are an error: a suite could not say which it means.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
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

SECOND = {"kernels": {"DGRAD": "_dgrad", "WGRAD": "_wgrad"}}
"""Further objects that a file may name: each is listed as the file's name with a suffix."""

DOCUMENTS = {"suites": ".yaml", "suites.claims": ".yaml", "suites.campaigns": ".yaml"}
"""What a file of data ends in, by folder: a new kind of entry points is a line here or above."""

WHOLE = {"reports.figures"}
"""Folders whose files are what is loaded, not a constant in them."""

NAME = re.compile(r"\w[\w-]*")
PLACE = re.compile(r"[^\W\d]\w*(?:\.\w+)*(?::[^\W\d]\w*(?:\.\w+)*)?")  # package.module:ATTRIBUTE

others: set[str] = set()
"""The packages that were imported because of a name, without ours."""

_allowed = ContextVar("whether modules of other packages are imported", default=True)


def group(folder: str) -> str:
    """Return the group of entry points that adds to a folder."""
    return f"sparsebench.{folder.rpartition('.')[2]}"


@cache  # reading the metadata of 250 installed packages takes 15 ms, and a suite asks for each case
def modules(folder: str) -> MappingProxyType[str, str]:
    """Return the place of every name in a folder ("kernels"), in order: `package.module[:ATTR]`.

    Raises SuiteError where a name is taken, or no name, or its place none.
    """
    found = dict(sorted(_own(folder).items()))
    for entry in _entries(folder):
        place = _place(entry)
        if not NAME.fullmatch(entry.name):
            expected = "expected a name of letters, digits, _ and -"
            raise SuiteError(f"{_told(entry)}: {expected}; found {entry.name!r}")
        _add(found, entry.name, place, _of(entry))
    return MappingProxyType(found)


def documents(folder: str) -> dict[str, Traversable]:
    """Return every file of data of a folder ("suites"), by name. Raises SuiteError."""
    what, ends = folder.rpartition(".")[2], DOCUMENTS[folder]
    found: dict[str, Traversable] = {}
    first, *rest = folder.split(".")
    owned = [(files(f"sparsebench.{first}").joinpath(*rest), "")]
    for package, owner in {_place(entry): _of(entry) for entry in _entries(folder)}.items():
        expected = f"{what}: expected a package {package}"
        if not hasattr(_imported(package, expected), "__path__"):
            raise SuiteError(f"{expected}, found a module{owner}")
        owned.append((files(package), owner))
    for inside, owner in owned:
        for file in sorted(inside.iterdir(), key=lambda file: file.name):
            name = file.name.removesuffix(ends)
            if file.name.endswith(ends) and name in found:
                taken = f"found {found[name]} and {file}{owner}"
                one = what.removesuffix("s")
                raise SuiteError(f"{name}: expected one {one} of this name, {taken}")
            if file.name.endswith(ends):
                found[name] = file
    return found


def load(folder: str, name: str) -> Any:
    """Return what a name stands for: a file's constant, or the object that is named itself.

    The name is that of a file, of an entry point, or `package.module[:ATTR]`. Raises SuiteError.
    """
    known, constant = modules(folder), CONSTANTS[folder]
    if name not in known and "." not in name and ":" not in name:
        what, hint = folder.rpartition(".")[2], did_you_mean(name, [*known])
        raise SuiteError(f"expected one of the {what} in `sparsebench list`; found {name!r}{hint}")
    place = known.get(name, name)
    if not PLACE.fullmatch(place):
        raise SuiteError(f"{name}: expected package.module or package.module:NAME")
    module, _, attribute = place.partition(":")
    if module.partition(".")[0] != "sparsebench" and not _allowed.get():
        raise SuiteError(f"{name}: not imported, since {module} is no module of sparsebench")
    found = _imported(module, f"{name}: expected to import {module}")
    try:
        constant_of = attrgetter(attribute or constant)(found)
    except AttributeError as error:
        expected = f"expected {module} to define {attribute or constant}"
        raise SuiteError(f"{name}: {expected}, found no such name") from error
    return found if folder in WHOLE and not attribute else constant_of


def _imported(module: str, expected: str) -> ModuleType:
    """Import a module. Raises SuiteError, which begins as it is told to, whatever it raises."""
    others.update({module.partition(".")[0]} - {"sparsebench"})
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise SuiteError(f"{expected}, found: {error}") from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SuiteError(f"{expected}, found {said}") from error


@contextmanager
def own_code_only() -> Iterator[None]:
    """Refuse, inside the block, to import what is not this package's. `load` raises SuiteError."""
    before = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(before)


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
            module, text = ".".join([package, *place]), file.read_text()
            _add(found, place[-1], module)
            for constant, suffix in SECOND.get(folder, {}).items():
                if re.search(rf"^{constant} = ", text, re.MULTILINE):
                    _add(found, place[-1] + suffix, f"{module}:{constant}")
    return found


def _entries(folder: str) -> list[EntryPoint]:
    return sorted(entry_points(group=group(folder)), key=lambda entry: (entry.name, entry.value))


def _place(entry: EntryPoint) -> str:
    """Return `package.module[:ATTR]` of an entry point, without spaces. Raises SuiteError."""
    place = "".join(entry.value.split())
    if not PLACE.fullmatch(place):
        expected = "expected package.module or package.module:NAME"
        raise SuiteError(f"{_told(entry)}: {expected}; found {entry.value!r}")
    return place


def _of(entry: EntryPoint) -> str:
    """Return ` (acme 1.2)`: the distribution that has the entry point."""
    return f" ({entry.dist.name} {entry.dist.version})" if entry.dist else ""


def _told(entry: EntryPoint) -> str:
    return f"entry point {entry.name!r} of {entry.group}{_of(entry)}"


def _add(found: dict[str, str], name: str, place: str, owner: str = "") -> None:
    """Add a place. Raises SuiteError where its name is taken."""
    if name in found and found[name] != place:
        taken = f"found {found[name]} and {place}{owner}"
        raise SuiteError(f"{name}: expected one module of this name, {taken}")
    found[name] = place

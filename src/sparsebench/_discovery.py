"""Find modules and files by name. A name in a suite is a file name, and there is no registry.

    kernels/bsr/bsr_wgmma.py                  bsr_wgmma    folders are searched one level deep
      DGRAD = Kernel(...) in that file        bsr_wgmma_dgrad
    harness/ops/linear.py: DGRAD = Op(...)    linear_dgrad
    kernels/bsr/_wgmma_lists.py, _common/     (none)       a leading underscore marks internals
    kernels/nn/linear.py                      (none)       it defines no KERNEL
    suites/decode.yaml                        decode       data: the name means the file's text

Another package adds names by entry points, or a suite names its objects directly:

    entry point diagonal = "acme.diagonal"         of sparsebench.kernels: the module's KERNEL
    entry point diagonal = "acme.kernels:FAST"     the object FAST of the module
    entry point acme = "acme.suites"               of sparsebench.suites, .claims: its *.yaml
    acme.diagonal, acme.kernels:FAST               in a suite, without an entry point

Importing such a module runs its code. `own_code_only` refuses that, because the suite of a bundle
may name any module. Two objects of one name are an error, since a suite could mean either.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from sparsebench.errors import SuiteError

CONSTANTS = {
    "formats": "FORMAT",
    "kernels": "KERNEL",
    "kernels.attention.methods": "METHOD",
    "harness.ops": "OP",
    "harness.patterns": "PATTERN",
    "reports.figures": "TITLE",
}
"""The constant that a file of each folder must define to be found."""

_GRADIENTS = {"DGRAD": "_dgrad", "WGRAD": "_wgrad", "BACKWARD": "_backward"}
SECOND = {"kernels": _GRADIENTS, "harness.ops": _GRADIENTS}
"""Further constants that a file may define, and the suffix that their names add to the file's."""

DOCUMENTS = {"suites": ".yaml", "suites.claims": ".yaml", "suites.campaigns": ".yaml"}
"""The ending of data files by folder. A new kind of entry point is a line here or above."""

WHOLE = {"reports.figures"}
"""Folders for which `load` returns the module instead of a constant in it."""

MOVED = {"sparsebench.kernels.sparse_activations": "sparsebench.kernels.twell"}
"""Packages of 0.1 and where they are now: suites and plug-ins may still name them."""

FEW = 8  # names that an error message lists

NAME = re.compile(r"\w[\w-]*")
PLACE = re.compile(r"[^\W\d]\w*(?:\.\w+)*(?::[^\W\d]\w*(?:\.\w+)*)?")  # package.module:ATTRIBUTE

OF_THIS_REPOSITORY = {"sparsebench", "sparsebench_authors"}
"""Packages that `own_code_only` imports."""

OWN = {"sparsebench"}
"""The packages whose kernels and formats run in the process that judges them."""

others: set[str] = set()
"""Packages of others that were imported because a suite names them."""

_allowed = ContextVar[frozenset[str] | None]("the packages that may be imported", default=None)


def group(folder: str) -> str:
    """Return the group of entry points that add to a folder."""
    return f"sparsebench.{folder.rpartition('.')[2]}"


@cache  # reading the metadata of 250 packages takes 15 ms, and each case of a suite needs it
def modules(folder: str) -> MappingProxyType[str, str]:
    """Return `package.module[:ATTR]` by name for a folder ("kernels"), in order.

    Raises SuiteError if a name is taken twice, or an entry point is malformed.
    """
    places = dict(sorted(_packaged(folder).items()))
    for entry in _entries(folder):
        place = _place(entry)
        if not NAME.fullmatch(entry.name):
            expected = "expected a name of letters, digits, _ and -"
            raise SuiteError(f"{_described(entry)}: {expected}; found {entry.name!r}")
        _add(places, entry.name, place, _owner(entry))
    return MappingProxyType(places)


def package_names(folder: str) -> set[str]:
    """Return the names of a folder that this package has itself."""
    return {name for name, place in modules(folder).items() if place.partition(".")[0] in OWN}


def documents(folder: str) -> dict[str, Traversable]:
    """Return the data files of a folder ("suites") by name. Raises SuiteError."""
    kind, ending = folder.rpartition(".")[2], DOCUMENTS[folder]
    found: dict[str, Traversable] = {}
    first, *rest = folder.split(".")
    folders = [(files(f"sparsebench.{first}").joinpath(*rest), "")]
    for package, owner in {_place(entry): _owner(entry) for entry in _entries(folder)}.items():
        folders.append((_folder(package, f"{kind}: expected a package {package}", owner), owner))
    for inside, owner in folders:
        for file in sorted(inside.iterdir(), key=lambda file: file.name):
            if not file.name.endswith(ending):
                continue
            name = file.name.removesuffix(ending)
            if name in found:
                taken = f"found {found[name]} and {file}{owner}"
                raise SuiteError(
                    f"{name}: expected one {kind.removesuffix('s')} of this name, {taken}"
                )
            found[name] = file
    return found


def load(folder: str, name: str) -> Any:
    """Return the object of a name: the constant of a file, or the object that the name points to.

    The name is that of a file, of an entry point, or `package.module[:ATTR]`. Raises SuiteError.
    """
    places, constant = modules(folder), CONSTANTS[folder]
    if name not in places and "." not in name and ":" not in name:
        kind = folder.rpartition(".")[2].removesuffix("s")
        raise SuiteError(unknown(f"a known {kind} or module:{constant}", name, places))
    place = places.get(name, name)
    if not PLACE.fullmatch(place):
        raise SuiteError(f"{name}: expected package.module or package.module:NAME")
    path, _, attribute = place.partition(":")
    require_allowed(name, path)
    module = _imported(path, f"{name}: expected to import {path}")
    try:
        value = attrgetter(attribute or constant)(module)
    except AttributeError as error:
        expected = f"expected {path} to define {attribute or constant}"
        other = "" if attribute else f"; name another object as {path}:NAME"
        raise SuiteError(f"{name}: {expected}, found no such name{other}") from error
    return module if folder in WHOLE and not attribute else value


def require_allowed(name: str, path: str) -> None:
    """Raise SuiteError if the module of a name may not be imported here."""
    package, allowed = path.partition(".")[0], _allowed.get()
    if allowed is not None and package not in OF_THIS_REPOSITORY | allowed:
        why = f"{path} is no module of sparsebench; --allow-plugins imports it"
        raise SuiteError(f"{name}: not imported, because {why}")


def package_of(folder: str, name: str) -> str:
    """Return the package whose code a name means, without importing it."""
    place = modules(folder).get(name, name if {*".:"} & {*name} else "sparsebench")
    return place.partition(":")[0].partition(".")[0]


def outside(folder: str, name: str) -> bool:
    """Return whether a name means code of another package."""
    return package_of(folder, name) not in OWN


def canonical(folder: str, name: str) -> str:
    """Return the first name of an object that has several, such as an entry point and its place.

    `acme.ell:FORMAT`, `acme.ell` and an entry point `ell` of either are one format. Without a dot,
    `ell:FORMAT` keeps its constant, because `ell` alone would be the name of a file.
    """
    places, constant = modules(folder), f":{CONSTANTS[folder]}"

    def whole(place: str) -> str:
        return place if ":" in place else place + constant

    place = whole(places.get(name, name))
    names = [known for known, other in places.items() if whole(other) == place]
    if names:
        return names[0]
    return place.removesuffix(constant) if "." in name else name


def _folder(package: str, expected: str, owner: str) -> Path:
    """Return the folder of a package without importing it. Raises SuiteError."""
    top, *rest = package.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError) as error:
        raise SuiteError(f"{expected}, found: {error}") from error
    for place in (spec and spec.submodule_search_locations) or ():
        if (path := Path(place, *rest)).is_dir():
            return path
    present = f"No module named {package!r}" if spec is None or rest else f"a module{owner}"
    raise SuiteError(f"{expected}, found {present}")


def _imported(path: str, expected: str) -> ModuleType:
    """Import a module. Wraps any error in a SuiteError prefixed with `expected`."""
    others.update({path.partition(".")[0]} - {"sparsebench"})
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        hints = [f" ({old} is now {new})" for old, new in MOVED.items() if old in str(error)]
        hints += ["; is its folder in PYTHONPATH?"] * (error.name == path.partition(".")[0])
        raise SuiteError(f"{expected}, found: {error}{''.join(hints)}") from error
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SuiteError(f"{expected}, found {message}") from error


@contextmanager
def own_code_only(further: Iterable[str] = ()) -> Iterator[None]:
    """Let `load` raise SuiteError inside the block instead of importing another package."""
    before = _allowed.set(frozenset(further))
    try:
        yield
    finally:
        _allowed.reset(before)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean bsr?)`, or nothing when no name is close."""
    close = get_close_matches(name, [each for each in names if each != name], n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown(expected: str, name: str, names: Iterable[str], lister: str = "list") -> str:
    """Return the error message for an unknown name: the closest known one, or all if they are few.

    `lister` is the command that prints all.

    `expected a known format or module:FORMAT, found 'bsrr' (did you mean bsr?)`
    """
    every = [*names]
    listed = f"one of {', '.join(every)}" if len(every) <= FEW else f"see sparsebench {lister}"
    return f"expected {expected}, found {name!r}{did_you_mean(name, every) or f' ({listed})'}"


def _packaged(folder: str) -> dict[str, str]:
    package, places = f"sparsebench.{folder}", dict[str, str]()
    root, names = Path(str(files(package))), re.compile(rf"^{CONSTANTS[folder]}\b", re.MULTILINE)
    for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        parts = file.relative_to(root).with_suffix("").parts
        text = file.read_text("utf-8")
        if not any(part.startswith("_") for part in parts) and names.search(text):
            module = ".".join([package, *parts])
            _add(places, parts[-1], module)
            for constant, suffix in SECOND.get(folder, {}).items():
                if re.search(rf"^{constant} = ", text, re.MULTILINE):
                    _add(places, parts[-1] + suffix, f"{module}:{constant}")
    return places


def _entries(folder: str) -> list[EntryPoint]:
    entries = _entry_points(tuple(sys.path)).select(group=group(folder))
    return sorted(entries, key=lambda entry: (entry.name, entry.value))


@cache  # reading those of 250 packages takes 15 ms, and each name in a suite needs them
def _entry_points(path: tuple[str, ...]) -> Any:  # SelectableGroups before Python 3.12
    return entry_points()


def _place(entry: EntryPoint) -> str:
    """Return `package.module[:ATTR]` of an entry point, without spaces. Raises SuiteError."""
    place = "".join(entry.value.split())
    if not PLACE.fullmatch(place):
        expected = "expected package.module or package.module:NAME"
        raise SuiteError(f"{_described(entry)}: {expected}; found {entry.value!r}")
    return place


def _owner(entry: EntryPoint) -> str:
    """Return the distribution of an entry point: ` (acme 1.2)`."""
    return f" ({entry.dist.name} {entry.dist.version})" if entry.dist else ""


def _described(entry: EntryPoint) -> str:
    return f"entry point {entry.name!r} of {entry.group}{_owner(entry)}"


def _add(places: dict[str, str], name: str, place: str, owner: str = "") -> None:
    """Add a place. Raises SuiteError if its name is taken."""
    if name in places and places[name] != place:
        taken = f"found {places[name]} and {place}{owner}"
        raise SuiteError(f"{name}: expected one module of this name, {taken}")
    places[name] = place

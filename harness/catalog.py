"""Names to things. A name in a suite is a file name: `bsr` is formats/bsr.py.

Other people's formats, kernels and ops come in as `package.module`, or under a short name through
the entry points `sparsebench.formats` and `sparsebench.kernels`. There is no registry.
"""

import ast
import inspect
import pkgutil
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from typing import Any

import yaml

from sparsebench.formats._format import Format
from sparsebench.harness._errors import SuiteError
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import Kernel


def names(folder: str) -> list[str]:
    """List what is in a folder of the package (`formats`, `kernels`, `harness.ops`)."""
    path = [str(files(f"sparsebench.{folder}"))]
    own = [m.name for m in pkgutil.iter_modules(path) if m.name[0] != "_" and not m.ispkg]
    return sorted(own) + sorted(entry.name for entry in _entries(folder))


def summary(folder: str, name: str) -> str:
    """Return the first line of a file's docstring, without importing it."""
    plugged = [entry.module for entry in _entries(folder) if entry.name == name]
    found = find_spec(plugged[0] if plugged else f"sparsebench.{folder}.{name}")
    if found is None or found.origin is None:
        return f"(the entry point's module {plugged[0]} is not installed)"
    with open(found.origin, encoding="utf-8") as file:
        text = ast.get_docstring(ast.parse(file.read())) or ""
    return text.partition("\n")[0]


def listing() -> dict[str, dict[str, str]]:
    """Return every op, format, kernel and suite with its first line; imports none of them."""
    folders = {"ops": "harness.ops", "formats": "formats", "kernels": "kernels"}
    found = {
        title: {name: summary(folder, name) for name in names(folder)}
        for title, folder in folders.items()
    }
    found["suites"] = {
        name: str(yaml.safe_load(file.read_text()).get("title", ""))
        for name, file in sorted(suites().items())
    }
    return found


def suites() -> dict[str, Traversable]:
    """Return the package's suites by name."""
    found = files("sparsebench.suites").iterdir()
    return {f.name.removesuffix(".yaml"): f for f in found if f.name.endswith(".yaml")}


def load_format(name: str) -> type[Format]:
    """Return the FORMAT of a file, an entry point or a `package.module`."""
    found: type[Format] = _load("formats", name, "FORMAT")
    return found


def load_kernel(name: str) -> Kernel:
    """Return the KERNEL of a file, an entry point or a `package.module`."""
    found: Kernel = _load("kernels", name, "KERNEL")
    return found


def load_op(name: str) -> Op:
    """Return the OP of a file or a `package.module`."""
    found: Op = _load("harness.ops", name, "OP")
    return found


def keywords(function: Callable[..., Any]) -> set[str]:
    """Return the names a function takes by keyword alone: what a suite may set."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def did_you_mean(name: str, known: list[str] | set[str]) -> str:
    """Return ` (did you mean bsr?)`, or nothing when no name is close."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _load(folder: str, name: str, constant: str) -> Any:
    plugged = [entry.module for entry in _entries(folder) if entry.name == name]
    if plugged or "." in name:
        module = (plugged or [name])[0]
    elif name in names(folder):
        module = f"sparsebench.{folder}.{name}"
    else:
        known = names(folder)
        what = folder.rpartition(".")[2]
        hint = did_you_mean(name, known)
        raise SuiteError(f"expected one of the {what} {', '.join(known)}; found {name!r}{hint}")
    try:
        found = getattr(import_module(module), constant, None)
    except ModuleNotFoundError as error:
        raise SuiteError(f"{name}: expected to import {module}, found: {error}") from error
    if found is None:
        raise SuiteError(f"{name}: expected {module} to define {constant}, found no such name")
    return found


@cache  # reading the metadata of 250 installed packages takes 15 ms, and a suite asks for each case
def _entries(folder: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"sparsebench.{folder}"))

"""Names to things. A name in a suite is a file name: `bsr` is formats/bsr.py.

Other people's formats, kernels and ops come in as `package.module`, or under a short name through
entry points: sparsebench.formats, .kernels, .ops, .patterns, .suites (sparsebench/_discovery.py).
"""

import ast
import inspect
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from typing import Any

import yaml

from sparsebench._discovery import load, modules
from sparsebench.formats._format import Format
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import Kernel


def names(folder: str) -> list[str]:
    """List what is in a folder of the package (`formats`, `kernels`, `harness.ops`)."""
    return list(modules(folder))


def summary(folder: str, name: str) -> str:
    """Return the first line of a file's docstring, without importing it."""
    module = modules(folder)[name]
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        return f"(the entry point's module {module} is not installed)"
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
    found: type[Format] = load("formats", name)
    return found


def load_kernel(name: str) -> Kernel:
    """Return the KERNEL of a file, an entry point or a `package.module`."""
    found: Kernel = load("kernels", name)
    return found


def load_op(name: str) -> Op:
    """Return the OP of a file or a `package.module`."""
    found: Op = load("harness.ops", name)
    return found


def keywords(function: Callable[..., Any]) -> set[str]:
    """Return the names a function takes by keyword alone: what a suite may set."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

"""Load ops, patterns, formats, kernels and suites by name. `bsr` in a suite is formats/bsr.py.

Those of other packages are named `package.module[:ATTR]`, or have a short name through an entry
point (sparsebench/_discovery.py):

    sparsebench.formats, .kernels, .ops, .patterns, .figures    a module, or an object of one
    sparsebench.suites                                          a package; its *.yaml are suites
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparsebench._discovery import (
    OF_THIS_REPOSITORY,
    documents,
    load,
    modules,
    outside,
    package_of,
    require_allowed,
)
from sparsebench.errors import SuiteError, Unsupported
from sparsebench.harness.machine.child_process import PYTHON, Child, ChildLoss
from sparsebench.kernels._removed import not_installed, removal
from sparsebench.results.files import from_yaml
from sparsebench.results.record import Contender

if TYPE_CHECKING:  # listing needs no torch
    from sparsebench.formats._format import Format
    from sparsebench.harness.ops._op import Op
    from sparsebench.kernels._kernel import Kernel, Launch, Operands

T = TypeVar("T")

DECLARE = *PYTHON, "sparsebench.harness.plan.declare"
DECLARE_S = 300.0  # importing torch on a cold disk, and the other package

FOLDERS = {
    "ops": "harness.ops",
    "patterns": "harness.patterns",
    "formats": "formats",
    "kernels": "kernels",
    "figures": "reports.figures",
}
"""What `listing` lists, with the folder of each, as a package of sparsebench."""


def names(folder: str) -> list[str]:
    """List the names in a folder of the package, and those of entry points."""
    return list(modules(folder))


def summary(folder: str, name: str) -> str:
    """Return the first line of the docstring of a file, or of its ATTR, without importing."""
    module, _, attribute = modules(folder)[name].partition(":")
    if (file := _file_of(module)) is None:
        return f"(the entry point's module {module} is not installed)"
    tree = ast.parse(file.read_text("utf-8"))
    text = _documentation(tree, attribute) or ast.get_docstring(tree) or ""
    return text.partition("\n")[0]


def _file_of(module: str) -> Path | None:
    """Return the file of a module, or None; `find_spec` imports the packages above it."""
    package, *parts = module.split(".")
    if package == "sparsebench":  # kernels.nn would import torch
        return Path(str(files(package))).joinpath(*parts).with_suffix(".py")
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _documentation(tree: ast.Module, attribute: str) -> str:
    """Return the text below `ATTR = ...`, or the docstring of a class ATTR."""
    for node, following in pairwise([*tree.body, ast.Pass()]):
        match node, following:
            case ast.ClassDef(name=name), _ if name == attribute:
                return ast.get_docstring(node) or ""
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if name == attribute:
                return text
    return ""


def listing() -> dict[str, dict[str, str]]:
    """Return every op, pattern, format, kernel, figure and suite with a line that describes it.

    Imports none of them. Raises SuiteError if a name is taken twice.
    """
    listed = {title: {n: summary(f, n) for n in names(f)} for title, f in FOLDERS.items()}
    listed["suites"] = {}
    for name, file in sorted(suites().items()):
        written = from_yaml(name, file.read_text("utf-8"), SuiteError)
        title = written.get("title", "") if isinstance(written, dict) else ""
        listed["suites"][name] = str(title)
    return listed


def suites() -> dict[str, Traversable]:
    """Return the suites of this package and of entry points. Raises SuiteError."""
    return documents("suites")


def load_format(name: str) -> "type[Format]":
    """Return the FORMAT of a file, an entry point or a `package.module[:ATTR]`."""
    from sparsebench.formats._format import Format

    loaded = load("formats", name)
    if not (isinstance(loaded, type) and issubclass(loaded, Format)):
        raise SuiteError(f"{name}: expected FORMAT to be a class of Format, found {loaded!r}")
    return loaded


def weights_format(name: str) -> "type[Format]":
    """Return the format of a contender's weights: dense if its format stores activations."""
    loaded = load_format(name)
    return load_format("dense") if loaded.operand == "activations" else loaded


def masks(name: str) -> bool:
    """Return whether a format stores masks; the op determines its parameters, not the suite."""
    return load_format(name).operand == "masks"


@dataclass(frozen=True)
class Declaration:
    """What a suite must know of a kernel or a format.

    op, consumes, device  of the kernel
    options               that a suite may set: of `prepare`, or parameters of the format
    at_most, why          of Kernel.lossy
    """

    op: str = "any"
    consumes: str = "any"
    device: str = "any"
    options: tuple[str, ...] = ()
    at_most: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def error(self, dtype: str) -> dict[str, Any] | None:
        """Return the error that a kernel declares for a dtype, as a suite would write it."""
        largest = self.at_most.get(dtype)
        return None if largest is None else {"at_most": largest, "why": self.why}


def declaration_of(folder: str, name: str) -> Declaration:
    """Return what a kernel or a format declares; raises SuiteError.

    Code of another package is asked in a process of its own, because this one may judge it or
    write its rows.
    """
    if outside(folder, name):
        declare_all([(folder, name)])
    elif (folder, name) not in _declarations:
        _declarations[folder, name] = import_declaration(folder, name)
    return _declarations[folder, name]


def import_declaration(folder: str, name: str) -> Declaration:
    """Import a kernel or a format, and return what it declares. Raises SuiteError."""
    if folder == "formats":
        options = set() if masks(name) else keywords(weights_format(name).from_dense)
        return Declaration(options=tuple(sorted(options)))
    kernel = load_kernel(name)
    names = tuple(sorted(keywords(kernel.prepare)))
    plain = Declaration(kernel.op, kernel.consumes, kernel.device, names)
    lossy = kernel.lossy if package_of(folder, name) in OF_THIS_REPOSITORY else None
    return replace(plain, at_most={**lossy.at_most}, why=lossy.why) if lossy else plain


_declarations: dict[tuple[str, str], Declaration] = {}
"""Declarations by folder and name; a suite needs those of a kernel once a problem."""


def declare_all(names: Iterable[tuple[str, str]]) -> None:
    """Ask for the declarations of other packages together: a process takes seconds to start.

    Each package has a process of its own, because its code could change what others declare. A
    package of this repository, whose imports are known, is asked once for all that it has.
    """
    missing: dict[str, list[tuple[str, str]]] = {}
    for folder, name in names:
        if outside(folder, name) and (folder, name) not in _declarations:
            require_allowed(name, modules(folder).get(name, name).partition(":")[0])
            missing.setdefault(package_of(folder, name), []).append((folder, name))
    for package in OF_THIS_REPOSITORY & missing.keys():
        places = [(f, name) for f in ("kernels", "formats") for name in modules(f)]
        missing[package] += [
            each
            for each in places
            if package_of(*each) == package and each not in {*missing[package], *_declarations}
        ]
    with ExitStack() as stack:
        children = []
        for package, pairs in missing.items():
            child = Child(f"the process that imports {package}", DECLARE, lambda line: None)
            stack.callback(child.kill)
            child.send({"names": pairs, "path": sys.path})
            children.append((child, pairs))
        for child, pairs in children:
            answer = child.next(DECLARE_S)
            for folder, name in pairs:
                if isinstance(answer, ChildLoss):
                    raise SuiteError(f"{name}: {answer.detail}")
                _declarations[folder, name] = _parse(folder, name, answer.get(f"{folder} {name}"))


def _parse(folder: str, name: str, answer: Any) -> Declaration:
    """Return a declaration as its package's process gave it. Raises SuiteError."""
    if isinstance(answer, str):
        raise SuiteError(answer)
    try:
        entry = Declaration(**{**answer, "options": tuple(answer["options"])})
        words = entry.op, entry.consumes, entry.device, entry.why, *entry.options
        if not all(isinstance(word, str) for word in words):
            raise TypeError
    except (TypeError, LookupError):
        actual = str(answer)[:80]
        raise SuiteError(f"{name}: expected a declaration, found {actual}") from None
    ours = package_of(folder, name) in OF_THIS_REPOSITORY
    return entry if ours else replace(entry, at_most={}, why="")


def parameters(name: str) -> set[str]:
    """Return the parameters of a format that a suite may set."""
    return {*declaration_of("formats", name).options}


def load_kernel(name: str) -> "Kernel":
    """Return the KERNEL of a file, an entry point or a `package.module[:ATTR]`.

    A kernel that left the package supports no problem, and says why (kernels/_removed.py).
    """
    from sparsebench.kernels._kernel import Kernel

    if reason := removal(name) or not_installed(name):

        def prepare(operands: "Operands") -> "Launch":
            raise Unsupported(reason)

        return Kernel("any", "any", "any", prepare, lambda problem, device: reason)
    loaded = _of(load("kernels", name), Kernel, name)
    if not callable(loaded.prepare):
        raise SuiteError(f"{name}: expected prepare to be a function, found {loaded.prepare!r}")
    return loaded


def load_op(name: str) -> "Op":
    """Return the OP of a file, an entry point or a `package.module[:ATTR]`."""
    from sparsebench.harness.ops._op import Fields, Op

    loaded = _of(load("harness.ops", name), Op, name)
    if not (isinstance(loaded.fields, type) and issubclass(loaded.fields, Fields)):
        raise SuiteError(f"{name}: expected fields of a class of Fields, found {loaded.fields!r}")
    return loaded


def _of(loaded: Any, kind: type[T], name: str) -> T:
    if not isinstance(loaded, kind):
        what = kind.__name__
        raise SuiteError(f"{name}: expected {what.upper()} to be a {what}, found {loaded!r}")
    return loaded


def is_outside(contender: Contender) -> bool:
    """Return whether a contender's kernel or format is code of another package; imports nothing."""
    return outside("kernels", contender.kernel) or outside("formats", contender.format)


def keywords(function: Callable[..., Any]) -> set[str]:
    """Return a function's keyword-only parameters: those that a suite may set."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

"""Check how a model uses the layers that are to be replaced, before any of them changes.

    require_unread    code around a layer computes with its `weight`, such as Mamba's with dt_proj's
    exception         an nn.Linear that stays dense: a gate of few rows, a router, an adapter
    others            weights that no recipe takes: experts in one tensor, Conv1D, nn.LSTM

The code is the source of `forward` of every module around the layer, and of the methods that it
calls. It may read the metadata of a PackedWeight (kernels/nn/_weight.py): dtype, device and sizes.
Code without source, and functions that take a whole module, are not searched: there the first call
raises Unsupported.
"""

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import nn

from sparsebench.formats._format import require

FEW_ROWS = 8  # a gate with fewer rows stays dense: the kernels have no tile so small
ANY = "*"  # any part of a module, in a path
METADATA = {"device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape"}
METADATA |= {"dim", "numel", "size"}
WEIGHT = re.compile("weight|proj")  # found in the names of parameters that multiply
EXPERTS = re.compile("num.*_experts|n_routed_experts")
Path = tuple[str, ...]


def require_unread(model: nn.Module, names: Sequence[str]) -> None:
    """Raise FormatError if code around these modules computes with the weight of one."""
    for name, module in model.named_modules():
        kind: Any = type(module)
        if not (paths := _reads(kind)) or any(name == n or name.startswith(f"{n}.") for n in names):
            continue
        prefix = f"{name}." if name else ""
        parts = [part for n in names if n.startswith(prefix) for part in _parts(model, n, prefix)]
        pattern = "|".join(
            r"\.".join(r"[^.]+" if part == ANY else re.escape(part) for part in path)
            for path in paths
        )
        if matches := [part for part in parts if re.fullmatch(pattern, part)]:
            weights = {f"{part.rpartition('.')[2]}.weight" for part in matches}
            reads = f"{kind.__name__} computes with {' and '.join(sorted(weights))}"
            first = f"{prefix}{matches[0]}: expected a layer that is only called"
            require(False, f"{first}, found that {reads}: filter_fn can leave it out")


def _parts(model: nn.Module, name: str, prefix: str) -> Iterator[str]:
    """Yield the unprefixed names of a module and of everything that is removed with it."""
    for part, _ in model.get_submodule(name).named_modules():
        yield f"{name}.{part}".removeprefix(prefix).rstrip(".")


def exception(model: nn.Module, module: nn.Module, name: str) -> str | None:
    """Return why a layer that a recipe takes stays dense; None if it does not."""
    parts = name.split(".")
    owners = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    for owner, part in zip(owners, parts, strict=True):
        if part != "base_layer" and isinstance(getattr(owner, "base_layer", None), nn.Module):
            return "adapters"
    if isinstance(module, nn.Linear):
        if module.out_features < FEW_ROWS:
            return f"gates and heads of fewer than {FEW_ROWS} rows"
        if module.out_features in _experts(model):
            return "routers, which have a row for each expert"
    return None


def _experts(model: nn.Module) -> set[int]:
    """Return the numbers of experts in a Hugging Face model's configuration."""
    fields: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    return {n for name, n in fields.items() if EXPERTS.fullmatch(name) and isinstance(n, int)}


def others(
    model: nn.Module, names: Sequence[str], only_experts: bool
) -> Iterator[tuple[str, str, int]]:
    """Yield weights that are neither in the named modules nor in a layer that a recipe could take.

    Each is a reason, a name, and the number of elements.
    """
    for name, module in model.named_modules():
        excluded = isinstance(module, _EXCLUDED) or name.endswith(".parametrizations.weight")
        if excluded or any(name == n or name.startswith(f"{n}.") for n in names):
            continue
        kind = type(module).__name__
        experts = "expert" in f"{name}.{kind}".lower()
        for part, parameter in module.named_parameters(recurse=False):
            sides = sum(size > 1 for size in parameter.shape)
            multiplies = (experts or not only_experts) and not part.endswith("bias")
            if sides > 1 and multiplies and (WEIGHT.search(part) or sides > 2):
                reason = (
                    f"{kind}, whose experts share one tensor" if sides > 2 and experts else kind
                )
                yield reason, f"{name}.{part}" if name else part, parameter.numel()


_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d
_EXCLUDED = nn.Linear | nn.Embedding | nn.EmbeddingBag | _CONVOLUTIONS


def summary(left_out: Sequence[tuple[str, str, int]]) -> str:
    """Return one line about weights that stay dense; each is a reason, a name, and a size."""
    counts, sizes, first = Counter[str](), Counter[str](), dict[str, str]()
    for reason, name, size in left_out:
        counts[reason] += 1
        sizes[reason] += size
        first.setdefault(reason, name)
    lines = []
    for reason, count in counts.items():
        tensors = f"{count} tensor{'s' * (count > 1)}"
        weights = f"{sizes[reason]:,} weights in {tensors}, the first is {first[reason]}"
        lines.append(f"{reason} ({weights})")
    return "; ".join(lines)


# ---- source code ----


@cache
def _reads(kind: type[nn.Module]) -> frozenset[Path]:
    """Return the paths of modules whose weights a module of this class computes with."""
    reads: set[Path] = set()
    done: set[tuple[str, bool]] = set()
    pending = [("forward", False)]
    while pending:
        step = pending.pop()
        if step in done:
            continue
        done.add(step)
        name, every = step
        for function in _definitions(kind, name, every):
            source = _Source(kind)
            source.read(function)
            reads |= source.reads
            pending += [(method, False) for method in source.methods]
            pending += [(method, True) for method in source.inherited]
    return frozenset(reads)


def _definitions(kind: type, name: str, every: bool) -> Iterator[Any]:
    """Yield the function of this name that a class has; with `every`, also those it overrides."""
    for base in kind.__mro__[:-1]:
        if base is not nn.Module and (function := vars(base).get(name)) is not None:
            yield function.fget if isinstance(function, property) else function
            if not every:
                return


class _Source(ast.NodeVisitor):
    """Collect the weights and methods that a method uses, also through local names of modules.

    reads, methods, inherited  paths of weights, names of methods, and of methods called by super()
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.reads: set[Path] = set()
        self.methods: set[str] = set()
        self.inherited: set[str] = set()
        self.locals: dict[str, Path] = {"self": ()}
        self.harmless: set[ast.AST] = set()

    def read(self, function: Any) -> None:
        """Search a function. torch's fast paths ask `has_torch_function` before they read."""
        try:
            text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
            tree = ast.parse(text)
        except (OSError, TypeError, SyntaxError):
            return
        self.visit(tree)
        if "has_torch_function" in text:
            self.reads.clear()

    def path(self, node: ast.AST) -> Path | None:
        """Return the path from `self` to the module that an expression is; None if unknown."""
        match node:
            case ast.Name(id=name):
                return self.locals.get(name)
            case ast.Attribute(value=value, attr=attr):
                return None if (path := self.path(value)) is None else (*path, attr)
            case ast.Subscript(value=value):
                return None if (path := self.path(value)) is None else (*path, ANY)
            case ast.Call(func=ast.Attribute(value=value, attr="values" | "children" | "items")):
                return self.path(value)
            case ast.Call(
                func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]
            ):
                return None if (path := self.path(value)) is None else (*path, attr)
            case ast.Call(func=ast.Name(id="enumerate" | "reversed" | "list"), args=[value, *_]):
                return self.path(value)
        return None

    def bind(self, target: ast.AST, path: Path | None) -> None:
        """Bind the last name of a target to a module."""
        if isinstance(target, ast.Tuple):
            target = target.elts[-1]
        if isinstance(target, ast.Name):
            if path is None:
                self.locals.pop(target.id, None)
            else:
                self.locals[target.id] = path

    def loop(self, target: ast.AST, iterable: ast.AST) -> None:
        """Bind the names of a loop to the parts of the modules that it iterates over."""
        if isinstance(iterable, ast.Call) and getattr(iterable.func, "id", "") == "zip":
            for name, part in zip(getattr(target, "elts", []), iterable.args, strict=False):
                self.loop(name, part)
        else:
            path = self.path(iterable)
            self.bind(target, None if path is None else (*path, ANY))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target, self.path(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for generator in node.generators:
            self.visit(generator)
        self.visit(node.elt)

    visit_GeneratorExp = visit_SetComp = visit_ListComp  # type: ignore[assignment]

    def visit_Compare(self, node: ast.Compare) -> None:
        if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            self.harmless.add(node.left)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if getattr(node.func, "id", "") == "isinstance":
            self.harmless.update(node.args)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        value = node.value
        if node.attr in METADATA:
            self.harmless.add(value)
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "super":
            self.inherited.add(node.attr)
        path = self.path(value)
        if path == ():
            self.methods.add(node.attr)
        elif path and node.attr == "weight" and isinstance(node.ctx, ast.Load):
            self.reads |= set() if node in self.harmless else {path}
        self.generic_visit(node)

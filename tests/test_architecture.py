"""Who may import whom. The table is the architecture; this test keeps it true."""

import ast
import tokenize
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.tools.paths import ROOT

MAY_IMPORT = {
    "formats": set(),
    "results": set(),
    "suites": set(),
    "kernels": {"formats"},
    "reports": {"results"},
    "harness": {"formats", "kernels", "results", "reports", "suites"},
}
RE_EXPORTS = {"kernels/nn"}  # what users import: from sparsebench.kernels.nn import ...
MOST_LINES = 400
NEEDS_A_KERNEL_FILE = {"triton", "cupy", "nvmath"}
AUTHORS = sorted((ROOT / "authors/src").rglob("*.py"))
MODULES = [p for folder in MAY_IMPORT for p in sorted((ROOT / folder).rglob("*.py"))]
VLLM = sorted((ROOT / "src/sparsebench/vllm").glob("*.py"))  # a way in: it may import everything


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Return what a module imports, by full name."""
    imports: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imports


FAMILY_MAY_IMPORT: dict[str, set[str]] = {  # beside itself, _common and the contract, _kernel.py
    "bsr": {"dense"},
    "spense": {"dense"},
    "peers": {"dense"},
    "twell": {"dense"},
    "nn": {"attention", "bitmap", "bsr", "csr", "dense", "spense", "twell"},
}


def test_families_of_kernels_stand_apart() -> None:
    for path in (ROOT / "kernels").glob("*/*.py"):
        names = [name.split(".") for name in imported(path) if name.startswith("sparsebench.kern")]
        others = {parts[2] for parts in names} - {"_common", "_kernel", path.parent.name}
        assert others <= FAMILY_MAY_IMPORT.get(path.parent.name, set()), path


GROUP_MAY_IMPORT: dict[str, set[str]] = {  # each only what is above it here: no cycles
    "inputs": set(),
    "machine": set(),
    "patterns": {"inputs"},
    "ops": {"inputs"},
    "catalog": {"machine", "ops"},
    "bench": {"inputs", "machine", "patterns", "ops", "catalog"},
    "plan": {"inputs", "machine", "patterns", "ops", "catalog", "bench"},
    "doctor": {"machine", "bench", "plan"},
    "run": {"inputs", "machine", "patterns", "catalog", "bench", "plan", "doctor"},
    "claims": {"machine", "catalog", "patterns", "bench", "plan", "run"},
    "shared_runs": {"machine", "plan", "run", "claims"},
    "new_gpu": {
        "machine",
        "catalog",
        "bench",
        "plan",
        "run",
        "doctor",
        "shared_runs",
    },
    "models": {"inputs"},
}
MOST_GROUPS, MOST_IMPORTS = 16, 58
WAYS_IN = {"api", "commands", "testing"}  # these may import every group


def harness_imports() -> dict[str, set[str]]:
    """Return each group of the harness, a folder or a loose module, with the groups it imports."""
    imports: dict[str, set[str]] = {}
    for path in sorted((ROOT / "harness").rglob("*.py")):
        group = path.relative_to(ROOT / "harness").with_suffix("").parts[0]
        names = [name.split(".") for name in imported(path) if name.startswith("sparsebench.harn")]
        imports.setdefault(group, set()).update(parts[2] for parts in names if parts[2] != group)
    return {group: imports[group] for group in imports.keys() - {"__init__"}}


def test_groups_of_the_harness_stand_apart() -> None:
    for group, imports in harness_imports().items():
        assert group in WAYS_IN or imports <= GROUP_MAY_IMPORT[group], group


def test_the_harness_has_few_groups_and_few_imports_between_them() -> None:
    imports = harness_imports()
    assert len(imports) <= MOST_GROUPS
    assert sum(map(len, imports.values())) <= MOST_IMPORTS


def test_groups_of_the_harness_form_no_cycle() -> None:
    above: set[str] = set()
    for group, may_import in GROUP_MAY_IMPORT.items():
        assert may_import <= above
        above.add(group)


def test_no_module_of_the_package_imports_a_mock() -> None:
    assert not [path for path in MODULES if any("unittest" in name for name in imported(path))]


def test_no_modules_import_each_other_in_a_cycle() -> None:
    """Imports inside functions count too: they would only hide a cycle."""
    modules = {module_of(path): path for path in MODULES}
    sorter = TopologicalSorter[str]()
    for module, path in modules.items():
        for name in imported(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules:
                sorter.add(module, target)
    sorter.prepare()  # raises CycleError


def module_of(path: Path) -> str:
    return ".".join(("sparsebench", *path.relative_to(ROOT).with_suffix("").parts))


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_imports_point_one_way() -> None:
    for path in MODULES:
        siblings = {
            name.split(".")[1]
            for name in imported(path)
            if name.startswith("sparsebench.") and not name.startswith("sparsebench.results.record")
        }
        folder = folder_of(path)
        assert siblings & MAY_IMPORT.keys() <= MAY_IMPORT[folder] | {folder}, path


def test_kernels_of_other_authors_import_the_contract_formats_and_common_helpers() -> None:
    inside = "errors.", "_writing.", "formats.", "kernels._kernel", "kernels._common."
    allowed = tuple(f"sparsebench.{each}" for each in (*inside, "results.record."))
    for path in AUTHORS:
        names = {name for name in imported(path) if name.startswith("sparsebench.")}
        assert not {name for name in names if not name.startswith(allowed)}, path
    assert not [path for path in MODULES if "sparsebench_authors" in path.read_text()]


def test_folders_are_never_imported_by_their_bare_names() -> None:
    for path in MODULES:
        assert not {name.split(".")[0] for name in imported(path)} & MAY_IMPORT.keys(), path


def test_gpu_packages_stay_in_kernel_files() -> None:
    for path in MODULES:
        packages, folder = {name.split(".")[0] for name in imported(path)}, folder_of(path)
        assert folder == "kernels" or not packages & NEEDS_A_KERNEL_FILE, path
        assert folder not in ("results", "reports", "suites") or "torch" not in packages, path


def test_every_folder_of_modules_is_a_package_with_an_empty_init() -> None:
    for folder in {path.parent for path in [*MODULES, *VLLM]}:
        _, *rest = parsed(folder / "__init__.py").body
        name = str(folder.relative_to(ROOT))
        assert not rest or name in RE_EXPORTS, name
        assert all(isinstance(node, ast.ImportFrom) for node in rest), name


def test_every_file_says_what_it_is() -> None:
    for path in [*MODULES, *VLLM, *AUTHORS]:
        assert ast.get_docstring(parsed(path)), path


def test_a_file_is_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in [*MODULES, *VLLM]}
    assert not [str(path) for path, lines in lengths.items() if lines > MOST_LINES]


def test_a_class_name_is_unique_in_the_house() -> None:
    """Config is the exception: the configuration of the kernel in its file."""
    names = Counter(
        node.name
        for path in [*MODULES, *VLLM]
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == ["Config"]


MOST_CODE = {"formats": 1_410, "harness": 13_175, "results": 5_316, "reports": 5_069}
MOST_CODE |= {"kernels": 18_960, "src": 340}  # src: the plug-in for vLLM
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def code_lines(path: Path) -> int:
    """Return the number of lines with code: no blanks, comments, docstrings or imports."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in list(tokenize.tokenize(file.readline))[1:-1]:
            if token.type not in layout:
                lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines -= {*range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    return len(lines)


@pytest.mark.parametrize("folder", MOST_CODE)
def test_a_folder_has_at_most_so_much_code(folder: str) -> None:
    """A change that needs more room takes it from here, and says why in its message."""
    modules = [path for path in [*MODULES, *VLLM] if folder_of(path) == folder]
    assert sum(map(code_lines, modules)) <= MOST_CODE[folder]


def test_one_class_is_a_planned_call() -> None:
    """Product is the only one: a family that needs its own builds a second way to run kernels."""
    classes = [
        str(path.relative_to(ROOT))
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and node.name in ("Product", "Engine", "Operator")
    ]
    assert sorted(classes) == [
        f"kernels/_common/{n}.py" for n in ("operator", "operator", "product")
    ]

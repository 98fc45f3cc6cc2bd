"""formats/X.py stores what kernels/X multiplies and tests/kernels/X tests, for every family."""

import ast
import re

import pytest

from sparsebench.harness.catalog import load_kernel, names
from sparsebench.results.tables.families import family
from tests.tools.paths import ROOT

FAMILIES = "attention", "bitmap", "bsr", "csr", "dense", "spense", "twell"
FORMATS = names("formats")


def multiplied_by(name: str) -> str:
    """Return the family that a format's docstring names."""
    text = ast.get_docstring(ast.parse((ROOT / "formats" / f"{name}.py").read_text())) or ""
    (folder,) = re.findall(r"Multiplied by (?:kernels/)?(\w+)", text)
    return str(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_a_format_kernels_tests_a_readme_and_a_notebook(name: str) -> None:
    folder = ROOT / "kernels" / name
    stored = [f for f in FORMATS if multiplied_by(f) == name]
    assert stored
    assert [*(ROOT / "tests/kernels" / name).glob("test_*.py")]
    assert (folder / "NOTES.md").exists()
    readme = (folder / "README.md").read_text()
    assert any(f"formats/{f}.py" in readme for f in stored)
    assert "(NOTES.md)" in readme
    kernels = {kernel for kernel in names("kernels") if family(kernel) == name}
    assert kernels <= set(re.findall(r"`(\w+)`", readme))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_names_the_family_that_multiplies_it(name: str) -> None:
    assert multiplied_by(name) in (*FAMILIES, "peers", "authors")
    assert name not in FAMILIES or multiplied_by(name) == name


@pytest.mark.parametrize("name", [n for n in names("kernels") if family(n) in FAMILIES])
def test_a_kernel_consumes_a_format_of_its_family(name: str) -> None:
    stored = load_kernel(name).consumes
    if stored in ("any", "dense"):  # a dense rival may share a family's schedule (experts_dense)
        return
    text = (ROOT / "formats" / f"{stored}.py").read_text()
    assert f"Multiplied by kernels/{family(name)}" in text

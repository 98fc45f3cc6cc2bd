"""formats/X.py stores what kernels/X multiplies and tests/kernels/X tests, for every family."""

import ast
import re

import pytest

from sparsebench.harness.catalog import load_kernel, names
from sparsebench.results.families import family
from tests.tools.paths import ROOT

FAMILIES = "attention", "bitmap", "bsr", "csr", "dense", "spense", "twell"
FORMAT_OF = {"attention": "block_mask"}  # of families with another name than their format's
FAMILY_OF = {stored: family for family, stored in FORMAT_OF.items()}
FORMATS = sorted(p.stem for p in (ROOT / "formats").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_a_format_kernels_tests_a_readme_and_a_notebook(name: str) -> None:
    folder = ROOT / "kernels" / name
    stored = FORMAT_OF.get(name, name)
    assert (ROOT / "formats" / f"{stored}.py").exists()
    assert [*(ROOT / "tests/kernels" / name).glob("test_*.py")]
    assert (folder / "NOTES.md").exists()
    readme = (folder / "README.md").read_text()
    assert f"formats/{stored}.py" in readme
    assert "(NOTES.md)" in readme
    kernels = {kernel for kernel in names("kernels") if family(kernel) == name}
    assert kernels <= set(re.findall(r"`(\w+)`", readme))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_names_the_family_that_multiplies_it(name: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "formats" / f"{name}.py").read_text())) or ""
    (found,) = re.findall(r"Multiplied by kernels/(\w+)", text)
    assert found == FAMILY_OF.get(name, name if name in FAMILIES else "twell")


@pytest.mark.parametrize("name", [n for n in names("kernels") if family(n) in FAMILIES])
def test_a_kernel_consumes_a_format_of_its_family(name: str) -> None:
    stored = load_kernel(name).consumes
    if stored == "any":
        return
    text = (ROOT / "formats" / f"{stored}.py").read_text()
    assert f"Multiplied by kernels/{family(name)}" in text

"""The names that the distribution registers, and the contract of each kernel on a GPU."""

import tomllib
from pathlib import Path

import pytest

from sparsebench import testing
from sparsebench._discovery import own_code_only
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._kernel import Kernel
from sparsebench.kernels._removed import AUTHORS
from sparsebench.results.record import FORMATS_ONCE_DENSE

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
PLACES = PROJECT["project"]["entry-points"]["sparsebench.kernels"]
FEW_UNITS = "k=2048 activation=relu active=29"
PROBLEMS = {
    "macko": "m=1 n=512 k=256 pattern=unstructured sparsity=0.9",
    "marlin": "m=64 n=512 k=256 weight_bits=4",
    "scattermoe": "m=16 n=256 k=128 experts=4 top_k=2",
    "sparse_marlin": "m=64 n=512 k=256 weight_bits=4 pattern=two_four sparsity=0.5",
    "spinfer": "m=64 n=512 k=256 pattern=unstructured sparsity=0.9",
    "twell_authors": f"m=256 n=5632 {FEW_UNITS}",
    "twell_authors_mlp": f"m=256 n=8192 {FEW_UNITS}",
    "twell_authors_step": f"m=256 n=5632 {FEW_UNITS}",
}


def test_the_names_are_those_that_sparsebench_says_are_here() -> None:
    assert {*PLACES} == AUTHORS == {*PROBLEMS}


@pytest.mark.parametrize(("name", "place"), PLACES.items())
def test_a_registered_kernel_can_be_loaded(name: str, place: str) -> None:
    with own_code_only():  # the suite of a bundle may name it
        kernel = load_kernel(place)
    assert isinstance(kernel, Kernel)
    assert kernel.consumes == FORMATS_ONCE_DENSE.get(name, kernel.consumes)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # their code warns
@pytest.mark.parametrize(("name", "words"), PROBLEMS.items())
def test_a_kernel_is_right_on_a_gpu_captured_and_pinned(name: str, words: str) -> None:
    try:
        testing.check_kernel(PLACES[name], words, device="cuda:0")
    except AssertionError as failure:
        if "found none" in str(failure) and "needs" in str(failure):
            pytest.skip(str(failure))
        raise

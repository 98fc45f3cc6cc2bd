"""The portable kernels in CUDA C++ compile for every GPU from 8.0 on, and a table says which do.

The table in kernels/README.md is drawn from the record of compiles; a test fails, and shows the
table, if they differ.
"""

from collections import defaultdict

import pytest
import torch

from sparsebench.formats.csr import Csr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.unstructured import UnstructuredCall
from sparsebench.kernels.bsr import bsr_resident
from sparsebench.kernels.csr import csr_cuda, csr_cuda_wgrad
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.compiling.record import RECORD
from tests.tools.marks import sampled
from tests.tools.paths import KERNELS

GPUS = {"8.0": ("80",), "8.9": ("89",), "9.0": ("90", "90a"), "10.0": ("100",), "12.0": ("120",)}
FP32, BF16 = torch.float32, torch.bfloat16


def variants(name: str) -> list[cuda.Constants]:
    """Return the macros of typical configurations of a kernel."""
    if module := {"csr_cuda": csr_cuda, "csr_cuda_wgrad": csr_cuda_wgrad}.get(name):
        call, one = UnstructuredCall("linear", 1), torch.ones(1, 1)
        ways = [(module.choices(Csr.from_dense(one.to(d)), call)[0], d) for d in (FP32, BF16)]
        return [module.constants_of(*way, True) for way in ways]
    if name == "bsr_resident":
        configs = (
            bsr_resident.Config(16, 4),
            bsr_resident.Config(32, 8),
            bsr_resident.Config(16, 8, 2),
        )
        return [bsr_resident.constants_of(config, (10, 10), BF16) for config in configs]
    return [(("PIECE_BYTES", 16),)]


CASES = [
    (name, f"sm_{target}")
    for name in ("csr_cuda", "csr_cuda_wgrad", "bsr_resident", "pack")
    for target in ("80", "89", "90", "100", "120")
]


@by_nvcc
@pytest.mark.parametrize(("name", "target"), sampled(CASES), ids=str)
def test_a_portable_kernel_compiles_without_a_spill(name, target, tmp_path) -> None:
    for constants in variants(name):
        assert_compiles_cleanly(name, constants, tmp_path, target=target)


def table() -> list[str]:
    """Return the lines of the table that the record gives."""
    targets = defaultdict(set)
    for line in RECORD.read_text().splitlines():
        source, compiler, target, *_ = line.split()
        family, name = source.removesuffix(".cu").split("/")
        number = target.removeprefix("arch=compute_").removeprefix("sm_")
        targets[family, compiler, name].add(number)
    rows = defaultdict(list)
    for (family, compiler, source), numbers in sorted(targets.items()):
        marks = tuple("yes" if numbers & {*given} else "" for given in GPUS.values())
        rows[family, compiler, marks].append(f"`{source}`")
    lines = [f"| family | source | {' | '.join(GPUS)} |", "|---|---|" + "---|" * len(GPUS)]
    for (family, compiler, marks), sources in rows.items():
        what = "Triton: " if compiler == "triton" else ""
        lines.append(f"| {family} | {what}{', '.join(sources)} | {' | '.join(marks)} |")
    return lines


def test_the_readme_has_the_table_of_the_record() -> None:
    assert "\n".join(table()) in (KERNELS / "README.md").read_text()

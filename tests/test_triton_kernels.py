"""The Triton kernels: right in Triton's interpreter, and refused where Triton cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import triton

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels import bsr_triton, dense_triton
from sparsebench.results.record import Problem

KERNELS = [bsr_triton, dense_triton]


NUMPY, TRITON = (tuple(map(int, p.__version__.split(".")[:2])) for p in (numpy, triton))


@pytest.mark.skipif(
    NUMPY >= (2, 5) and TRITON < (3, 7),
    reason="Triton 3.6's interpreter makes scalars in a way that numpy 2.5 refuses",
)
def test_every_product_is_right_in_tritons_interpreter():
    # A process of its own: the variable is read when triton is imported.
    cases = Path(__file__).with_name("triton_interpreted.py")
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]


@pytest.mark.parametrize("module", KERNELS)
def test_a_cpu_is_refused_outside_the_interpreter(module):
    problem = Problem("linear", {"dtype": "fp16"})
    reason = module.KERNEL.supports(problem, torch.device("cpu"))
    assert reason == "needs an NVIDIA GPU, found cpu"


def test_united_rows_hold_the_blocks_of_their_group_once():
    w = torch.zeros(6, 6)
    w[0, 0] = w[1, 3] = w[2, 2] = w[5, 5] = 1
    stored = Bsr.from_dense(w, block=1)
    config = bsr_triton.configurations(1, (1, 1), 4, "pointers")[0]
    packed = bsr_triton.pack(stored, config)
    assert packed.offsets.tolist() == [0, 4]
    assert packed.columns.tolist()[:4] == [0, 2, 3, 5]
    assert packed.values[:, :6, 0].tolist() == w[:, [0, 2, 3, 5]].T.tolist()
    assert packed.values.sum() == 4


def test_blocks_of_whole_tiles_are_used_as_they_are_stored():
    stored = Bsr.from_dense(torch.ones(256, 256).half(), block=128)
    config = bsr_triton.configurations(4096, (128, 128), 2, "tma")[0]
    assert bsr_triton.pack(stored, config).values is stored.values


def test_long_block_rows_come_first():
    w = torch.zeros(192, 256).half()
    w[64:128] = 1
    w[128, 0] = 1
    stored = Bsr.from_dense(w, block=64)
    config = bsr_triton.configurations(4096, (64, 64), 2, "tma")[0]
    assert bsr_triton.pack(stored, config).order.tolist() == [1, 2, 0]

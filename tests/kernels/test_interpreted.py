"""Run the tests marked `interpreted` in Triton's interpreter, a process for each group of folders.

TRITON_INTERPRET=1 must be set before triton is imported, and then the process cannot compile.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import triton

from tests.tools.marks import sampled

HERE = Path(__file__).parent
NUMPY, TRITON = (tuple(map(int, p.__version__.split(".")[:2])) for p in (numpy, triton))
GROUPS = [[HERE / "bsr", HERE / "nn"], sorted({*HERE.iterdir()} - {HERE / "bsr", HERE / "nn"})]


@pytest.mark.skipif(
    NUMPY >= (2, 4) and TRITON < (3, 7),
    reason="Triton 3.6's interpreter makes scalars in a way that numpy 2.4 refuses",
)
@pytest.mark.parametrize("which", sampled(["not exhaustive", "exhaustive"]))
@pytest.mark.parametrize("group", GROUPS, ids=["bsr, nn", "others"])
def test_kernels_are_right_in_the_interpreter(group: list[Path], which: str) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
    ]
    folders = [str(path) for path in group if path.is_dir() or path.name.startswith("test_")]
    run = subprocess.run(
        [*command, "-m", f"interpreted and {which}", *folders],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]

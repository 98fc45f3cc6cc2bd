"""Run the tests marked `interpreted` in Triton's interpreter: the sample, and the others.

TRITON_INTERPRET=1 must be set before triton is imported, and then the process cannot compile.
It collects only the files that have such a test, because importing all of them takes 5 s.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import triton

from tests.tools.marks import exhaustive

HERE = Path(__file__).parent
NUMPY, TRITON = (tuple(map(int, p.__version__.split(".")[:2])) for p in (numpy, triton))
FILES = [
    str(path) for path in sorted(HERE.rglob("test_*.py")) if "mark.interpreted" in path.read_text()
]


@pytest.mark.skipif(
    NUMPY >= (2, 4) and TRITON < (3, 7),
    reason="Triton 3.6's interpreter makes scalars in a way that numpy 2.4 refuses",
)
@pytest.mark.parametrize("which", ["not exhaustive", exhaustive("exhaustive")])
def test_kernels_are_right_in_the_interpreter(which: str) -> None:
    options = "-q", "-p", "no:cacheprovider", "-W", "default", "-m", f"interpreted and {which}"
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, *FILES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]

"""A file's tests in Triton's interpreter, in a process of their own.

The variable that chooses the interpreter is read when triton is imported, and then no kernel of the
process can be compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUMPY, TRITON = (tuple(map(int, p.__version__.split(".")[:2])) for p in (numpy, triton))

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="runs outside of it")
has_interpreter = pytest.mark.skipif(
    NUMPY >= (2, 4) and TRITON < (3, 7),
    reason="Triton 3.6's interpreter makes scalars in a way that numpy 2.4 refuses",
)


def assert_passes(tests: str | Path, *options: str) -> None:
    """Run the tests of a file with these options of pytest; some must be there, and all pass."""
    command = sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"
    run = subprocess.run(
        [*command, *options, str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert " passed" in run.stdout

"""The plan for compute capability 10.0 compiles, and its main loop is in the machine code.

blackwell.cu is a probe and no kernel: no suite can name it, and nothing has run it. Its numbers are
in kernels/spense/NOTES.md.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from sparsebench.kernels._common import cuda
from tests.compiling.nvcc import CLEAN, by_nvcc, nvcc_version, text_of
from tests.compiling.record import in_record
from tests.kernels.spense.examples import CUOBJDUMP
from tests.tools.marks import sampled

PROBE = Path(__file__).with_name("blackwell.cu")
TARGET = "arch=compute_100a,code=sm_100a"
STAGES = {0: 3, 1: 2}  # of 74 KB (bf16) and 79 KB (e4m3 with scales)
IN_A_STEP = {  # instructions: sparse products, copies into tensor memory
    0: {"UTCHMMA": 4, "UTCCP": 1},
    1: {"UTCQMMA": 4, "UTCCP": 8},
}


@by_nvcc
@pytest.mark.parametrize(("mx", "gather"), sampled([(1, 1), (1, 0), (0, 1), (0, 0)]))
def test_the_main_loop_of_the_plan_compiles(mx: int, gather: int, tmp_path: Path) -> None:
    macros = {"MX": mx, "GATHER": gather, "STAGES": STAGES[mx]}
    about = PROBE.name, cuda.source_of("spense_mma").parent, "nvcc", TARGET.split(",")[0]
    if in_record(*about, nvcc_version(), text_of(PROBE), CUOBJDUMP.exists()):
        return
    command = ["nvcc", "-std=c++17", f"-gencode={TARGET}", "-cubin", "-Xptxas", "-v"]
    command += [f"-D{name}={value}" for name, value in macros.items()]
    command += ["-I", str(cuda.HEADERS), "-o", str(tmp_path / "probe.cubin"), str(PROBE)]
    run = subprocess.run(command, capture_output=True, text=True)
    log = run.stdout + run.stderr
    assert run.returncode == 0, log
    assert CLEAN in log, log
    assert "warning" not in log, log
    assert int(re.findall(r"Used (\d+) registers", log)[0]) <= 48
    if CUOBJDUMP.exists():
        sass = subprocess.check_output([CUOBJDUMP, "-sass", tmp_path / "probe.cubin"], text=True)
        counts = Counter(re.findall(r"\b(UTCHMMA|UTCQMMA|UTCCP|LDTM)\b", sass))
        assert counts == {**IN_A_STEP[mx], "LDTM": 28}
        loads = Counter(re.findall(r"UTMALDG\.2D(?:\.GATHER4)?", sass))
        assert loads == {"UTMALDG.2D" + ".GATHER4" * gather: 2}

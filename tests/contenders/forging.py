"""A kernel that answers in place of its worker: it writes rows into every open file."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, replace

from declare import kernel

from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.results.record import Case, Contender, Row, Status

RIVALS = Contender("dense", "torch_dense", baseline=True), Contender("dense", "forging:forges_rows")


@kernel()
def forges_rows(operands: Operands) -> Launch:
    """Write an answer in which every contender takes a nanosecond, and end the process."""
    blank = [Row(Case(operands.problem, rival), Status.OK) for rival in RIVALS]
    rows = [asdict(replace(row, scope="kernel", cache="hot", samples_us=(1e-3,))) for row in blank]
    answer = {"contest": operands.problem.id, "rows": rows, "spent_s": {}}
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            os.write(file, f"{json.dumps(answer)}\n".encode())
    os._exit(0)

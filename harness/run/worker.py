"""The child process that measures: a contest a line in, JSON lines out, until stdin closes.

    > {"ceilings": ["bf16"]}           of products of these dtypes
    < {"ceilings": {...}}              what the device can do at most
    > {"problem": ..., "contenders": [...], "replicate": 0, "attempt": 0, ...}  (ContestOptions)
    < {"at": [case id, stage]}         before anything of a case runs
    < {"failed": [case id, reason, traceback]} of a case that raised; "" where nobody is to blame
    < {"contest": problem id, "rows": [...], "spent_s": {}}
                                       or {"fatal": [case id, reason]}, and the process ends

Its first line describes the device. With --wait it says before that all is imported, CUDA_PACKAGES
among it, and waits for the device in a line, [DEVICE, DATA]. Whatever a kernel prints goes to
stderr: answers have a descriptor of their own.
Usage: python -P -m sparsebench.harness.run.worker DEVICE [DATA] | --wait
"""

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

from sparsebench.harness.bench import contest
from sparsebench.harness.bench import device_ceilings as ceilings
from sparsebench.harness.bench.contest_state import ContestOptions, Fatal, explained
from sparsebench.harness.machine.device import environment, identity, slug
from sparsebench.harness.machine.parent_watch import WAIT, end_with_parent
from sparsebench.results.record import Contender, Problem

# Of kernel files, 1 s warm together; and what torch's BSR product imports, 3 s (torch._dynamo).
CUDA_PACKAGES = "triton", "cupy", "nvmath.bindings.cublasLt", "torch.sparse._triton_ops"
DUMP = signal.SIGUSR1  # asks for the stacks of all threads, on stderr


def main() -> None:
    """Answer contests."""
    end_with_parent()
    faulthandler.enable()  # the stack of a crash, on stderr
    faulthandler.register(DUMP)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = sys.argv[1:]
    if given == [WAIT]:
        if torch.version.cuda:
            _import_early()
        _say(answers, {"imported": True})
        given = json.loads(sys.stdin.readline() or "[]")
        if not given:  # the parent has ended
            return
    device = torch.device(given[0])
    data = Path(given[1]) if len(given) > 1 else None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    about = {"environment": environment(device), "identity": identity(device), "slug": slug(device)}
    _say(answers, about)
    for line in sys.stdin:
        asked = json.loads(line)
        if "problem" not in asked:
            _say(answers, {"ceilings": asdict(ceilings.measure(device, asked["ceilings"]))})
            continue
        try:
            _say(answers, _measure(asked, device, data, answers))
        except Fatal as end:
            _say(answers, {"failed": [end.case, end.detail, explained(end)]})
            _say(answers, {"fatal": [end.case, end.detail]})
            os._exit(3)  # the context is gone: destructors would only crash
    sys.stdout.flush()  # what kernels printed, by Python and by C
    ctypes.CDLL(None).fflush(None)
    os._exit(0)  # Python takes 0.2 s to forget its modules, and the next process waits for that


def _import_early() -> None:
    """Import what kernel files import when they are used; they say themselves what is missing."""
    for package in CUDA_PACKAGES:
        with suppress(ImportError):
            import_module(package)


def _measure(
    asked: dict[str, Any], device: torch.device, data: Path | None, answers: IO[str]
) -> dict[str, Any]:
    problem = Problem.from_json(asked.pop("problem"))
    rows, spent_s = contest.run(
        problem,
        [Contender(**contender) for contender in asked.pop("contenders")],
        device,
        data,
        ContestOptions.from_json(asked),
        announce=lambda case, stage: _say(answers, {"at": [case, stage]}),
        explain=lambda *failed: _say(answers, {"failed": failed}),
    )
    if device.type == "cuda":
        gc.collect()  # cycles hold operands: the next contest needs the memory
        gc.freeze()  # modules and caches stay: a collection takes 1 ms without them, 100 with them
        torch.cuda.empty_cache()
    answer = {"rows": [asdict(row) for row in rows], "spent_s": spent_s}
    return {"contest": problem.id, **answer}


def _say(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()

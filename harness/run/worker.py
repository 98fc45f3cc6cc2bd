"""The child process that measures: one contest per line in, JSON lines out, until stdin closes.

    < {"imported": true}               everything is imported, CUDA_PACKAGES included
    > ["cuda:0", "/data"]              the device, and the data folder if there is one
    < {"environment": ..., ...}        describes the device
    > {"ceilings": ["bf16"]}           measure the ceilings, of products in these dtypes
    < {"ceilings": {...}}
    > {"problem": ..., "contenders": [...], "nonce": ..., "replicate": 0, ...}  (ContestOptions)
    < {"at": [case id, stage]}         before anything of a case runs
    < {"failed": [case id, reason, traceback]}   a case raised; case id "" if none is to blame
    < {"contest": problem id, "nonce": ..., "rows": [...], "spent_s": {}}
                                       or {"fatal": [case id, reason]}, and the process ends

This process is the judge: it draws, compares, rounds and writes. It runs the package's kernels, and
imports no other package but those that define the problem's op and pattern. Kernels from outside
run in processes of their own (bench/guest.py). What a kernel prints goes to stderr; answers have
their own file descriptor.
"""

import ctypes
import gc
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from sparsebench._discovery import own_code_only, package_of
from sparsebench.harness.bench import contest, device_ceilings
from sparsebench.harness.bench.contest_state import ContestOptions, Fatal, traceback_of
from sparsebench.harness.machine.child_process import Send, answer_parent
from sparsebench.harness.machine.device import environment, identity, slug
from sparsebench.results.record import Contender, Problem

# What kernel files import (1 s when cached), torch's BSR product (torch._dynamo: 3 s), and the
# first call of torch.compile (2 s).
CUDA_PACKAGES = (
    "triton",
    "cupy",
    "nvmath.bindings.cublasLt",
    "torch.sparse._triton_ops",
    "torch._inductor.compile_fx",
)


def main() -> None:
    """Answer requests until stdin closes."""
    send = answer_parent()
    if torch.version.cuda:
        for package in CUDA_PACKAGES:
            with suppress(ImportError):  # the kernel reports it when it is used
                import_module(package)
    gc.collect()
    gc.freeze()  # see `_measure`: the first contest collects often, too
    send({"imported": True})
    name, *folder = json.loads(sys.stdin.readline() or "[null]")
    if not name:
        return  # the parent has ended
    device, data = torch.device(name), Path(*folder) if folder else None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    about = {"environment": environment(device), "identity": identity(device), "slug": slug(device)}
    send(about)
    for line in sys.stdin:
        request = json.loads(line)
        if "problem" not in request:
            ceilings = device_ceilings.measure(device, request["ceilings"])
            send({"ceilings": asdict(ceilings)})
            continue
        try:
            send(_measure(request, device, data, send))
        except Fatal as end:
            send({"failed": [end.case, end.detail, traceback_of(end)]})
            send({"fatal": [end.case, end.detail]})
            os._exit(3)  # the CUDA context is broken: destructors would crash
    sys.stdout.flush()  # what kernels printed, by Python and by C
    ctypes.CDLL(None).fflush(None)
    os._exit(0)  # a normal exit takes 0.2 s, and the next process waits for it


def _measure(
    request: dict[str, Any], device: torch.device, data: Path | None, send: Send
) -> dict[str, Any]:
    nonce = request.pop("nonce", "")
    problem = Problem.from_json(request.pop("problem"))
    contenders = [Contender(**contender) for contender in request.pop("contenders")]
    definers = (
        package_of("harness.ops", problem.op),
        package_of("harness.patterns", problem["pattern"]),
    )
    with own_code_only(definers):
        rows, spent_s = contest.run(
            problem,
            contenders,
            device,
            data,
            ContestOptions.from_json(request),
            announce=lambda case, stage: send({"at": [case, stage]}),
            on_failure=lambda *failed: send({"failed": failed}),
        )
    if device.type == "cuda":
        gc.collect()  # cycles hold operands, and the next contest needs the memory
        gc.freeze()  # modules and caches stay: a later collection takes 1 ms instead of 100 ms
        torch.cuda.empty_cache()
    answer = {"rows": [asdict(row) for row in rows], "spent_s": spent_s}
    return {"contest": problem.id, "nonce": nonce, **answer}


if __name__ == "__main__":
    main()

"""The simulated GPU's child process: it follows the protocol of worker.py, and runs no kernel.

    contenders   take the times of gpu_model.py; the spec plans faults
    rows         are marked: clock `sim`, device `sim-SEED`, a GPU named `simulated ...`

Everything above it is real: runner, timeouts, rows on disk, statistics, report. The same spec,
suite and process number give the same rows; another seed is another device.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.machine.device import environment, portable
from sparsebench.harness.machine.parent_watch import end_with_parent
from sparsebench.harness.plan.selection import meets
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.sim import simulated_contest
from sparsebench.harness.sim.gpu_model import Spec, read
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Contender, Problem


def main() -> None:
    """Answer contests until stdin closes."""
    end_with_parent()
    _send({"imported": True})
    device, *_ = json.loads(sys.stdin.readline() or "[null]")
    if not device:
        return  # the parent has ended
    spec = read(device)
    _send({"environment": _environment(device, spec), "identity": spec.identity, "slug": "sim"})
    for line in sys.stdin:
        request = json.loads(line)
        if "problem" in request:
            nonce = request.pop("nonce", "")
            problem = Problem.from_json(request.pop("problem"))
            contenders = [Contender(**contender) for contender in request.pop("contenders")]
            announce = lambda case, stage: _send({"at": [case, stage]})  # noqa: E731
            options = ContestOptions.from_json(request)
            rows = simulated_contest.run(spec, problem, contenders, options, announce)
            written = [asdict(row) for row in rows]
            _send({"contest": problem.id, "nonce": nonce, "rows": written, "spent_s": {}})
        else:
            _send({"ceilings": asdict(_ceilings(spec))})


def require_plan(device: str, contests: Sequence[Contest]) -> None:
    """Raise SuiteError if the spec cannot be read, or plans a fault that no case would meet."""
    for fault in read(device).faults:
        if not any(meets(c.problem, k, fault.when) for c in contests for k in c.contenders):
            planned = f"{fault.fault} when {fault.when!r}"
            raise SuiteError(
                f"--device {device}: {planned}: expected at least one case, found none"
            )


def _environment(device: str, spec: Spec) -> dict[str, Any]:
    written = spec.model_dump_json(by_alias=True)
    gpu = {
        "name": f"simulated {spec.gpu}",
        "uuid": spec.identity,
        "compute_capability": spec.capability,
        "l2_bytes": spec.l2_bytes,
        "spec_sha256": hashlib.sha256(written.encode()).hexdigest(),
    }
    here = environment(torch.device("cpu"))
    return here | {"device": portable(device), "gpu": gpu, "sim": json.loads(written)}


def _ceilings(spec: Spec) -> Ceilings:
    bandwidth = spec.bandwidth_gb_per_s
    rates = spec.matrix_tflops.model_dump(exclude_none=True)
    return Ceilings(bandwidth, bandwidth, rates, spec.launch_us, spec.l2_bytes)


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

"""The simulated GPU's worker process: it follows the protocol of run/worker.py, without kernels.

    contenders   take the times of gpu_model.py; the spec plans faults
    rows         are marked: clock `sim`, device `sim-SEED`, a GPU named `simulated ...`

tests/conftest.py sets the hook by which the harness starts it (harness/machine/stand_in.py).
Everything above it is real: runner, timeouts, rows on disk, statistics, report. The same spec,
suite and process number give the same rows; another seed is another device.
"""

import hashlib
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.machine.device import environment
from sparsebench.harness.machine.parent_watch import end_with_parent
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Contender, Problem
from tests.simulated import simulated_contest
from tests.simulated.gpu_model import Spec, read


def main() -> None:
    """Answer contests until stdin closes."""
    end_with_parent()
    _send({"imported": True})
    device, *_ = json.loads(sys.stdin.readline() or "[null]")
    if not device:
        return  # the parent has ended
    spec = read(device)
    _send(about(device, spec))
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
            _send({"ceilings": asdict(ceilings(spec))})


def about(device: str, spec: Spec) -> dict[str, Any]:
    """Return the answer of a worker that takes its device."""
    written = spec.model_dump_json(by_alias=True)
    gpu = {
        "name": f"simulated {spec.gpu}",
        "uuid": spec.identity,
        "compute_capability": spec.capability,
        "l2_bytes": spec.l2_bytes,
        "spec_sha256": hashlib.sha256(written.encode()).hexdigest(),
    }
    here = environment(torch.device("cpu")) | {"device": device, "gpu": gpu}
    return {"environment": here, "identity": spec.identity, "slug": "sim"}


def ceilings(spec: Spec) -> Ceilings:
    bandwidth = spec.bandwidth_gb_per_s
    rates = spec.matrix_tflops.model_dump(exclude_none=True)
    return Ceilings(bandwidth, bandwidth, rates, spec.launch_us, spec.l2_bytes)


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

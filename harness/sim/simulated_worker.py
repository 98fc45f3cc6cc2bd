"""The simulated GPU's child process: it speaks worker.py's protocol, and runs no kernel.

    contenders   take the times of clock.py; the spec plans what goes wrong
    rows         are marked: clock `sim`, device `sim-SEED`, a GPU named `simulated ...`

Everything above it is the real thing: runner, timeouts, rows on disk, statistics, report. The same
spec, suite and number of the process give the same rows; another seed is another device.

Usage: python -P -m sparsebench.harness.sim.simulated_worker sim[:FILE.yaml] [DATA] | --wait
"""

import hashlib
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.machine.device import environment, portable
from sparsebench.harness.machine.parent_watch import WAIT, end_with_parent
from sparsebench.harness.sim import simulated_contest as sim_contest
from sparsebench.harness.sim.gpu_model import Spec, read
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Contender, Problem


def main() -> None:
    """Answer contests until stdin closes."""
    end_with_parent()
    given = sys.argv[1:]
    if given == [WAIT]:
        _say({"imported": True})
        given = json.loads(sys.stdin.readline() or "[]")
        if not given:  # the parent has ended
            return
    device = given[0]
    spec = read(device)
    _say({"environment": _environment(device, spec), "identity": spec.identity, "slug": "sim"})
    for line in sys.stdin:
        asked = json.loads(line)
        if "problem" in asked:
            problem = Problem.from_json(asked.pop("problem"))
            contenders = [Contender(**contender) for contender in asked.pop("contenders")]
            rows = sim_contest.run(
                spec, problem, contenders, ContestOptions.from_json(asked), _announce
            )
            written = [asdict(row) for row in rows]
            _say({"contest": problem.id, "rows": written, "spent_s": {}})
        else:
            _say({"ceilings": asdict(_ceilings(spec))})


def _environment(device: str, spec: Spec) -> dict[str, Any]:
    """Return what environment.json holds: this machine, a GPU that is not there, and its spec."""
    written = spec.model_dump_json(by_alias=True)
    gpu = {
        "name": f"simulated {spec.gpu}",
        "uuid": spec.identity,
        "l2_bytes": spec.l2_bytes,
        "spec_sha256": hashlib.sha256(written.encode()).hexdigest(),
    }
    here = environment(torch.device("cpu"))
    return here | {"device": portable(device), "gpu": gpu, "sim": json.loads(written)}


def _ceilings(spec: Spec) -> Ceilings:
    bandwidth = spec.bandwidth_gb_per_s
    rates = spec.matrix_tflops.model_dump()
    return Ceilings(bandwidth, bandwidth, rates, spec.launch_us, spec.l2_bytes)


def _announce(case: str, stage: str) -> None:
    _say({"at": [case, stage]})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

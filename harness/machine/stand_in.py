"""The hook by which tests supply a device: a module plays it, and no GPU is needed.

    SPARSEBENCH_STAND_IN=sim=tests.simulated.worker

`--device sim` and `--device sim:…` then start `python -m tests.simulated.worker` as the worker. It
follows the protocol of run/worker.py. The harness takes every contender for one that runs there,
and looks for no other work on the machine.
"""

import os

VARIABLE = "SPARSEBENCH_STAND_IN"


def stand_in(device: str) -> str | None:
    """Return the module that plays a device, or None for a device of this machine."""
    name, _, module = os.environ.get(VARIABLE, "").partition("=")
    return module if name and device.partition(":")[0] == name else None

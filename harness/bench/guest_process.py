"""A guest process as the judge sees it (guest.py): start it, ask it, stop it between requests."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import get_native_id
from typing import Any, NamedTuple

import torch

from sparsebench.harness.bench.contest_state import GuestLoss
from sparsebench.harness.machine.child_process import PYTHON, Child, ChildLoss
from sparsebench.kernels._common.driver import driver
from sparsebench.results.record import Status

COMMAND = *PYTHON, "sparsebench.harness.bench.guest"
CPU_CLOCK = 2  # of a process, in a clockid_t: all its threads, those that have ended included
ANSWER_BYTES = 2**20  # candidates have 256 KB at most (prepare.py), and 128 times 4 KB
START_S = 300.0  # importing torch on a cold disk
COMPUTE_MODE = 20  # CUdevice_attribute
EXCLUSIVE = 3  # CUcomputemode
ONE_PROCESS = "expected a GPU that several processes may use (nvidia-smi --compute-mode 0)"

ENDS = Status.WRONG, Status.FAILED, Status.UNSUPPORTED, Status.OUT_OF_MEMORY
"""How a guest may say that its contender ended."""


class Waits(NamedTuple):
    """How long processes were ready to run and had no core, in ns, by the kernel's count.

    judge   the thread that waits for the guest: others of the judge may be busy with other work
    guest   the main thread of the guest: it could have as many others wait as it likes
    others  the cores' time that the guest's other threads took, for which the main thread may wait
    """

    judge: int
    guest: int
    others: int

    def since(self, before: "Waits") -> float:
        """Return the seconds for which other work kept both waiting.

        A sample hardly ever includes such a wait, while the mean of a burst does.
        """
        judge, guest, others = (now - then for now, then in zip(self, before, strict=True))
        return (judge + max(0, guest - others)) / 1e9


def _counts(task: Path) -> tuple[int, int]:
    """Return how long a thread ran, and was ready to run and had no core, in ns."""
    with suppress(OSError, LookupError, ValueError):
        ran, waited, *_ = map(int, (task / "schedstat").read_text("ascii").split())
        return ran, waited
    return 0, 0


class GuestProcess:
    """A guest process, as the judge sees it. It imports until `begin`."""

    def __init__(self) -> None:
        self.child = Child("the contender's process", COMMAND, sys.stderr.write, ANSWER_BYTES)

    def begin(self, device: torch.device) -> None:
        """Let the process take the device. Raises GuestLoss."""
        self._answer(self.child.next(START_S))
        if device.type == "cuda" and exclusive(device):
            raise GuestLoss(Status.UNSUPPORTED, f"{ONE_PROCESS}, found one for a single process")
        self.child.send([str(device), *sys.path])

    def ask(self, what: str, timeout_s: float, **arguments: Any) -> Any:
        """Return the answer to a request. Raises GuestLoss."""
        self._signal(signal.SIGCONT)
        loss = self.child.send({"do": what, **arguments})
        answer = self._answer(loss or self.child.next(timeout_s))
        self._signal(signal.SIGSTOP)
        if ended := answer.get("ended"):
            status, reason, traceback = map(str, ended)
            if status not in ENDS:
                raise ValueError(f"expected the status of an end, found {status[:80]}")
            raise GuestLoss(Status(status), reason, traceback)
        return answer.get("result")

    def _signal(self, number: signal.Signals) -> None:
        """Stop or continue the process and what it started: it works only on requests."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, number)

    def waits(self) -> Waits:
        guest = self.child.pid
        judge = _counts(Path(f"/proc/self/task/{get_native_id()}"))[1]
        used, waited = _counts(Path(f"/proc/{guest}/task/{guest}"))
        with suppress(OSError):  # one that lets others go first waits for as long as it likes
            waited *= os.sched_getscheduler(guest) == os.SCHED_OTHER
        total = 0
        with suppress(OSError):
            total = time.clock_gettime_ns(~guest << 3 | CPU_CLOCK)
        return Waits(judge, waited, total - used)

    def _answer(self, answer: dict[str, Any] | ChildLoss) -> dict[str, Any]:
        if isinstance(answer, ChildLoss):
            raise GuestLoss(answer.status, answer.detail, "".join(self.child.last_lines))
        return answer


def exclusive(device: torch.device) -> bool:
    """Return whether a GPU allows one process alone."""
    mode = ctypes.c_int()
    driver().cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, device.index or 0)
    return mode.value == EXCLUSIVE


class GuestQueue:
    """The processes of a contest's guests, one after the other.

    On a GPU, the next one imports while others run; a CPU would be too busy for that.
    """

    def __init__(self, guests: int, device: torch.device) -> None:
        self._ahead = guests if device.type == "cuda" else 0
        self._spares = list[GuestProcess]()
        self._import_one()

    def next(self) -> GuestProcess:
        process = self._spares.pop() if self._spares else GuestProcess()
        self._import_one()
        return process

    def close(self) -> None:
        for process in self._spares:
            process.child.kill()

    def _import_one(self) -> None:
        if self._ahead > 0:
            self._ahead -= 1
            self._spares.append(GuestProcess())

"""Run the code of contenders in stages: convert, prepare, chain, capture, check, energy.

Each stage is announced and timed, and an exception in it ends the contender, not the contest. After
each step that runs a contender's code, `verify` finds what it changed (tampering.py):

    code or settings of the process   put back; the contender is wrong
    the machine code of a clock       the process ends, and the contender has failed: Fatal
    an operand, or a right answer     the contender is wrong, and the contest begins again without
                                      it, from the seed: Spoiled
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparsebench.errors import SparsebenchError
from sparsebench.harness.bench.contest_state import (
    Announce,
    Fatal,
    OnFailure,
    RunningContender,
    end_status,
    one_line,
    synchronize,
    traceback_of,
)
from sparsebench.harness.bench.process_state import rewritten_modules
from sparsebench.harness.bench.tampering import (
    ArrayGuard,
    ClockError,
    Seal,
    SpoiledError,
    TamperingError,
)
from sparsebench.results.record import Status


class Spoiled(SparsebenchError):
    """A contender, which has ended, changed operands of the contest, so the contest has ended."""

    def __init__(self, entry: RunningContender, detail: str) -> None:
        super().__init__(f"{entry.contender.label}: {detail}")
        self.entry = entry


class Stages:
    """The stages of a contest on a device.

    spent_s   seconds by stage
    thorough  verify the files of modules at every step, too
    """

    def __init__(
        self,
        device: torch.device,
        announce: Announce = lambda case, stage: None,
        on_failure: OnFailure = lambda *failure: None,
        *,
        thorough: bool = False,
    ) -> None:
        """Record the code and the settings of the process, before any contender runs."""
        self.device, self.announce, self._on_failure = device, announce, on_failure
        self._thorough, self.spent_s = thorough, dict[str, float]()
        self.seal, self.guard = Seal(), ArrayGuard()
        rewritten_modules()

    def verify(self) -> None:
        """Raise TamperingError if an operand or the harness itself has changed."""
        self.seal.check()
        self.guard.check()
        if self._thorough and (modules := rewritten_modules()):
            raise TamperingError(f"rewrote the files of {', '.join(modules[:3])}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.spent_s[name] = self.spent_s.get(name, 0.0) + elapsed

    @contextmanager
    def at(self, entry: RunningContender, name: str) -> Iterator[None]:
        """Announce the contender, and turn any exception of the block into its row.

        Raises Spoiled, and Fatal if the device no longer answers.
        """
        case = entry.row.case.id
        self.announce(case, name)
        try:
            with self.stage(name):
                yield
                synchronize(self.device)
        except ClockError as error:
            raise Fatal(case, f"{name}: {error}") from error
        except TamperingError as error:
            entry.end(Status.WRONG, f"{name}: {error}")
            if isinstance(error, SpoiledError):
                raise Spoiled(entry, entry.row.detail) from error
        except Exception as error:
            status, reason = end_status(error)
            if status is Status.FAILED:
                try:
                    synchronize(self.device)
                except Exception as dead:
                    raise Fatal(case, f"{name}: {one_line(dead)}") from error
                reason = f"{name}: {one_line(error)}"
            entry.end(status, reason)
            if status is not Status.UNSUPPORTED:
                self._on_failure(case, reason, traceback_of(error))
            if status is Status.OUT_OF_MEMORY and self.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                self.verify()  # what it changed before it failed
            except SpoiledError as spoiled:
                raise Spoiled(entry, str(spoiled)) from error
            except ClockError as changed:
                raise Fatal(case, f"{name}: {changed}") from error
            except TamperingError:
                pass

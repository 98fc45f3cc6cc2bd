"""Run the code of contenders in stages: convert, prepare, chain, capture, check, energy.

Each stage is announced and timed, and an exception in it ends the contender, not the contest. After
each step that runs a contender's code, `verify` finds what it changed:

    settings of the process        put back; the contender is wrong (process_state.py)
    an operand, or a right answer  the contender is wrong, and the contest begins again without it,
                                   from the seed: Spoiled (tampering.py)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparsebench.errors import SparsebenchError
from sparsebench.harness.bench.contest_state import (
    Announce,
    Fatal,
    GuestLoss,
    OnFailure,
    RunningContender,
    end_status,
    one_line,
    synchronize,
    traceback_of,
)
from sparsebench.harness.bench.process_state import ProcessState
from sparsebench.harness.bench.tampering import ArrayGuard, SpoiledError, TamperingError
from sparsebench.results.record import Status


class Spoiled(SparsebenchError):
    """A contender, which has ended, changed operands of the contest, so the contest has ended."""

    def __init__(self, entry: RunningContender, detail: str) -> None:
        super().__init__(f"{entry.contender.label}: {detail}")
        self.entry = entry


class Stages:
    """The stages of a contest on a device: the seconds of each, and which began last."""

    def __init__(
        self,
        device: torch.device,
        announce: Announce = lambda case, stage: None,
        on_failure: OnFailure = lambda *failure: None,
    ) -> None:
        """Record the settings of the process, before any contender runs."""
        self.device, self.announce, self.on_failure = device, announce, on_failure
        self.spent_s, self.latest = dict[str, float](), ""
        self.process, self.guard = ProcessState(), ArrayGuard()

    def verify(self) -> None:
        """Raise TamperingError if an operand or a setting has changed; settings are put back."""
        if changed := self.process.restore():
            raise TamperingError(f"changed {', '.join(changed[:3])}")
        self.guard.check()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a stage."""
        self.latest, start = name, time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.spent_s[name] = self.spent_s.get(name, 0.0) + elapsed

    @contextmanager
    def at(self, entry: RunningContender, name: str) -> Iterator[None]:
        """Announce the contender, and end it if the block raises, as `ending` does."""
        self.announce(entry.row.case.id, name)
        with self.ending(entry, name), self.stage(name):
            yield
            synchronize(self.device)

    @contextmanager
    def ending(self, entry: RunningContender, what: str) -> Iterator[None]:
        """Turn any exception of the block into the contender's row.

        Raises Spoiled, and Fatal if the device no longer answers.
        """
        case = entry.row.case.id
        try:
            yield
        except TamperingError as error:
            entry.end(Status.WRONG, f"{what}: {error}")
            if isinstance(error, SpoiledError):
                raise Spoiled(entry, entry.row.detail) from error
        except Exception as error:
            status, reason = end_status(error)
            if status is Status.FAILED:
                try:
                    synchronize(self.device)
                except Exception as dead:
                    raise Fatal(case, f"{what}: {one_line(dead)}") from error
                if not isinstance(error, GuestLoss):
                    reason = f"{what}: {one_line(error)}"
            entry.end(status, reason)
            if status not in (Status.UNSUPPORTED, Status.WRONG):
                self.on_failure(case, reason, traceback_of(error))
            if status is Status.OUT_OF_MEMORY and self.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                self.verify()  # what it changed before it failed
            except SpoiledError as spoiled:
                raise Spoiled(entry, str(spoiled)) from error
            except TamperingError:
                pass

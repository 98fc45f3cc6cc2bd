"""The part of a shared plan that one process measures: the contests that it reserves.

    reserved/PROBLEM -> 3   a symbolic link: part 3 has this problem. Making a link is atomic, on
                            NFS too, so each problem is reserved once
    alike.json              kind of GPU, code and versions: the first part writes it, others compare

    first process           reserves problems that no part has reserved, in its own random order
    later processes         measure what the first one reserved, so a problem stays on one GPU

A part that starts late finds less to do, and no part waits for another. The noise-floor contests
are shared out like all others: the noise floor is that of the whole run, over all its GPUs.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Event
from typing import Any

from sparsebench.harness.machine.cpu_placement import draw_near
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run.runner import Runner
from sparsebench.results.record import Row
from sparsebench.results.run.provenance import require_equal_facts, shared_facts


@dataclass
class PlanPart:
    """One of the processes that share a plan.

    folder    what the parts share (harness/shared_runs/shared_folder.py)
    number    of this part, from 1 on
    host      the identity of its host (machine/cpu_placement.py)
    earlier   rows of whole contests that this part measured on another GPU
    alone     the plan has no other part, so this one has every problem and reserves none
    stopping  set by another thread to end the part as Ctrl-C ends a run
    owners    the part that has each problem, as far as this part has read it
    """

    folder: Path
    number: int
    host: str
    earlier: Sequence[Row] = ()
    alone: bool = False
    stopping: Event = field(default_factory=Event)
    runner: Runner | None = None
    owners: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owners |= {} if self.alone else owners(self.folder)

    def start(self, runner: Runner) -> None:
        """Let `runner` end when this part is stopped."""
        self.runner = runner
        runner.stopping = self.stopping
        draw_near(runner.pid)

    def require_alike(self, environment: Mapping[str, Any]) -> None:
        """Raise ResultError if the kind of GPU, code or libraries differ from the first part's."""
        here, file = shared_facts(environment), self.folder / "alike.json"
        with NamedTemporaryFile("w", dir=self.folder, encoding="utf-8") as fresh:
            json.dump(here, fresh)
            fresh.flush()
            with suppress(FileExistsError):
                os.link(fresh.name, file)
        require_equal_facts(str(self.folder), json.loads(file.read_text("utf-8")), here)

    def stop(self) -> None:
        """Interrupt the part from another thread; its results are kept."""
        self.stopping.set()
        if self.runner:
            self.runner.kill()

    def take(self, contests: Iterable[Contest], replicate: int) -> Iterator[Contest]:
        """Yield the contests that this part measures in a process; process 0 reserves them."""
        before = {(row.replicate, row.case.problem.id) for row in self.earlier}
        for contest in contests:
            problem = contest.problem.id
            if self.holds(problem, new=replicate == 0) and (replicate, problem) not in before:
                yield contest

    def reserve(self, contests: Iterable[Contest]) -> bool:
        """Reserve a contest unless one is reserved; False if nothing is left to do."""
        return any(self.holds(contest.problem.id) for contest in contests)

    def total(self, contests: Iterable[Contest], replicates: int) -> int:
        """Return how many contests this part has in all its processes, as far as is known."""
        mine = sum(self.holds(contest.problem.id, new=False) for contest in contests)
        before = {(row.replicate, row.case.problem.id) for row in self.earlier}
        return mine * replicates - len(before)

    def holds(self, problem: str, new: bool = True) -> bool:
        """Return whether this part has a problem; reserve it if it is free and may be `new`."""
        if self.alone:
            return True
        reserved = self.folder / "reserved"
        if new and problem not in self.owners:
            try:
                os.symlink(str(self.number), reserved / problem)
                self.owners[problem] = self.number
            except FileExistsError:
                self.owners[problem] = int(os.readlink(reserved / problem))
        return self.owners.get(problem) == self.number


def owners(folder: Path) -> dict[str, int]:
    """Return the part that has reserved each problem."""
    return {link.name: int(os.readlink(link.path)) for link in os.scandir(folder / "reserved")}

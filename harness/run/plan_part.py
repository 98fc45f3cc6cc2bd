"""What of a plan one process measures where several share it: the contests that it claims.

    claims/PROBLEM -> 3     a symbolic link: part 3 has this problem. Making one is atomic, on NFS
                            too, so a problem is claimed once
    alike.json              kind of GPU, code, versions: the first part writes it, others compare

    first process of it     takes whatever no part has claimed, in an order of its own
    later processes         measure what the first one claimed: all of a problem on one GPU

A part that comes late finds less to do, and no part waits for another. The noise-floor contests are
shared out like all others: the floor is of the whole run, over all its GPUs.
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
from sparsebench.results.provenance import require_equal_facts, shared_facts
from sparsebench.results.record import Row


@dataclass
class Part:
    """One of the processes that share a plan.

    folder    what the parts share (harness/shared_runs/shared_folder.py)
    number    of this part, from 1 on
    host      what tells its host from others (machine/cpu_placement.py)
    earlier   rows of this part that were measured on another GPU, whole contests
    stopping  set to end it from another thread, as Ctrl-C ends a run
    """

    folder: Path
    number: int
    host: str
    earlier: Sequence[Row] = ()
    stopping: Event = field(default_factory=Event)
    runner: Runner | None = None
    owners: dict[str, int] = field(default_factory=dict)  # as far as they are known: none changes

    def __post_init__(self) -> None:
        """Read who has what."""
        self.owners |= owners(self.folder)

    def start(self, runner: Runner) -> None:
        """Let `runner` end when this part is stopped."""
        self.runner = runner
        runner.stopping = self.stopping
        draw_near(runner.pid)  # it may have been started early, by another thread

    def require_alike(self, environment: Mapping[str, Any]) -> None:
        """Raise ResultError on a GPU of another kind, with other code or libraries."""
        here, file = shared_facts(environment), self.folder / "alike.json"
        with NamedTemporaryFile("w", dir=self.folder) as fresh:
            json.dump(here, fresh)
            fresh.flush()
            with suppress(FileExistsError):
                os.link(fresh.name, file)
        require_equal_facts(str(self.folder), json.loads(file.read_text()), here)

    def stop(self) -> None:
        """End the part from another thread: its run is interrupted, and kept."""
        self.stopping.set()
        if self.runner:
            self.runner.kill()

    def own(self, contests: Iterable[Contest], replicate: int) -> Iterator[Contest]:
        """Yield what this part measures in a process; the first one claims as it goes."""
        before = {(row.replicate, row.case.problem.id) for row in self.earlier}
        for contest in contests:
            problem = contest.problem.id
            if self.claim(problem, new=replicate == 0) and (replicate, problem) not in before:
                yield contest

    def reserve(self, contests: Iterable[Contest]) -> bool:
        """Claim a contest unless one is claimed; False where there is nothing to do."""
        return any(self.claim(contest.problem.id) for contest in contests)

    def total(self, contests: Iterable[Contest], replicates: int) -> int:
        """Return how many contests this part has in all its processes, as far as is known."""
        mine = sum(self.owners.get(c.problem.id) == self.number for c in contests)
        before = {(row.replicate, row.case.problem.id) for row in self.earlier}
        return mine * replicates - len(before)

    def claim(self, problem: str, new: bool = True) -> bool:
        """Say whether this part has a problem; claim one that nobody has, if it may be `new`."""
        claims = self.folder / "claims"
        if new and problem not in self.owners:
            try:
                os.symlink(str(self.number), claims / problem)
                self.owners[problem] = self.number
            except FileExistsError:
                self.owners[problem] = int(os.readlink(claims / problem))
        return self.owners.get(problem) == self.number


def owners(folder: Path) -> dict[str, int]:
    """Return which part has which problem."""
    return {link.name: int(os.readlink(link.path)) for link in os.scandir(folder / "claims")}

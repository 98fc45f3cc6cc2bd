"""Tune: make the searches that a suite's problems need, and keep what they find.

    problems x contenders that search ─> a worker: convert, search, check, time ─> rows
      ─> the user's cache has the choice of each product (kernels/_common/choices.py)

Layers and `matmul` take the choices of contenders without a kernel. Those of a named kernel are for
`matmul(kernel=NAME)`. A problem whose choices the cache has is not searched again, so tuning that
was stopped, by its time or by Ctrl-C, continues with the rest.
"""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from sparsebench._writing import cache_folder
from sparsebench.errors import SuiteError
from sparsebench.harness.catalog import is_outside, load_kernel
from sparsebench.harness.plan.selection import meets, only
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.run.runner import Runner
from sparsebench.kernels._common.operator import Engine
from sparsebench.results.formatting import amount
from sparsebench.results.record import Contender, Status
from sparsebench.results.tables.families import DEFAULT

TIMEOUT_S = 300.0  # without an answer; a first search compiles some forty programs
FOLDER = "SPARSEBENCH_CHOICES"  # of the cache


@dataclass
class Tuning:
    """The result of tuning.

    folder    of the cache
    searched  products whose choice a search made now
    stored    products whose choice was there
    left      number of problems that were not reached
    failures  a line for each case that could not be tuned
    """

    folder: Path
    searched: int = 0
    stored: int = 0
    left: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Return what the command prints."""
        there = f", {self.stored} were there" if self.stored else ""
        lines = [f"{self.folder}: choices for {amount(self.searched, 'product')} searched{there}"]
        if self.left:
            lines.append(f"time is up: {amount(self.left, 'problem')} left; tune again to continue")
        return lines + self.failures


def tune(
    suite: Suite,
    device: str,
    minutes: float,
    condition: str = "",
    out: Path | None = None,
    data: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, problem: None,
) -> Tuning:
    """Search the problems whose choices the cache lacks, for some minutes. Raises SuiteError.

    out  folder of the cache, by default the user's
    """
    if not device.startswith("cuda"):
        raise SuiteError(f"--device {device}: expected an NVIDIA GPU to tune for")
    contests = searches(suite, condition)
    if out is not None:
        os.environ[FOLDER] = str(out.resolve())
    tuning = Tuning(cache_folder("choices", FOLDER))
    runner, end = Runner(device, data, TIMEOUT_S), monotonic() + 60 * minutes
    try:
        for number, contest in enumerate(contests):
            tuning.left = len(contests) - number
            if monotonic() > end:
                break
            progress(number, len(contests), contest.problem.text)
            for row in (row for result in runner.run([contest]) for row in result.rows):
                reasons = [*_reasons(row.choice)]
                tuning.searched += reasons.count("search")
                tuning.stored += reasons.count("cache")
                if row.status not in (Status.OK, Status.UNSUPPORTED):
                    case = f"{row.case.contender.label}, case {row.case.id}"
                    tuning.failures.append(f"{row.status.value}: {case}: {row.detail}")
            tuning.left -= 1
    finally:
        runner.kill()
    return tuning


def _reasons(choice: Mapping[str, Any]) -> list[Any]:
    """Return why each product of a row was chosen: a layer has several."""
    parts = [choice, *(part for part in choice.values() if isinstance(part, Mapping))]
    return [part["by"] for part in parts if "by" in part]


def searches(suite: Suite, condition: str) -> list[Contest]:
    """Return a contest per problem, with the contenders whose `prepare` searches."""
    contests = []
    for contest in only(suite.contests, condition):
        contenders: tuple[Contender, ...] = tuple(
            replace(contender, baseline=False, options={**contender.options, "cache": True})
            for contender in contest.contenders
            if meets(contest.problem, contender, condition)
            if not is_outside(contender)
            if contender.kernel == DEFAULT or isinstance(load_kernel(contender.kernel), Engine)
        )
        if contenders:
            contests.append(Contest(contest.problem, tuple(dict.fromkeys(contenders))))
    if not contests:
        expected = "a contender without a kernel, or with one of ours (bsr_triton, csr_cuda ...)"
        raise SuiteError(f"suite {suite.name}: expected {expected}, found none")
    shuffled = random.Random(suite.name)  # so that a short tuning reaches problems of every kind
    return shuffled.sample(contests, len(contests))

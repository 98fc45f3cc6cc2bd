"""Tune: search long for each problem of a suite, and write a table for this GPU.

    problems x contenders that tune ─> contests of {tuned: wide} beside {tuned: false}
      ─> a worker: convert, search, check, time the two in turn, check again ─> rows
      ─> an entry: the faster of the two, if the search's answer is right ─> the file, at once

    problems x contenders without a kernel, as users get them ─> the same worker: the first
    call searches all kernels of the format, and keeps its choice (kernels/_common/selection.py)

Problems for which the table has entries of the same code and libraries are not searched again, so
tuning that was stopped, by its time or by Ctrl-C, continues with the rest. Entries of other code
are dropped.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TypeVar

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.catalog import load_kernel
from sparsebench.harness.machine.device import is_simulated
from sparsebench.harness.plan.selection import meets, only
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.run.measure import describe
from sparsebench.harness.run.runner import Runner
from sparsebench.kernels._common import tuned_table
from sparsebench.kernels._common.tuned_table import SCHEMA, Entry, Sizes, Table
from sparsebench.results.formatting import amount
from sparsebench.results.record import Case, Contender, Row, Status
from sparsebench.results.tables.families import DEFAULT

T = TypeVar("T")

TIMEOUT_S = 300.0  # without an answer; a first search compiles some forty programs


@dataclass
class Tuning:
    """The result of tuning.

    new       number of new entries
    choices   number of contenders without a kernel whose choice was searched
    left      number of problems that were not reached
    failures  a line for each case whose search failed or was wrong; it has no entry
    """

    file: Path
    table: Table
    new: int = 0
    choices: int = 0
    left: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        entries = self.table.entries
        count = amount(len(entries), "entry")
        lines = [f"{self.file}: {count} for {self.table.gpu}, {self.new} new"]
        timed = [entry for entry in entries if entry.untuned_us is not None]
        if timed:
            worst = max(timed, key=_gain)
            where = " ".join(f"{k}={v}" for k, v in asdict(worst.sizes).items())
            usual, most = median(map(_gain, timed)), _gain(worst)
            gains = f"median {usual:.2f}, at most {most:.2f} ({worst.kernel} {where})"
            lines.append(f"speedup by tuning: {gains}")
        if self.choices:
            lines.append(
                f"kernels for layers and matmul: chosen for {amount(self.choices, 'product')}"
            )
        if self.left:
            lines.append(f"time is up: {amount(self.left, 'problem')} left; tune again to continue")
        return lines + self.failures


def _gain(entry: Entry) -> float:
    return (entry.untuned_us or entry.time_us) / entry.time_us


def tune(
    suite: Suite,
    device: str,
    minutes: float,
    condition: str = "",
    out: Path | None = None,
    data: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, problem: None,
) -> Tuning:
    """Search the problems that the table lacks, for some minutes. Raises SuiteError.

    The table is `out` or the user's, and is written after every problem.
    """
    if is_simulated(device) or torch.device(device).type != "cuda":
        raise SuiteError(f"--device {device}: expected an NVIDIA GPU to tune for")
    contests = searches(suite, condition)
    runner = Runner(device, data, TIMEOUT_S)
    try:
        gpu, libraries = (runner.about["environment"][name] for name in ("gpu", "versions"))
        versions = {"driver": gpu.get("driver")} | {n: libraries[n] for n in ("torch", "triton")}
        major, minor = map(int, gpu["compute_capability"].split("."))
        name = tuned_table.file_name((major, minor), gpu["multiprocessors"])
        file = out or tuned_table.folders()["user"] / name
        entries = tuned_table.read(file).entries if file.exists() else []
        current = {entry.case: entry for entry in entries if entry.current}
        done = {case for case, entry in current.items() if entry.versions == versions}
        todo = []
        for contest in contests:
            groups = _groups(contest.contenders, lambda contender: contender.kernel)
            pending = [group for group in groups if Case(contest.problem, group[0]).id not in done]
            if pending:
                todo.append(replace(contest, contenders=tuple(chain.from_iterable(pending))))
        tuning = Tuning(file, Table(SCHEMA, gpu["name"], list(current.values())))
        end = monotonic() + 60 * minutes
        for number, contest in enumerate(todo):
            tuning.left = len(todo) - number
            if monotonic() > end:
                break
            progress(number, len(todo), describe(contest.problem))
            for result in runner.run([contest]):
                tuning.choices += sum(row.choice.get("by") == "search" for row in result.rows)
                entries, failed = _entries(result.rows, versions)
                current |= {entry.case: entry for entry in entries}
                tuning.new += len(entries)
                tuning.failures += failed
            tuning.table = Table(SCHEMA, gpu["name"], list(current.values()))
            file.parent.mkdir(parents=True, exist_ok=True)
            tuned_table.write(file, tuning.table)
            tuning.left -= 1
    finally:
        runner.kill()
    return tuning


def searches(suite: Suite, condition: str) -> list[Contest]:
    """Return a contest per problem: each contender that tunes, searched and with its default.

    A contender without a kernel occurs once, because its first call searches.
    """
    contests = []
    for contest in only(suite.contests, condition):
        pairs: dict[str, tuple[Contender, ...]] = {}
        for contender in contest.contenders:
            if not meets(contest.problem, contender, condition):
                continue
            if contender.kernel == DEFAULT:
                # With the user's cache, so that earlier choices stay.
                user_call = replace(contender, options={"cache": True})
                pairs[Case(contest.problem, contender).id] = (user_call,)
            elif load_kernel(contender.kernel).tunes:
                tuned = ({**contender.options, "tuned": how} for how in ("wide", False))
                wide, default = (replace(contender, baseline=False, options=o) for o in tuned)
                pairs[Case(contest.problem, wide).id] = wide, default
        if pairs:
            contests.append(Contest(contest.problem, tuple(chain.from_iterable(pairs.values()))))
    if not contests:
        expected = "a contender whose kernel tunes (bsr_triton, bsr_wgmma, csr_cuda ...)"
        raise SuiteError(f"suite {suite.name}: expected {expected}, found none")
    shuffled = random.Random(suite.name)  # so that a short tuning reaches problems of every kind
    return shuffled.sample(contests, len(contests))


def _groups(items: Sequence[T], kernel_of: Callable[[T], str]) -> Iterator[tuple[T, ...]]:
    """Yield contenders without a kernel alone, and each other one beside its default."""
    rest = iter(items)
    for item in rest:
        yield (item,) if kernel_of(item) == DEFAULT else (item, next(rest))


def _entries(rows: list[Row], versions: Mapping[str, str | None]) -> tuple[list[Entry], list[str]]:
    entries, failed = [], []
    for wide, *defaults in _groups(rows, lambda row: row.case.contender.kernel):
        if wide.status is Status.OK:
            entries += [_entry(wide, default, versions) for default in defaults]
        elif wide.status is not Status.UNSUPPORTED:
            contender, case = wide.case.contender.label, wide.case.id
            failed.append(f"{wide.status.value}: {contender}, case {case}: {wide.detail}")
    return entries, failed


def _entry(wide: Row, default: Row, versions: Mapping[str, str | None]) -> Entry:
    times_us = {id(r): round(median(r.samples_us), 3) for r in (wide, default) if r.samples_us}
    untuned_us = times_us.get(id(default))
    best = default if untuned_us is not None and untuned_us < times_us[id(wide)] else wide
    sizes = dict(wide.choice["sizes"])
    sizes["block"] = sizes["block"] and tuple(sizes["block"])
    kernel = wide.case.contender.kernel
    return Entry(
        kernel=kernel,
        sizes=Sizes(**sizes),
        choice={k: v for k, v in best.choice.items() if k not in ("by", "sizes")},
        time_us=times_us[id(best)],
        untuned_us=untuned_us,
        source=tuned_table.source(kernel),
        case=wide.case.id,
        versions=dict(versions),
    )

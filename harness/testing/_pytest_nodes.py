"""A suite as pytest sees it: a file of contests, each a collector of cases.

    suite.yaml
    └ linear-m:16-n:64-...-sparsity:0.9    a contest, measured when the first of its cases is due
      ├ dense/torch_dense                  a case, which hands its samples to pytest-benchmark
      └ bsr/scipy_bsr

A contest is measured as in a run (contest.py): checked, timed side by side, checked again, but held
to no ceiling; cases that were deselected take no part. pytest-benchmark's timer is then moved by
the samples, one a round, in the order taken:

    timer()    call: += sample    timer()

So its times are device time (on a CPU the host clock's). timing.py decides the number of rounds;
no --benchmark option does. A wrong output has no time. All is one process: a look, not a verdict,
and a kernel that crashes or hangs takes pytest with it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.contest_state import ContestOptions, Fatal
from sparsebench.harness.bench.sampling import Measure, possible
from sparsebench.harness.machine.device import pick
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Contest, read
from sparsebench.results.record import Case, Problem, Row, Status, Value

WORK = ["sparsity", "nnz", "digest", "flops", "dense_flops", "fewest_bytes"]
BYTES = ["stored_bytes", "dense_bytes", "held_bytes", "peak_bytes"]
CHECKS = ["error", "error_of_bound", "usual_error", "bias", "usual_bias", "choice", "code"]
CLOCK = ["device", "scope", "cache", "clock", "convert_us", "prepare_s"]


class SuiteFile(pytest.File):
    """A suite. What is wrong with it is one line."""

    def collect(self) -> "Iterator[ContestNode]":
        """Read the suite for the device asked for."""
        option = self.config.getoption
        if option("benchmark_only", None) is None:
            raise self.CollectError(f"{self.path}: expected pytest-benchmark to run it, found none")
        try:
            device = pick(option("sparsebench_device"))
            suite = read(str(self.path), option("sparsebench_data"))
            contests = only(suite.contests, option("sparsebench_only"))
        except SuiteError as error:
            raise self.CollectError(str(error)) from error
        measures = possible(suite.measures, device.type)
        for each in contests:
            name = _problem_name(each.problem)
            yield ContestNode.from_parent(
                self, name=name, contest=each, device=device, measures=measures
            )


class ContestNode(pytest.Collector):
    """A problem and its cases. pytest sets it up before the first of them that was selected."""

    def __init__(
        self, *, contest: Contest, device: torch.device, measures: tuple[Measure, ...], **node: Any
    ) -> None:
        """Take what is to be measured, and where."""
        super().__init__(**node)
        self.contest, self.device, self.measures = contest, device, measures
        self.rows: dict[tuple[str, str, str], Row] = {}

    def collect(self) -> "Iterator[CaseItem]":
        """Yield each contender; a scope or a cache beyond the suite's first is in the name."""
        for contender in self.contest.contenders:
            case = Case(self.contest.problem, contender)
            for measure in self.measures:
                other = measure if measure != self.measures[0] else ()
                yield CaseItem.from_parent(
                    self,
                    name="-".join([_contender_name(case), *other]),
                    group="-".join([self.name, *other]),
                    case=case,
                    measure=measure,
                )

    def setup(self) -> None:
        """Measure the cases that were selected, side by side."""
        items = [i for i in self.session.items if isinstance(i, CaseItem) and i.parent is self]
        problem, cases = self.contest.problem, {item.case.id for item in items}
        contenders = [c for c in self.contest.contenders if Case(problem, c).id in cases]
        measures = tuple(m for m in self.measures if m in {item.measure for item in items})
        data = self.config.getoption("sparsebench_data")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            options = ContestOptions(measures=measures)
            rows, _ = contest.run(problem, contenders, self.device, data, options)
        except Fatal as end:
            blamed = next((i.name for i in items if i.case.id == end.case), "one of the contest")
            self.session.shouldstop = "after a CUDA error nothing more can be trusted"
            pytest.fail(f"{blamed}: {end.detail}", pytrace=False)
        except SuiteError as error:
            pytest.fail(str(error), pytrace=False)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.rows = {(row.case.id, row.scope, row.cache): row for row in rows}


class CaseItem(pytest.Function):
    """A case in one scope and cache state: a benchmark."""

    def __init__(self, *, case: Case, measure: Measure, group: str, **node: Any) -> None:
        """Take what is to be measured; `group` is what pytest-benchmark compares it within."""
        super().__init__(callobj=self.play, **node)
        self.case, self.measure, self.seconds = case, measure, 0.0
        self.add_marker(pytest.mark.benchmark(group=group, timer=self.device_time))

    def device_time(self) -> float:
        """Return the seconds of all samples so far: the timer."""
        return self.seconds

    def play(self, benchmark: Any) -> None:
        """Hand the samples to pytest-benchmark, a round each, or say why there are none."""
        assert isinstance(self.parent, ContestNode)
        row = self.parent.rows[self.case.id, *self.measure]
        if row.status is Status.UNSUPPORTED:
            pytest.skip(row.detail)
        samples_us = iter(row.samples_us)

        def sample() -> None:
            if row.status is not Status.OK:
                benchmark.has_error = True  # in no table and no JSON
                pytest.fail(f"{row.status}: {row.detail}", pytrace=False)
            self.seconds += 1e-6 * next(samples_us, 0.0)  # a profiler calls once more

        contender = self.case.contender
        named = {"format": contender.format, "kernel": contender.kernel}
        benchmark.param, benchmark.params = self.parent.name, {**self.case.problem.fields, **named}
        benchmark.extra_info.update(_facts(row, self.parent.device))
        benchmark.pedantic(sample, rounds=len(row.samples_us) or 1)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Point to the suite."""
        return self.path, None, f"{self.parent.name if self.parent else ''} {self.name}"


def _facts(row: Row, device: torch.device) -> dict[str, Any]:
    """Return what a reader of the benchmark's JSON needs beside the times."""
    problem, contender = row.case.problem, row.case.contender
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    asked = {"case": row.case.id, "op": problem.op, "problem": dict(problem.fields), "gpu": gpu}
    named = {"contender": contender.label, "baseline": contender.baseline}
    measured = {name: getattr(row, name) for name in [*WORK, *BYTES, *CHECKS, *CLOCK]}
    return asked | named | measured


def _problem_name(problem: Problem) -> str:
    """Name a problem: `linear-m:16-n:4096-...-sparsity:0.9`."""
    beyond: dict[str, Value] = {"seed": problem.seed} if problem.seed else {}
    if problem.source:
        beyond["source"] = problem.source.label
    return _named(problem.op, {**problem.fields, **beyond})


def _contender_name(case: Case) -> str:
    """Name a contender, with its options and what its parameters do not take from the problem."""
    fields, contender = case.problem.fields, case.contender
    own = {name: v for name, v in contender.params.items() if fields.get(name) != v}
    return _named(f"{contender.format}/{contender.kernel}", {**own, **contender.options})


def _named(what: str, values: Mapping[str, Value]) -> str:
    """Add values to a name; `-k` takes no `=`, and a node id after its file no `[`."""
    plain = {n: "x".join(map(str, v)) if isinstance(v, list) else str(v) for n, v in values.items()}
    return "-".join([what, *(f"{name}:{value}" for name, value in plain.items())])

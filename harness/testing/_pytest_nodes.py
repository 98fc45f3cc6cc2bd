"""A suite as pytest sees it: a file of contests, each a collector of cases.

    suite.yaml
    └ linear-m:16-n:64-...-sparsity:0.9    a contest, measured before its first case
      ├ dense/torch_dense                  a case, which passes its samples to pytest-benchmark
      └ bsr/scipy_bsr

A contest is measured as in a run (contest.py): checked, timed together, checked again, but without
ceilings; deselected cases take no part. The samples then advance pytest-benchmark's timer, one per
round, in the order taken:

    timer()    call: += sample    timer()

So its times are device times (on a CPU, the host clock's). sampling.py decides the number of
rounds; no --benchmark option does. A wrong output has no time. Everything runs in one process, so
the result is a look, not a verdict, and a kernel that crashes or hangs takes pytest with it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.contest_state import ContestOptions, Fatal
from sparsebench.harness.bench.sampling import Measure, distinct_measures
from sparsebench.harness.machine.device import pick
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Contest, read
from sparsebench.results.record import Case, Row, Status, Value

FACTS = (
    *("device", "scope", "cache", "clock", "sparsity", "nnz", "digest"),
    *("flops", "dense_flops", "fewest_bytes"),
    *("stored_bytes", "dense_bytes", "held_bytes", "peak_bytes", "convert_us", "prepare_s"),
    *("error", "error_of_bound", "usual_error", "bias", "usual_bias", "choice", "code"),
)
"""Fields of a row that a benchmark has in extra_info."""


class SuiteFile(pytest.File):
    """A suite file; an error in it is reported in one line."""

    def collect(self) -> "Iterator[ContestNode]":
        option = self.config.getoption
        if option("benchmark_only", None) is None:
            raise self.CollectError(f"{self.path}: expected pytest-benchmark to run it, found none")
        try:
            device = pick(option("sparsebench_device"))
            suite = read(str(self.path), option("sparsebench_data"))
            contests = only(suite.contests, option("sparsebench_only"))
        except SuiteError as error:
            raise self.CollectError(str(error)) from error
        measures = distinct_measures(suite.measures, device.type)
        for each in contests:
            problem = each.problem  # named linear-m:16-n:4096-...-sparsity:0.9
            beyond: dict[str, Value] = {"seed": problem.seed} if problem.seed else {}
            if problem.source:
                beyond["source"] = problem.source.label
            stated = {n: value for n, value in problem.fields.items() if value is not None}
            name = _node_name(problem.op, {**stated, **beyond})
            yield ContestNode.from_parent(
                self, name=name, contest=each, device=device, measures=measures
            )


class ContestNode(pytest.Collector):
    """A problem with its cases. pytest sets it up before the first selected one."""

    def __init__(
        self, *, contest: Contest, device: torch.device, measures: tuple[Measure, ...], **node: Any
    ) -> None:
        super().__init__(**node)
        self.contest, self.device, self.measures = contest, device, measures
        self.rows: dict[tuple[str, str, str], Row] = {}

    def collect(self) -> "Iterator[CaseItem]":
        """Yield each contender; a scope or cache state other than the first is in its name."""
        for contender in self.contest.contenders:
            case = Case(self.contest.problem, contender)
            fields = case.problem.fields
            params = {name: v for name, v in contender.params.items() if fields.get(name) != v}
            label = f"{contender.format}/{contender.kernel}"
            for measure in self.measures:
                other = measure if measure != self.measures[0] else ()
                yield CaseItem.from_parent(
                    self,
                    name="-".join([_node_name(label, {**params, **contender.options}), *other]),
                    group="-".join([self.name, *other]),
                    case=case,
                    measure=measure,
                )

    def setup(self) -> None:
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
            self.session.shouldstop = "no result can be trusted after a CUDA error"
            pytest.fail(f"{blamed}: {end.detail}", pytrace=False)
        except SuiteError as error:
            pytest.fail(str(error), pytrace=False)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.rows = {(row.case.id, row.scope, row.cache): row for row in rows}


class CaseItem(pytest.Function):
    """A case in one scope and cache state: a benchmark."""

    def __init__(self, *, case: Case, measure: Measure, group: str, **node: Any) -> None:
        """Store what to measure; pytest-benchmark compares cases of one `group`."""
        super().__init__(callobj=self.play, **node)
        self.case, self.measure, self.seconds = case, measure, 0.0
        self.add_marker(pytest.mark.benchmark(group=group, timer=self.device_time))

    def device_time(self) -> float:
        return self.seconds

    def play(self, benchmark: Any) -> None:
        """Pass the samples to pytest-benchmark, one per round, or fail with the reason."""
        assert isinstance(self.parent, ContestNode)
        row = self.parent.rows[self.case.id, *self.measure]
        if row.status is Status.UNSUPPORTED:
            pytest.skip(row.detail)
        samples_us = iter(row.samples_us)

        def sample() -> None:
            if row.status is not Status.OK:
                benchmark.has_error = True  # keeps it out of tables and JSON
                pytest.fail(f"{row.status}: {row.detail}", pytrace=False)
            self.seconds += 1e-6 * next(samples_us, 0.0)  # a profiler makes one more call

        problem, contender, device = self.case.problem, self.case.contender, self.parent.device
        named = {"format": contender.format, "kernel": contender.kernel}
        benchmark.param, benchmark.params = self.parent.name, {**problem.fields, **named}
        benchmark.extra_info.update(
            case=self.case.id,
            op=problem.op,
            problem=dict(problem.fields),
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            contender=contender.label,
            baseline=contender.baseline,
            **{name: getattr(row, name) for name in FACTS},
        )
        benchmark.pedantic(sample, rounds=len(row.samples_us) or 1)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.parent.name if self.parent else ''} {self.name}"


def _node_name(what: str, values: Mapping[str, Value]) -> str:
    """Append values to a name without `=`, which -k rejects, and `[`, which node ids reject."""
    plain = {n: "x".join(map(str, v)) if isinstance(v, list) else str(v) for n, v in values.items()}
    return "-".join([what, *(f"{name}:{value}" for name, value in plain.items())])

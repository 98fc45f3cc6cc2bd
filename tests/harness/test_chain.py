"""Layers that follow each other: what is timed, and what is looked at.

A CPU tells no scopes apart, so a run asks it for none. Here a contest is started past that.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsebench.errors import ResultError
from sparsebench.harness.bench import contest, output_checks
from sparsebench.harness.bench.contest_state import ContestOptions, Entry, RunningContest
from sparsebench.harness.bench.sampling import LAYERS, possible
from sparsebench.harness.bench.spot_checks import print_of, reverse, sums_of
from sparsebench.harness.bench.timing import Chain, Samples, TimedCall
from sparsebench.harness.plan.suite import read as read_suite
from sparsebench.harness.run.measure import Flags, measure
from sparsebench.harness.run.validation import _require_plausible
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results import store
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Case, Contender, Problem, Row, Status

CPU = torch.device("cpu")
FIELDS = {"m": 32, "n": 64, "k": 512, "pattern": "blocks", "block": 16, "sparsity": 0.5}
PROBLEM = Problem("linear", {**FIELDS, "dtype": "fp32"})
CHAIN = "chain", "cold"
OPTIONS = ContestOptions(measures=(CHAIN, ("kernel", "cold")))
DENSE = Contender("dense", "torch_dense", baseline=True)

Made = list[Operands]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Compete with a right kernel of which this is all that it was given."""
    given: Made = []
    compete(monkeypatch, lambda operands: given.append(operands) or right(operands))
    return given


def compete(monkeypatch: pytest.MonkeyPatch, prepare: object) -> None:
    kernel = Kernel(op="any", consumes="dense", device="any", prepare=prepare)  # type: ignore[arg-type]
    monkeypatch.setattr("sparsebench.harness.bench.prepare.load_kernel", lambda name: kernel)


def right(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    return Launch(lambda: x @ w.T, choice={"tile": len(operands.pinned or {})})


def started(problem: Problem = PROBLEM, options: ContestOptions = OPTIONS) -> RunningContest:
    row = Row(Case(problem, DENSE), Status.OK)
    found = contest.start(problem, [Entry(row)], CPU, None, options, lambda case, stage: None)
    for measure_ in options.measures:
        contest._time(found, *measure_)
    output_checks.check_all(found, "after timing")
    return found


def rows(found: RunningContest) -> dict[str, Row]:
    return {row.scope: row for row in found.entries[0].rows(found.options.measures)}


def test_each_layer_has_operands_and_an_output_of_its_own(made: Made) -> None:
    found = started()
    assert len(found.layers) == len(made) == LAYERS
    tensors = [
        t for given in made for t in (given.weights["w"].to_dense(), *given.activations.values())
    ]
    assert len({t.data_ptr() for t in tensors}) == 2 * LAYERS
    assert not any(torch.equal(made[0].weights["w"].to_dense(), w) for w in tensors[2::2])
    assert not any(torch.equal(made[0].activations["x"], x) for x in tensors[3::2])
    (entry,) = found.entries
    assert entry.chain
    assert len({out.data_ptr() for out in entry.chain.run()}) == LAYERS  # type: ignore[union-attr]


def test_further_layers_take_the_choice_of_the_first(made: Made) -> None:
    started()
    assert [given.pinned for given in made] == [None, *[{"tile": 0}] * (LAYERS - 1)]


def test_a_row_is_of_one_layer(made: Made) -> None:
    found = rows(started())
    assert {row.status for row in found.values()} == {Status.OK}
    assert len(found["chain"].samples_us) >= 5
    assert np.median(found["chain"].samples_us) < 4 * np.median(found["kernel"].samples_us)
    assert found["chain"].fewest_bytes == found["kernel"].fewest_bytes
    assert found["chain"].draws == found["kernel"].draws
    assert Samples((8.0, 16.003), 1).per_layer(8) == Samples((1.0, 2.0), 1)


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
def test_a_wrong_layer_is_found(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(operands: Operands) -> Launch:
        made.append(right(operands))
        zeros = torch.zeros_like(made[-1].run())  # type: ignore[arg-type]
        return Launch(lambda: zeros) if len(made) - 1 == layer else made[-1]

    made: list[Launch] = []
    compete(monkeypatch, prepare)
    for row in rows(started()).values():
        assert row.status is Status.WRONG
        assert (f"of layer {layer}: " in row.detail) == (layer > 0)
        assert not row.samples_us


def test_a_layer_that_returns_an_old_output_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes while it is prepared and checked, and then no more: the burst finds it."""

    def prepare(operands: Operands) -> Launch:
        calls: list[torch.Tensor] = []
        own = right(operands)
        number = next(numbers)

        def run() -> torch.Tensor:
            if number != 3 or len(calls) < 3:
                calls.append(own.run())  # type: ignore[arg-type]
            return calls[-1]

        return Launch(run)

    numbers = iter(range(LAYERS))
    compete(monkeypatch, prepare)
    found = rows(started())["chain"]
    assert found.status is Status.WRONG
    assert "inspected calls are wrong" in found.detail


def test_a_refusal_in_a_further_layer_costs_the_chain_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(operands: Operands) -> Launch:
        if operands.pinned:
            raise MemoryError("full")
        return right(operands)

    compete(monkeypatch, prepare)
    found = rows(started())
    assert (found["chain"].status, found["kernel"].status) == (Status.OUT_OF_MEMORY, Status.OK)
    assert found["chain"].detail == "chain: MemoryError: full"
    assert not found["chain"].samples_us


def test_a_chain_that_cannot_be_captured_is_neither_called_nor_timed(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock(launch: Launch | Chain, device: torch.device) -> TimedCall:
        if isinstance(launch, Chain):
            return TimedCall(launch.run, "events", "no CUDA graph: operation not permitted")
        return TimedCall(launch.run, "host")

    monkeypatch.setattr(contest, "ready", clock)
    found = started()
    (entry,) = found.entries
    assert entry.call_in("chain") is None
    chain, kernel = (rows(found)[scope] for scope in ("chain", "kernel"))
    assert (chain.status, kernel.status) == (Status.UNSUPPORTED, Status.OK)
    assert chain.detail == "chain: no CUDA graph: operation not permitted"
    assert not chain.samples_us


def test_an_op_with_a_packed_output_has_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(operands: Operands) -> Launch:
        dy, x = operands.activations["dy"], operands.activations["x"]
        return Launch(lambda: dy.T @ x)

    compete(monkeypatch, prepare)
    found = rows(started(Problem("linear_wgrad", PROBLEM.fields)))
    assert found["kernel"].status is Status.OK
    assert found["chain"].status is Status.UNSUPPORTED
    assert found["chain"].detail == "chain: expected an op with a dense output, found linear_wgrad"


def test_a_layer_that_is_faster_than_its_own_bytes_is_no_record(made: Made) -> None:
    """Eight layers share the L2 cache: of one, an eighth of it may be there."""
    asked = Ceilings(1e-3, 1e-3, {"fp32": 1e6}, 1.0, l2_bytes=0)
    bytes_ = 1_000_000
    assert asked.bound("fp32", 0, bytes_, 0, "hot", LAYERS) == asked.bound(
        "fp32", 0, bytes_, 0, "cold"
    )
    cached = Ceilings(1e3, 1e3, {}, 1.0, l2_bytes=bytes_)
    assert cached.bound("fp32", 0, bytes_, bytes_, "cold", 1) == (0.0, "memory")
    assert cached.bound("fp32", 0, bytes_, bytes_, "cold", LAYERS) == (0.875, "memory")
    options = ContestOptions(measures=OPTIONS.measures, ceilings=asked, reference=True)
    row = Row(Case(PROBLEM, DENSE), Status.OK, reference=True)
    found = contest.start(PROBLEM, [Entry(row)], CPU, None, options, lambda case, stage: None)
    contest._time(found, *CHAIN)
    assert rows(found)["chain"].raises is not None


def test_samples_of_a_chain_take_as_long_as_its_layers() -> None:
    row = Row(Case(PROBLEM, DENSE), Status.OK, clock="graph", samples_us=(100.0,) * 48)
    chain = replace(row, scope="chain")
    assert _require_plausible(SimpleNamespace(rows=[chain], reference=[], path=Path())) == 1  # type: ignore[arg-type]
    with pytest.raises(ResultError, match="expected samples that take about 40 ms, found 48"):
        _require_plausible(SimpleNamespace(rows=[row], reference=[], path=Path()))  # type: ignore[arg-type]


def test_a_print_of_several_outputs_sees_the_furthest() -> None:
    draw = torch.Generator().manual_seed(0)
    outs = tuple(torch.randn(32, 64, generator=draw) for _ in range(3))
    known = print_of([out.double() for out in outs], outs)
    assert known
    assert float(known.distance(outs)) <= known.limit
    assert sums_of(outs[0]).shape == (1, 96)  # type: ignore[union-attr]
    reverse(outs[1:2])
    assert float(known.distance(outs)) > 100 * known.limit
    assert known.distance(outs[:2]) == float("inf")


def test_a_cpu_has_no_chain() -> None:
    assert possible([CHAIN], "cpu") == (("kernel", "hot"),)


def test_a_simulated_layer_among_others_pays_no_launch(tmp_path: Path) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(
        """
schema: sparsebench/suite@1
title: Chain
problems:
  - {op: linear, m: 16, n: 512, k: 512, dtype: bf16, pattern: blocks, block: 16, sparsity: 0.5}
contenders: [{format: bsr, kernel: bsr_triton, params: {block: $block}}]
baselines: [{format: dense, kernel: cublas}]
scopes: [kernel, chain]
"""
    )
    found = store.rows(
        measure(read_suite(str(path)), Flags("sim", replicates=1), tmp_path / "run", None)
    )
    for row in found:
        assert row.status is Status.OK
    taken = {(row.case.id, row.scope, row.cache): np.median(row.samples_us) for row in found}
    for (case, scope, cache), us in taken.items():
        if scope == "chain":
            assert us < 1.1 * taken[case, "kernel", cache]


@pytest.mark.gpu
def test_a_chain_on_the_gpu_is_one_graph() -> None:
    problem = Problem("linear", {**FIELDS, "dtype": "bf16"})
    cublas, stale = Contender("dense", "cublas", baseline=True), Contender("dense", "wrong:stale")
    found, _ = contest.run(problem, [cublas, stale], torch.device("cuda:0"), None, OPTIONS)
    chain, kernel, *wrong = found
    assert (chain.scope, chain.clock) == ("chain", "graph")
    assert np.median(chain.samples_us) < np.median(kernel.samples_us)
    assert {row.status for row in wrong} == {Status.WRONG}

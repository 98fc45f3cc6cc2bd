"""Chains of layers: the calls that are timed, and the outputs that are checked.

A run has one scope on a CPU. These tests start a contest directly, so that it has a chain too.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsebench.harness.bench import contest
from sparsebench.harness.bench.contest import RunningContest
from sparsebench.harness.bench.contest_state import ContestOptions, with_samples
from sparsebench.harness.bench.prepare import entries_of
from sparsebench.harness.bench.sampling import LAYERS, distinct_measures
from sparsebench.harness.bench.spot_checks import reverse, right_outputs
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.bench.timing import Chain, Samples, TimedCall
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Contender, Problem, Row, Status
from tests.tools.devices import CPU

FIELDS = {"m": 32, "n": 64, "k": 512, "pattern": "blocks", "block": 16, "sparsity": 0.5}
PROBLEM = Problem("linear", {**FIELDS, "dtype": "fp32"})
CHAIN = "chain", "cold"
OPTIONS = ContestOptions(measures=(CHAIN, ("kernel", "cold")))
DENSE = Contender("dense", "torch_dense", baseline=True)

Prepared = list[Operands]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Let a correct kernel compete, and return the operands of each of its calls of prepare."""
    inputs: Prepared = []
    compete(monkeypatch, lambda operands: inputs.append(operands) or right(operands))
    return inputs


def compete(monkeypatch: pytest.MonkeyPatch, prepare: object) -> None:
    kernel = Kernel(op="any", consumes="dense", device="any", prepare=prepare)  # type: ignore[arg-type]
    monkeypatch.setattr("sparsebench.harness.bench.prepare.load_kernel", lambda name: kernel)
    monkeypatch.setattr(contest, "check_exact", lambda *_: None)  # it prepares once more


def right(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    return Launch(lambda: x @ w.T, choice={"tile": len(operands.pinned or {})})


def started(problem: Problem = PROBLEM, options: ContestOptions = OPTIONS) -> RunningContest:
    entries = entries_of(problem, [DENSE], CPU, options)
    result = RunningContest(entries, Stages(CPU), None, options)
    result.prepare()
    result.start()
    result.measure()
    return result


def rows(result: RunningContest) -> dict[str, Row]:
    return {row.scope: row for row in result.entries[0].rows(result.options.measures)}


def test_each_layer_has_operands_and_an_output_of_its_own(prepared: Prepared) -> None:
    result = started()
    assert len(result.layers.each) == len(prepared) == LAYERS
    assert [inputs.pinned for inputs in prepared] == [None, *[{"tile": 0}] * (LAYERS - 1)]
    tensors = [
        t
        for inputs in prepared
        for t in (inputs.weights["w"].to_dense(), *inputs.activations.values())
    ]
    assert len({t.data_ptr() for t in tensors}) == 2 * LAYERS
    assert not any(torch.equal(prepared[0].weights["w"].to_dense(), w) for w in tensors[2::2])
    assert not any(torch.equal(prepared[0].activations["x"], x) for x in tensors[3::2])
    (entry,) = result.entries
    assert len({out.data_ptr() for out in entry.calls["chain"].call()}) == LAYERS  # type: ignore[union-attr]


def test_a_row_is_of_one_layer(prepared: Prepared) -> None:
    result = rows(started())
    assert {row.status for row in result.values()} == {Status.OK}
    assert len(result["chain"].samples_us) >= 5
    assert np.median(result["chain"].samples_us) < 4 * np.median(result["kernel"].samples_us)
    assert result["chain"].fewest_bytes == result["kernel"].fewest_bytes
    assert result["chain"].draws == result["kernel"].draws
    assert Samples((8.0, 16.003), 1, None).per_layer(8) == Samples((1.0, 2.0), 1, None)
    assert distinct_measures([CHAIN], "cpu") == (("kernel", "hot"),)  # a run on a CPU has no chain


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
def test_a_wrong_layer_is_found(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(operands: Operands) -> Launch:
        prepared.append(right(operands))
        zeros = torch.zeros_like(prepared[-1].run())  # type: ignore[arg-type]
        return Launch(lambda: zeros) if len(prepared) - 1 == layer else prepared[-1]

    prepared: list[Launch] = []
    compete(monkeypatch, prepare)
    for row in rows(started()).values():
        assert row.status is Status.WRONG
        assert (f"of layer {layer}: " in row.detail) == (layer > 0)
        assert not row.samples_us


def test_a_layer_that_returns_an_old_output_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes only while it is prepared and checked; the burst detects that."""

    def prepare(operands: Operands) -> Launch:
        calls: list[torch.Tensor] = []
        answer = right(operands)
        number = next(numbers)

        def run() -> torch.Tensor:
            if number != 3 or len(calls) < 3:
                calls.append(answer.run())  # type: ignore[arg-type]
            return calls[-1]

        return Launch(run)

    numbers = iter(range(LAYERS))
    compete(monkeypatch, prepare)
    result = rows(started())["chain"]
    assert result.status is Status.WRONG
    assert "inspected calls are wrong" in result.detail


def test_a_refusal_in_a_further_layer_costs_the_chain_alone(monkeypatch) -> None:
    def prepare(operands: Operands) -> Launch:
        if operands.pinned:
            raise MemoryError("full")
        return right(operands)

    compete(monkeypatch, prepare)
    result = rows(started())
    assert (result["chain"].status, result["kernel"].status) == (Status.OUT_OF_MEMORY, Status.OK)
    assert result["chain"].detail == "chain: MemoryError: full"
    assert not result["chain"].samples_us


def test_a_chain_that_cannot_be_captured_is_neither_called_nor_timed(prepared, monkeypatch) -> None:
    def clock(launch: Launch | Chain, device: torch.device) -> TimedCall:
        if isinstance(launch, Chain):
            return TimedCall(launch.run, "events", "no CUDA graph: operation not permitted")
        return TimedCall(launch.run, "host")

    monkeypatch.setattr(contest, "ready", clock)
    result = started()
    (entry,) = result.entries
    assert entry.timed_in("chain") is None
    chain, kernel = (rows(result)[scope] for scope in ("chain", "kernel"))
    assert (chain.status, kernel.status) == (Status.UNSUPPORTED, Status.OK)
    assert chain.detail == "chain: no CUDA graph: operation not permitted"
    assert not chain.samples_us


def test_an_op_with_a_packed_output_has_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(operands: Operands) -> Launch:
        dy, x = operands.activations["dy"], operands.activations["x"]
        return Launch(lambda: dy.T @ x)

    compete(monkeypatch, prepare)
    result = rows(started(Problem("linear_wgrad", PROBLEM.fields)))
    assert result["kernel"].status is Status.OK
    assert result["chain"].status is Status.UNSUPPORTED
    assert result["chain"].detail == "chain: expected an op with a dense output, found linear_wgrad"


def test_a_reference_layer_raises_the_ceilings(prepared: Prepared) -> None:
    """Eight layers share the L2 cache, so it holds an eighth of its size for each layer."""
    ceilings = Ceilings(1e-3, 1e-3, {"fp32": 1e6}, 1.0, l2_bytes=0)
    bytes_ = 1_000_000
    assert ceilings.bound("fp32", 0, bytes_, 0, "hot", LAYERS) == ceilings.bound(
        "fp32", 0, bytes_, 0, "cold"
    )
    cached = Ceilings(1e3, 1e3, {}, 1.0, l2_bytes=bytes_)
    assert cached.bound("fp32", 0, bytes_, bytes_, "cold", 1) == (0.0, "memory")
    assert cached.bound("fp32", 0, bytes_, bytes_, "cold", LAYERS) == (0.875, "memory")
    options = ContestOptions(ceilings=ceilings)
    row = replace(rows(started())["chain"], clock="graph", reference=True)
    raised = with_samples(row, Samples((8.0,), 1, 0.0), options, 0)
    assert raised.samples_us == (1.0,)  # of one layer
    assert raised.raises == raised.bound_us


def test_the_furthest_of_several_outputs_counts() -> None:
    draw = torch.Generator().manual_seed(0)
    outs = tuple(torch.randn(32, 64, generator=draw) for _ in range(3))
    right = right_outputs(outs, 1e-7)
    assert right
    assert float(right.distance(outs)) <= right.limit
    reverse(outs[1:2])
    assert float(right.distance(outs)) > 100 * right.limit
    assert right.distance(outs[:2]) == float("inf")


@pytest.mark.gpu
def test_a_chain_on_the_gpu_is_one_graph() -> None:
    problem = Problem("linear", {**FIELDS, "dtype": "bf16"})
    cublas, stale = Contender("dense", "cublas", baseline=True), Contender("dense", "wrong:stale")
    result, _ = contest.run(problem, [cublas, stale], torch.device("cuda:0"), None, OPTIONS)
    chain, kernel, *wrong = result
    assert (chain.scope, chain.clock) == ("chain", "graph")
    assert np.median(chain.samples_us) < np.median(kernel.samples_us)
    assert {row.status for row in wrong} == {Status.WRONG}

"""A contest: who is rejected, what a row says, turns in time, and the memory that calls need."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import declare
import pytest
import torch
import wrong

from sparsebench.harness.bench import contest
from sparsebench.harness.bench import prepare as preparing
from sparsebench.harness.bench.contest_state import ContestOptions, RunningContender
from sparsebench.harness.bench.operands import Layers
from sparsebench.harness.bench.prepare import added_memory, entries_of
from sparsebench.harness.bench.sampling import MIN_SAMPLES, ROUNDS, SAMPLES_PER_ROUND
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.bench.timing import TimedCall, ready, time_together
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Contender, Problem, Row, Status
from tests.tools.devices import CPU

FIELDS = {"m": 32, "n": 64, "k": 512, "pattern": "blocks", "block": 16, "sparsity": 0.5}
PROBLEM = Problem("linear", {**FIELDS, "dtype": "fp32"})
BASELINE = Contender("dense", "torch_dense", baseline=True)


def rows(*contenders: Contender, problem: Problem = PROBLEM) -> list[Row]:
    return contest.run(problem, list(contenders), CPU, None)[0]


@pytest.mark.parametrize("name", declare.names(wrong))
def test_every_wrong_kernel_is_rejected_and_has_no_time(name: str) -> None:
    right, result = rows(BASELINE, Contender("dense", name))
    assert right.status is Status.OK
    assert right.samples_us
    assert result.status is Status.WRONG
    assert result.detail
    assert not result.samples_us


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["zeros", "transposed", "stale", "precomputed"])
def test_wrong_kernels_are_rejected_in_16_bits_too(name: str, dtype: str) -> None:
    problem = Problem("linear", {**FIELDS, "dtype": dtype})
    assert rows(Contender("dense", f"wrong:{name}"), problem=problem)[0].status is Status.WRONG


MISTAKES = "returns_the_activations", "returns_the_weight", "zeroes_the_weight"
LATER = "caches_by_version", "four_elements", "right_sums", "slow_at_first", "transposes_later"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_wrong_kernels_are_rejected_in_the_process_that_judges(dtype: str, monkeypatch) -> None:
    """Kernels of the package run there, but none of them is wrong."""
    for module in (contest, preparing):
        monkeypatch.setattr(module, "is_outside", lambda contender: False)
    names = [*declare.names(wrong), *(f"hostile:{name}" for name in (*MISTAKES, *LATER))]
    problem = Problem("linear", {**FIELDS, "dtype": dtype})
    contenders = [BASELINE, *(Contender("dense", name) for name in names)]
    (baseline, *others), _ = contest.run(problem, contenders, CPU, None)
    assert baseline.status is Status.OK, baseline.detail
    assert {row.case.contender.kernel for row in others if row.status is not Status.WRONG} == set()


def test_a_row_has_the_facts_of_its_case() -> None:
    dense, sparse = rows(BASELINE, Contender("bsr", "scipy_bsr", {"block": 16}))
    assert dense.digest == sparse.digest
    assert sparse.sparsity == pytest.approx(0.5)
    assert sparse.nnz == 64 * 512 // 2
    assert sparse.flops == 2 * 32 * sparse.nnz
    assert sparse.dense_flops == 2 * 32 * 64 * 512
    assert sparse.fewest_bytes == 4 * (sparse.nnz + 32 * 512 + 32 * 64)
    assert sparse.stored_bytes == 4 * (sparse.nnz + (64 // 16 + 1) + sparse.nnz // 256)
    assert sparse.dense_bytes == dense.stored_bytes == 4 * 64 * 512
    assert sparse.error is not None
    assert 0 < sparse.error < 1e-5
    assert sparse.convert_us
    assert len(sparse.samples_us) >= MIN_SAMPLES
    assert (sparse.clock, sparse.cache) == ("host", "hot")


def test_a_twin_has_the_launch_of_its_original_in_half_of_the_processes(monkeypatch) -> None:
    launches: list[Launch] = []

    def prepared(operands: Operands) -> Launch:
        launches.append(Launch(lambda: torch.zeros(1)))
        return launches[-1]

    kernel = Kernel(op="any", consumes="dense", device="any", prepare=prepared)
    monkeypatch.setattr("sparsebench.harness.bench.prepare.load_kernel", lambda name: kernel)
    twin, first = replace(BASELINE, baseline=False, twin=True), []
    for replicate in range(24):
        launches.clear()
        original, other = prepared_entries([BASELINE, twin], ContestOptions(replicate=replicate))
        assert {id(e.calls["kernel"].work) for e in (original, other)} == {
            id(launch) for launch in launches
        }
        first.append(original.calls["kernel"].work is launches[0])
    assert 6 <= sum(first) <= 18


def prepared_entries(
    contenders: list[Contender], options: ContestOptions
) -> list[RunningContender]:
    entries = entries_of(PROBLEM, contenders, CPU, options)
    contest.RunningContest(entries, Stages(CPU), None, options).prepare()
    return entries


def test_a_refusal_is_a_row_with_its_reason() -> None:
    result = rows(
        BASELINE,
        Contender("dense", "cublas"),
        Contender("bsr", "scipy_bsr", {"block": 0}),
        Contender("dense", "faulty:raises"),
        Contender("dense", "faulty:exhausts"),
    )
    assert [row.status.value for row in result] == [
        "ok", "unsupported", "unsupported", "failed", "out_of_memory",
    ]  # fmt: skip
    assert result[1].detail == "runs on cuda, not on cpu"
    assert "block: expected" in result[2].detail
    assert result[3].detail == "prepare: RuntimeError: no such instruction <b>here</b>"
    assert "4 EiB" in result[4].detail


def test_kernels_of_another_op_are_refused() -> None:
    ffn = Problem("ffn", {**FIELDS, "dtype": "fp32", "activation": "silu"})
    result = rows(BASELINE, Contender("csr", "scipy_csr"), problem=ffn)
    assert [row.status.value for row in result] == ["ok", "unsupported"]
    assert result[1].detail == "computes linear, not ffn"


@pytest.mark.parametrize(
    ("room_after", "statuses"),
    [
        (1, [Status.OK, Status.OK]),
        (2, [Status.OK, Status.OUT_OF_MEMORY]),
        (3, [Status.OUT_OF_MEMORY, Status.OUT_OF_MEMORY]),
    ],
)
def test_twins_end_first_if_the_reference_runs_out_of_memory(room_after, statuses, monkeypatch):
    expected, calls = contest.right_answers, []
    entries = entries_of(PROBLEM, [BASELINE, replace(BASELINE, baseline=False, twin=True)], CPU)

    def crowded(*arguments: Any) -> Any:
        calls.append(len([entry for entry in entries if entry.calls]))
        if len(calls) <= room_after:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return expected(*arguments)

    monkeypatch.setattr(contest, "right_answers", crowded)
    running = contest.RunningContest(entries, Stages(CPU))
    running.prepare()
    running.check(contest.BEFORE)
    assert [entry.row.status for entry in entries] == statuses
    assert calls[:3] == [2, 2, 1][: len(calls)], "an ended contender holds no memory"
    for entry in entries:
        ended = "reference, before timing: OutOfMemoryError" in entry.row.detail
        assert ended is not entry.running


def test_no_draw_is_copied_while_an_answer_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, copies = contest.right_answers, []

    def counted(layers: Layers, *arguments: Any) -> Any:
        copies.append([*layers.first.copies])
        return expected(layers, *arguments)

    monkeypatch.setattr(contest, "right_answers", counted)
    assert rows(BASELINE)[0].status is Status.OK
    assert copies == [[], []]


def test_memory_that_runs_out_names_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Layers, "keep", no_room)
    row = rows(BASELINE)[0]
    assert row.status is Status.OUT_OF_MEMORY
    assert row.detail.startswith("check: OutOfMemoryError")


def test_contests_leave_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def held() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        return sum(tensor.numel() for tensor in tensors if tensor.numel() >= 32 * 512)

    before = held()
    rows(BASELINE, Contender("bsr", "scipy_bsr", {"block": 16}))
    assert held() == before
    monkeypatch.setattr(contest, "right_answers", no_room)
    rows(BASELINE)
    assert held() == before


def test_contenders_take_turns_and_the_slow_take_fewer() -> None:
    log: list[str] = []

    def contender(name: str, loops: int) -> TimedCall:
        def call() -> torch.Tensor:
            log.append(name)
            return torch.tensor(sum(range(loops)))

        return TimedCall(call, "host")

    fast, slow = time_together([contender("f", 10), contender("s", 400_000)], CPU, seed="x")
    assert len(fast.times_us) == ROUNDS * SAMPLES_PER_ROUND
    assert MIN_SAMPLES <= len(slow.times_us) < ROUNDS
    first_half = log[: len(log) // 2]
    assert {"f", "s"} <= set(first_half)


def test_the_order_within_a_round_is_drawn_anew() -> None:
    log: list[int] = []
    contenders = [TimedCall(lambda i=i: log.append(i) or torch.empty(0), "host") for i in range(4)]
    time_together(contenders, CPU, seed="y")
    turn, first = SAMPLES_PER_ROUND, 2 * len(contenders)
    starts = range(first, len(log), 4 * turn)
    rounds = [tuple(log[start : start + 4 * turn : turn]) for start in starts]
    assert len(rounds) == ROUNDS
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert len(set(rounds)) > 4


class Held:
    """An object of 100 bytes on a fake device, which only the garbage collector frees."""

    allocated = 0

    def __init__(self) -> None:
        Held.allocated += 100
        self.cycle = self

    def __del__(self) -> None:
        Held.allocated -= 100


def test_earlier_garbage_does_not_lower_a_kernels_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = []

    def reset(device: torch.device) -> None:
        gc.collect()  # Python may do it at any moment
        peak[:] = [Held.allocated]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: Held.allocated)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: max(*peak, Held.allocated))
    Held()
    with added_memory(torch.device("cuda")) as memory:
        owner = Held()
    assert memory == {"held_bytes": 100, "peak_bytes": 100}
    assert owner.cycle is owner


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    with capturing(None):  # type: ignore[arg-type]
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="not permitted"), capturing(None):  # type: ignore[arg-type]
        raise RuntimeError("operation not permitted when stream is capturing")
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_launch_that_cannot_be_captured_says_why() -> None:
    device = torch.device("cuda:0")
    x = torch.ones(8, device=device)
    result = ready(Launch(lambda: x * x.sum().item()), device)
    assert result.clock == "events"
    assert result.why.startswith("no CUDA graph: ")
    assert ready(Launch(lambda: x + x), device).why == ""


@pytest.mark.gpu
def test_a_contest_on_the_gpu_uses_graphs_and_a_cold_cache() -> None:
    problem = Problem("linear", {**FIELDS, "dtype": "bf16"})
    device = torch.device("cuda:0")
    contenders = [Contender("dense", "cublas", baseline=True), Contender("dense", "wrong:stale")]
    result, _ = contest.run(problem, contenders, device, None)
    assert [row.status.value for row in result] == ["ok", "wrong"]
    assert (result[0].clock, result[0].cache) == ("graph", "cold")

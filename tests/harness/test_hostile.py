"""Kernels that attack the contest get no time, and do not affect the rows of other kernels."""

import ctypes
import json
import os
import random
import sys
from dataclasses import asdict
from functools import partial
from types import ModuleType

import declare
import forging
import hostile
import hostile_gpu
import numpy as np
import pytest
import torch
from hostile import setting

from sparsebench.harness.bench import contest, correctness, process_state, spot_checks, timing
from sparsebench.harness.bench.contest_state import ContestOptions, Fatal
from sparsebench.harness.bench.process_state import ProcessState
from sparsebench.harness.bench.process_state import addresses as real_addresses
from sparsebench.harness.bench.tampering import ArrayGuard, TamperingError, checksum
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run.worker_process import Log, WorkerLoss, start_worker
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.results.record import Case, Contender, Problem, Row, Status

CPU = torch.device("cpu")
FIELDS = {"m": 64, "n": 64, "k": 64, "pattern": "blocks", "block": 16, "sparsity": 0.5}
PROBLEM = Problem("linear", {**FIELDS, "dtype": "fp32"})
BASELINE = Contender("dense", "torch_dense", baseline=True)
BLOCKS = {"block": 16}
REASONS = {
    "zeroes_the_weight": "prepare: changed the operand w",
    "zeroes_the_activations": "prepare: changed the operand x",
    "spoils_shared_values": "prepare: changed w's values in bsr",
    "spoils_shared_values_late": "check: changed w's values in bsr",
    "returns_the_activations": "check: returned memory of the operand x",
    "returns_the_weight": "check: returned memory of the operand w",
    "odd_choice": "choice: expected text, numbers and lists: Object of type int64",
    "odd_code": "code: expected text or None, found object",
    "caches_by_version": "inspected calls are wrong",
    "lazy": "expected a tensor, found Lazy",
    "knows_its_caller": "inspected calls are wrong",
    "computes_the_draws": "before timing: relative error",
    "looks_for_poison": "inspected calls are wrong",
    "wrong_in_one_call_of_fifty": "inspected calls are wrong",
    "replaces_the_check": "prepare: replaced sparsebench.harness.bench.output_checks.check",
    "replaces_code_of_the_check": "replaced judge_values.__code__",
    "replaces_the_clock": "prepare: replaced sparsebench.harness.bench.timing.perf_counter",
    "works_in_a_thread": "before timing: ",
    "copies_the_expected_answer": "inspected calls are wrong",
    "slow_at_first": "inspected calls are wrong",
    "zeroes_the_expected_answer": "changed the expected answer",
}
SETTINGS = {
    "sets_a_precision": "fp32",
    "sets_an_environment_variable": "HOME",
    "sets_cublas_accumulation": "matmul.allow_fp16_accumulation",
    "sets_cublas_reductions": "matmul.allow_bf16_reduced_precision_reduction",
    "sets_cudnn": "cudnn.enabled",
    "sets_cudnn_benchmark": "cudnn.benchmark",
    "sets_cudnn_determinism": "cudnn.deterministic",
    "sets_cudnn_tf32": "cudnn.allow_tf32",
    "sets_no_gradients": "gradients",
    "sets_tf32": "precision",
    "sets_the_attention": "attention",
    "sets_the_collector": "collection",
    "sets_the_default_dtype": "dtype",
    "sets_the_determinism": "deterministic",
    "sets_the_directory": "directory",
    "sets_the_precision": "precision",
    "sets_the_threads": "threads",
    "sets_the_tracer": "profiling",
    "sets_the_umask": "umask",
}
LATE, HONEST = "spoils_while_timed", "moves_the_start"


def rows(*contenders: Contender, problem: Problem = PROBLEM) -> list[Row]:
    return contest.run(problem, list(contenders), CPU, None)[0]


def test_every_hostile_kernel_is_named() -> None:
    named = {f"hostile:{name}" for name in (*REASONS, *SETTINGS, LATE, HONEST)}
    assert named == {*declare.names(hostile)}


@pytest.mark.parametrize("name", REASONS)
def test_a_hostile_kernel_gets_no_time_and_harms_no_other(name, monkeypatch) -> None:
    monkeypatch.setattr(spot_checks, "BURST_S", 60.0)  # the test must not depend on speed
    innocents = [BASELINE, Contender("bsr", "scipy_bsr", BLOCKS)]
    stored = ("bsr", BLOCKS) if name.startswith("spoils") else ("dense", {})
    clock, judge = timing.perf_counter, correctness.judge_values.__code__
    first, second, result = rows(*innocents, Contender(stored[0], f"hostile:{name}", stored[1]))
    assert (timing.perf_counter, correctness.judge_values.__code__) == (clock, judge)
    for innocent in (first, second):
        assert innocent.status is Status.OK, innocent.detail
        assert innocent.error is not None
        assert innocent.error < 1e-6
        assert innocent.samples_us
    expected = Status.FAILED if name.startswith("odd") else Status.WRONG
    assert result.status is expected
    assert REASONS[name] in result.detail
    assert not result.samples_us
    json.dumps([asdict(row) for row in (first, second, result)])


def test_a_setting_of_the_process_is_put_back_and_its_contender_named() -> None:
    before, state = ProcessState(), torch.get_rng_state()
    hostile_ones = [Contender("dense", f"hostile:{name}") for name in SETTINGS]
    innocent, *others = rows(BASELINE, *hostile_ones)
    assert innocent.status is Status.OK, innocent.detail
    for row, word in zip(others, SETTINGS.values(), strict=True):
        assert row.status is Status.WRONG, row.case.contender.kernel
        assert row.detail.startswith("prepare: changed ")
        assert word in row.detail
    assert not before.restore()
    assert torch.equal(state, torch.get_rng_state())


def test_the_current_gpu_and_stream_are_put_back(monkeypatch) -> None:
    now = {"device": 0, "stream": "default"}
    for name in now:
        monkeypatch.setattr(torch.cuda, f"current_{name}", partial(now.get, name))
        monkeypatch.setattr(torch.cuda, f"set_{name}", partial(now.__setitem__, name))
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(process_state, "settings", process_state.settings.__wrapped__)
    monkeypatch.setattr(process_state, "random_states", dict)
    before = ProcessState()
    now |= {"device": 1, "stream": "side"}
    changed = before.restore()
    assert now == {"device": 0, "stream": "default"}
    names = [name.partition(" from")[0] for name in changed]
    assert names == ["the current GPU", "the current stream"]


def test_random_numbers_and_new_variables_are_put_back_without_blame(monkeypatch) -> None:
    before = ProcessState()
    expected = torch.rand(1), random.random(), np.random.rand()
    before.restore()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "1")
    torch.rand(5)
    assert not before.restore()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    before.restore()


def test_a_gpu_that_a_contender_used_first_has_no_earlier_random_state(monkeypatch) -> None:
    before, states = ProcessState(), process_state.random_states
    gpu = {"cuda": (torch.zeros(1), lambda state: None)}
    monkeypatch.setattr(process_state, "random_states", lambda: states() | gpu)
    assert not before.restore()


def test_a_start_time_that_is_moved_changes_no_time() -> None:
    _, row = rows(BASELINE, Contender("dense", f"hostile:{HONEST}"))
    assert row.status is Status.OK, row.detail
    assert min(row.samples_us) >= 1e6 * hostile.LATER_S


def test_a_clock_whose_machine_code_was_rewritten_ends_the_process(monkeypatch) -> None:
    code = ctypes.create_string_buffer(bytes(range(64)))
    monkeypatch.setattr(process_state, "addresses", lambda: {"clock": ctypes.addressof(code)})
    detour = setting(lambda: ctypes.memset(ctypes.addressof(code) + 3, 0xC3, 1))
    monkeypatch.setattr(hostile, "detour", detour, raising=False)
    contender = Contender("dense", "hostile:detour")
    with pytest.raises(Fatal, match="prepare: rewrote the machine code of clock") as result:
        rows(BASELINE, contender)
    assert result.value.case == Case(PROBLEM, contender).id
    assert "clock_gettime" in {*real_addresses()}


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_contender_that_rewrites_torch_is_found(attempt, tmp_path, monkeypatch) -> None:
    file = tmp_path / "victim.py"
    file.write_text("right = True\n")
    module = ModuleType("torch.victim")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "torch.victim", module)

    def rewrites(operands: Operands) -> Launch:
        w, x = declare.weight_and_input(operands)
        file.write_text("right = False\n")
        return Launch(lambda: x @ w.T)

    monkeypatch.setattr(hostile, "rewrites", declare.kernel()(rewrites), raising=False)
    contenders = [BASELINE, Contender("dense", "hostile:rewrites")]
    options = ContestOptions(attempt=attempt)
    if attempt:
        first, second = contest.run(PROBLEM, contenders, CPU, None, options)[0]
        assert (first.status, second.status) == (Status.OK, Status.WRONG)
        assert "torch.victim" in second.detail
    else:
        with pytest.raises(Fatal, match=r"torch\.victim"):
            contest.run(PROBLEM, contenders, CPU, None, options)


def test_rows_that_a_kernel_writes_in_place_of_its_worker_are_not_taken() -> None:
    worker = start_worker("cpu", None, Log())
    try:
        options = asdict(ContestOptions(measures=(("kernel", "hot"),)))
        lost = worker.measure(Contest(PROBLEM, forging.RIVALS), options, 60.0)
    finally:
        worker.kill()
    assert isinstance(lost, WorkerLoss)
    assert lost.case == Case(PROBLEM, forging.RIVALS[1]).id
    assert "forged" in lost.detail


@pytest.mark.gpu
@pytest.mark.parametrize("name", declare.names(hostile_gpu))
def test_a_hostile_kernel_gets_no_time_on_a_gpu(name: str) -> None:
    problem = Problem("linear", {**FIELDS, "m": 256, "n": 512, "k": 512, "dtype": "bf16"})
    contenders = [Contender("dense", "cublas"), Contender("dense", name)]
    options = ContestOptions(measures=(("kernel", "cold"), ("op", "cold")))
    result, _ = contest.run(problem, contenders, torch.device("cuda:0"), None, options)
    assert [row.status for row in result[:2]] == [Status.OK] * 2
    assert {row.status for row in result[2:]} <= {Status.WRONG, Status.FAILED}
    assert not any(row.samples_us for row in result[2:])


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_change_while_timing_ends_the_contest_and_the_second_attempt_blames_the_kernel(attempt):
    spoiler = Contender("bsr", f"hostile:{LATE}", BLOCKS)
    contenders = [BASELINE, Contender("bsr", "scipy_bsr", BLOCKS), spoiler]
    with pytest.raises(Fatal, match="timing: changed w's values in bsr") as result:
        contest.run(PROBLEM, contenders, CPU, None, ContestOptions(attempt=attempt))
    assert result.value.case == (Case(PROBLEM, spoiler).id if attempt else "")


def test_rows_record_their_draws_which_never_repeat() -> None:
    first, second = (rows(BASELINE)[0].draws for _ in range(2))
    assert len(first) == len(second) == 3  # before, while, after
    assert len({*first, *second}) == 6


def test_a_checksum_sees_any_bit_and_any_exchange() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32):
        array = torch.randn(3, 5001).to(dtype)
        before = int(checksum(array, 1))
        assert int(checksum(array.clone(), 1)) == before
        bits = array.view(torch.uint8).view(-1)
        bits[-1] ^= 1
        assert int(checksum(array, 1)) != before
        bits[-1] ^= 1
        bits[[0, 4096]] = bits[[4096, 0]]
        assert int(checksum(array, 1)) != before or bits[0] == bits[4096]


def test_freed_memory_is_detected() -> None:
    array = torch.ones(100)
    guard = ArrayGuard()
    guard.watch({"it": array})
    guard.check()
    array.untyped_storage().resize_(0)
    with pytest.raises(TamperingError, match="changed it"):
        guard.check()

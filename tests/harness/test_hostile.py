"""Kernels that attack the contest get no time, and do not affect the rows of other kernels.

Their code runs in a process of its own, from which the judge gets outputs and times. Some attacks
change nothing that is judged: they are measured honestly (TRUST.md).
"""

import json
import os
from dataclasses import asdict
from functools import partial
from statistics import median

import declare
import forging
import hostile
import hostile_gpu
import hostile_process
import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.harness.bench import contest, guest_calls, guest_contest, process_state
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.process_state import ProcessState
from sparsebench.harness.bench.tampering import ArrayGuard, TamperingError, checksum
from sparsebench.harness.inputs import bits
from sparsebench.harness.machine.child_process import Child
from sparsebench.results.record import Contender, Problem, Row, Status
from tests.tools.devices import CPU

FIELDS = {"m": 64, "n": 64, "k": 64, "pattern": "blocks", "block": 16, "sparsity": 0.5}
PROBLEM = Problem("linear", {**FIELDS, "dtype": "fp32"})
BASELINE = Contender("dense", "torch_dense", baseline=True)
BLOCKS = {"block": 16}
WRONG, FAILED = Status.WRONG, Status.FAILED
ENDED = FAILED, "the contender's process ended with"
TIMES = FAILED, "by the judge's clock"
BESIDE = FAILED, "beside it: expected"  # the baseline in its process
REASONS = {
    "answers_endlessly": (FAILED, "expected an answer in JSON, found '[[["),
    "answers_for_the_harness": (FAILED, ""),
    "answers_in_lines": (WRONG, "[2J  [2J"),
    "answers_in_a_thread": (WRONG, ""),
    "answers_too_deeply": (FAILED, "expected an answer in JSON, found '[[["),
    "caches_by_version": (WRONG, ""),
    "claims_a_graph": (FAILED, "expected the clock host, found graph"),
    "claims_bytes_beyond_64_bits": (FAILED, "an integer beyond 64 bits"),
    "claims_no_time": (FAILED, "no answer of its process: "),
    "claims_slow_starts": (FAILED, "rounds and calls of such a time, found (5, 1)"),
    "claims_to_be_right": (FAILED, "expected the status of an end, found ok"),
    "claims_too_much": (FAILED, "expected an answer in JSON"),
    "closes_its_files": (FAILED, ""),
    "computes_the_draws": (WRONG, "before timing: "),
    "cuts_off_memory": (FAILED, "prepare: PermissionError"),
    "copies_the_expected_answer": (WRONG, "before timing: "),
    "drops_a_hundredth_of_k": (WRONG, "before timing: "),
    "drops_small_weights": (WRONG, "before timing: "),
    "exits": ENDED,
    "exits_by_signal": ENDED,
    "forges_json": BESIDE,
    "forges_operator_call": BESIDE,
    "forges_own_turns": TIMES,
    "forges_the_clock": BESIDE,
    "forges_turns": BESIDE,
    "four_elements": (WRONG, "a call "),
    "hides_behind_a_mode": (WRONG, "before timing: "),
    "hides_behind_the_dispatcher": (WRONG, "before timing: "),
    "holds_the_judge_to_a_core": (WRONG, "changed the cores of the process"),
    "interrupts": ENDED,
    "knows_its_caller": (WRONG, ""),
    "lazy": (WRONG, "expected a tensor, found Lazy"),
    "leaves": ENDED,
    "looks_for_poison": (WRONG, ""),
    "looks_for_spots": (WRONG, "before timing: "),
    "no_randomness": (WRONG, ""),
    "not_contiguous": (WRONG, "expected a contiguous output"),
    "not_finite": (WRONG, "before timing: "),
    "odd_choice": (FAILED, "choice: expected text, numbers and lists: Object of type int64"),
    "odd_code": (FAILED, "code: expected text or None, found object"),
    "overrides_mm": BESIDE,
    "peeks_at_one_element": (WRONG, ""),
    "products_in_bf16": (WRONG, "before timing: "),
    "replaces_the_clock": (FAILED, "expected 1 times"),
    "returns_the_activations": (WRONG, "before timing: "),
    "returns_the_weight": (WRONG, "before timing: "),
    "rewrites_the_question": (WRONG, "before timing: relative error"),
    "right_sums": (WRONG, "a call "),
    "skips_the_last_token": (WRONG, ""),
    "slow_at_first": (WRONG, ""),
    "small_outputs_are_zero": (WRONG, "before timing: "),
    "spoils_shared_values": (WRONG, "prepare: changed w's values in bsr"),
    "spoils_shared_values_late": (WRONG, ""),
    "spoils_while_timed": (WRONG, "changed w's values in bsr"),
    "states_a_long_digest": (FAILED, "code: expected at most 1024 bytes, found 1000002"),
    "states_many_candidates": (FAILED, "candidates: expected at most 262144 bytes"),
    "states_nested_choices": (FAILED, "its process states: "),
    "states_odd_candidates": (FAILED, "its process states: "),
    "states_unpaired_surrogates": (FAILED, "its process states: "),
    "stops": (Status.TIMEOUT, "no answer within"),
    "transposes_later": (WRONG, "before timing: "),
    "waits_for_its_threads": TIMES,
    "wider": (WRONG, "found torch.float64"),
    "works_in_a_thread": (WRONG, ""),
    "wrong_in_one_call_of_fifty": (WRONG, "a call "),
    "zeroes_the_activations": (WRONG, ""),
    "zeroes_the_expected_answer": (WRONG, "before timing: "),
    "zeroes_the_weight": (WRONG, "before timing: "),
}
# The seconds that a call takes at least, whatever its process says of itself.
MEASURED: dict[str, float | None] = {
    "claims_equal_times": 5e-3,  # a run takes no such row (test_guests.py)
    "forks": 0.0,
    "leaves_work_to_the_end": 0.0,
    "moves_the_start": hostile.LATER_S,
    "replaces_code_of_the_check": None,
    "replaces_the_check": None,
    "rounds_by_three": hostile_process.ONE_CALL_S,
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
KERNELS = {
    name.partition(":")[2]: name
    for name in (*declare.names(hostile), *declare.names(hostile_process))
}


def rows(*contenders: Contender, problem: Problem = PROBLEM, timeout_s: float = 120.0) -> list[Row]:
    return contest.run(problem, list(contenders), CPU, None, ContestOptions(timeout_s=timeout_s))[0]


@pytest.fixture(autouse=True)
def no_comparison_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_calls, "SPOT_S", 60.0)  # on a busy host, too


def test_every_hostile_kernel_is_named() -> None:
    assert {*REASONS, *SETTINGS, *MEASURED} == KERNELS.keys()


@pytest.mark.parametrize("name", REASONS)
def test_a_hostile_kernel_gets_no_time_and_harms_no_other(name: str) -> None:
    innocents = [BASELINE, Contender("bsr", "scipy_bsr", BLOCKS)]
    stored = ("bsr", BLOCKS) if name.startswith("spoils") else ("dense", {})
    hostile_one = Contender(stored[0], KERNELS[name], stored[1])
    first, second, result = rows(*innocents, hostile_one, timeout_s=2 if name == "stops" else 120)
    for innocent in (first, second):
        assert innocent.status is Status.OK, innocent.detail
        assert innocent.error is not None
        assert innocent.error < 1e-6
        assert innocent.samples_us
    status, words = REASONS[name]
    assert (result.status, words in result.detail) == (status, True), result.detail
    assert not result.samples_us
    json.dumps([asdict(row) for row in (first, second, result)])


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_kernel_changes_in_its_process_changes_no_time(name: str) -> None:
    baseline, result = rows(BASELINE, Contender("dense", KERNELS[name]))
    assert baseline.status is Status.OK
    if (least_s := MEASURED[name]) is None:  # it returns zeros
        assert result.status is Status.WRONG
    else:
        assert result.status is Status.OK, result.detail
        assert median(result.samples_us) >= 1e6 * least_s


def test_a_setting_of_the_process_costs_its_contender_the_row() -> None:
    before = ProcessState()
    hostile_ones = [Contender("dense", KERNELS[name]) for name in SETTINGS]
    innocent, *others = rows(BASELINE, *hostile_ones)
    assert innocent.status is Status.OK, innocent.detail
    for row, word in zip(others, SETTINGS.values(), strict=True):
        assert row.status is Status.WRONG, row.case.contender.kernel
        assert row.detail.startswith("prepare: changed ")
        assert word in row.detail
    assert not before.restore()


def test_the_current_gpu_and_stream_are_put_back(monkeypatch) -> None:
    now = {"device": 0, "stream": "default"}
    for name in now:
        monkeypatch.setattr(torch.cuda, f"current_{name}", partial(now.get, name))
        monkeypatch.setattr(torch.cuda, f"set_{name}", partial(now.__setitem__, name))
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(process_state, "settings", process_state.settings.__wrapped__)
    before = ProcessState()
    now |= {"device": 1, "stream": "side"}
    changed = before.restore()
    assert now == {"device": 0, "stream": "default"}
    names = [name.partition(" from")[0] for name in changed]
    assert names == ["the current GPU", "the current stream"]


def test_new_variables_are_put_back_without_blame(monkeypatch) -> None:
    before = ProcessState()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "1")
    assert not before.restore()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_contender_that_rewrites_a_module_is_wrong(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(guest_contest, "rewritten_modules", iter([[], ["torch.victim"]]).__next__)
    _, row = rows(BASELINE, Contender("dense", KERNELS["forks"]))
    assert (row.status, row.detail) == (Status.WRONG, "rewrote the files of torch.victim")


def test_rows_that_a_kernel_writes_in_place_of_its_worker_are_not_taken() -> None:
    baseline, forged = rows(*forging.RIVALS)
    assert (baseline.status, forged.status) == (Status.OK, Status.FAILED)
    assert "no answer of its process" in forged.detail


def test_a_device_that_shares_no_memory_costs_the_guest_its_row_alone(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise Unsupported("nothing is shared")

    monkeypatch.setattr(guest_contest, "Arena", refuse)
    baseline, row = rows(BASELINE, Contender("dense", KERNELS["forks"]))
    assert baseline.status is Status.OK
    assert (row.status, row.detail) == (Status.UNSUPPORTED, "nothing is shared")


@pytest.mark.parametrize(
    "answers",
    [
        {"open": {"ended": ["ok", "", ""]}},  # a right row has samples
        {"capture": {"result": {"kernel": ["graph", ""]}}},  # on a CPU
    ],
)
def test_what_no_guest_can_answer_costs_its_row(answers, monkeypatch) -> None:
    right, send = Child.next, Child.send
    requests: dict[Child, str] = {}

    def forge(child: Child, timeout_s: float) -> object:
        answer = right(child, timeout_s)
        return answers.get(requests.get(child), answer)

    def note(child: Child, message: object) -> object:
        requests[child] = message["do"] if isinstance(message, dict) else ""
        return send(child, message)

    monkeypatch.setattr(Child, "next", forge)
    monkeypatch.setattr(Child, "send", note)
    baseline, row = rows(BASELINE, Contender("dense", KERNELS["forks"]))
    assert (baseline.status, row.status) == (Status.OK, Status.FAILED)
    assert row.detail.startswith("no answer of its process: ValueError")


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


def test_rows_record_their_draws_which_never_repeat() -> None:
    first, second = (rows(BASELINE)[0].draws for _ in range(2))
    assert len(first) == len(second) == 3  # before, while, after
    assert len({*first, *second}) == 6


def test_a_checksum_sees_any_bit_and_any_exchange() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32):
        array = torch.randn(3, 5001).to(dtype)
        before = int(checksum(array, 1))
        assert int(checksum(array.clone(), 1)) == before
        bits = array.view(torch.uint8).view(-1)
        bits[-1] ^= 1
        assert int(checksum(array, 1)) != before
        bits[-1] ^= 1
        for place in range(8):  # the signs of a row's first elements
            bits[place] ^= 128
            assert int(checksum(array, 1)) != before
            bits[place] ^= 128
        bits[[0, 4096]] = bits[[4096, 0]]
        assert int(checksum(array, 1)) != before or bits[0] == bits[4096]


@pytest.mark.parametrize("size", [1, 4096, 4 * 4096, 9 * 4096 + 3])
def test_a_checksum_is_the_same_in_pieces(size: int, monkeypatch) -> None:
    array = torch.randint(-(2**31), 2**31, (size,)).int()
    whole = int(checksum(array, 1))
    monkeypatch.setitem(bits.CHUNK, "cpu", 2 * 4096)
    assert int(checksum(array, 1)) == whole


def test_freed_memory_is_detected() -> None:
    array = torch.ones(100)
    guard = ArrayGuard()
    guard.watch({"it": array})
    guard.check()
    array.untyped_storage().resize_(0)
    with pytest.raises(TamperingError, match="changed it"):
        guard.check()

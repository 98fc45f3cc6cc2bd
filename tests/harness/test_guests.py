"""Guests: kernels from outside the package, each in a process of its own."""

from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench._discovery import outside
from sparsebench.harness.bench import contest, guest_calls, guest_contest, guest_process
from sparsebench.harness.bench.arena import Arena, open_arena
from sparsebench.harness.bench.contest import RunningContest
from sparsebench.harness.bench.contest_state import ContestOptions, GuestLoss, configuration
from sparsebench.harness.bench.guest_calls import GuestCalls
from sparsebench.harness.bench.guest_process import GuestProcess, Waits
from sparsebench.harness.bench.prepare import entries_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.catalog import is_outside
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import measure, without_faults
from sparsebench.harness.run.run_json import Flags
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run import store
from sparsebench.results.run.consistency import Owners, check_consistency
from tests.tools.devices import CPU
from tests.tools.suites import ON_CPU, linear

FIELDS = {"m": 64, "n": 64, "k": 64, "pattern": "blocks", "block": 16, "sparsity": 0.5}
BASELINE = Contender("dense", "torch_dense", baseline=True)


def rows(*contenders: Contender, op: str = "linear", **options: Any) -> list[Row]:
    problem = Problem(op, {**FIELDS, "dtype": "fp32"})
    return contest.run(problem, list(contenders), CPU, None, ContestOptions(**options))[0]


def test_a_guest_is_code_of_another_package() -> None:
    assert not is_outside(Contender("bsr", "bsr_triton"))
    assert is_outside(Contender("dense", "acme.kernels:FAST"))
    assert is_outside(Contender("acme.format", "default"))
    assert not outside("kernels", "no_such_kernel")  # a misspelling, which loading reports


def test_guests_alone_are_measured_without_a_baseline() -> None:
    (row,) = rows(Contender("dense", "guests:right"))
    assert (row.status, row.clock) == (Status.OK, "host")
    assert row.samples_us
    assert row.convert_us
    assert row.prepare_s
    assert len(row.draws) == 2  # before and after timing


def test_a_packed_output_of_a_guest_is_compared_where_it_stores_elements() -> None:
    blocks = {"block": 16}
    right = Contender("bsr", "guests:gradient", blocks)
    missing = Contender("bsr", "guests:leaves_out_a_block", blocks)
    measured = rows(BASELINE, right, missing, op="linear_wgrad")
    assert [row.status for row in measured] == [Status.OK, Status.OK, Status.WRONG]
    assert "each element of the weight once" in measured[2].detail


def test_the_choice_of_an_earlier_process_is_pinned_and_a_twin_takes_it() -> None:
    first = Contender("dense", "guests:choosing")
    twin = Contender("dense", "guests:choosing", twin=True)
    chosen, repeated = rows(first, twin)
    assert chosen.choice == {"draw": chosen.choice["draw"]}
    assert repeated.choice == chosen.choice


def test_a_guest_that_takes_all_time_ends_alone() -> None:
    right, late = rows(BASELINE, Contender("dense", "faulty:hangs"), timeout_s=2)
    assert (right.status, late.status) == (Status.OK, Status.TIMEOUT)
    assert "no answer within 1.6 s" in late.detail


def ending(monkeypatch: pytest.MonkeyPatch, **request: Any) -> None:
    """Let a request end for want of memory."""
    right = GuestProcess.ask

    def ask(process: GuestProcess, what: str, timeout_s: float, **arguments: Any) -> Any:
        if {"do": what, **arguments}.items() >= request.items():
            raise GuestLoss(Status.OUT_OF_MEMORY, "no memory")
        return right(process, what, timeout_s, **arguments)

    monkeypatch.setattr(GuestProcess, "ask", ask)


def test_the_baseline_that_fails_beside_a_guest_is_named(monkeypatch) -> None:
    ending(monkeypatch, do="prepare", number=0)
    baseline, guest = rows(BASELINE, Contender("dense", "guests:right"))
    assert baseline.status is Status.OK
    reason = "dense/torch_dense beside it: no memory"
    assert (guest.status, guest.detail) == (Status.OUT_OF_MEMORY, reason)


@pytest.mark.parametrize(("number", "whose"), [(0, "dense/torch_dense beside it: "), (1, "")])
def test_a_guest_without_a_chain_says_whose_failed(number, whose, monkeypatch) -> None:
    ending(monkeypatch, do="further", number=number, scope="chain")
    options = ContestOptions(measures=(("chain", "hot"), ("kernel", "hot")))
    problem = Problem("linear", {**FIELDS, "dtype": "fp32"})
    entries = entries_of(problem, [BASELINE, Contender("dense", "guests:right")], CPU, options)
    running = RunningContest(entries, Stages(CPU), None, options)
    running.prepare()
    running.start()
    running.measure()
    running.measure_guests()
    chain, alone = entries[1].rows(options.measures)
    assert (chain.status, alone.status) == (Status.OUT_OF_MEMORY, Status.OK), alone.detail
    assert chain.detail == f"chain: {whose}no memory"


def test_integers_are_drawn_only_where_they_are_compared(monkeypatch) -> None:
    draws = []
    monkeypatch.setattr(guest_contest, "exact_draws", lambda *_: draws.append(1))
    guest = Contender("dense", "guests:right")
    (row,) = rows(guest)
    assert len(draws) == 1
    rows(guest, checked={row.case.id: [configuration(row)]})
    assert len(draws) == 1


def test_a_row_that_validate_would_refuse_is_lost_alone(tmp_path) -> None:
    contenders = [f"{{format: dense, kernel: '{name}'}}" for name in ODD]
    sizes = "m: 64, n: 64, k: 64, dtype: fp32, block: 16"
    (tmp_path / "small.yaml").write_text(linear(sizes, *contenders, baselines=(ON_CPU,)))
    suite = read(str(tmp_path / "small.yaml"))
    run = store.read(measure(suite, Flags("cpu", replicates=1), tmp_path / "run", None))
    by_kernel = {row.case.contender.kernel: row for row in run.rows}
    assert by_kernel["torch_dense"].status is Status.OK
    for name, reason in ODD.items():
        assert by_kernel[name].status is Status.FAILED
        assert by_kernel[name].detail.endswith(reason)
    assert [*check_consistency(run)]


EQUAL = "expected samples of a clock, found the first 1 again and again"
ODD = {"hostile_process:claims_equal_times": EQUAL}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"energy_j": nan}, "expected energy_j of 0 or more, found nan"),
        ({"peak_bytes": -5}, "expected peak_bytes of 0 or more, found -5"),
        ({"loads": {"half": {"us_per_call": inf}}}, "us_per_call of load half of 0 or more"),
        ({"loads": {"half": 1.0}}, "expected a row; loads"),
        ({"held_bytes": 2**64}, "an integer beyond 64 bits"),
        ({"samples_us": (0.0, 2.0)}, "expected a time in µs, found 0.0"),
        ({"samples_us": (3.0, 2.0, 1.0)}, "expected samples of its own, found those of dense/x"),
        ({"candidates": ({"a": "x" * 2**21},)}, "ROW_BYTES"),
    ],
)
def test_a_run_takes_no_row_with_odd_facts(facts: dict[str, Any], reason: str) -> None:
    case = Case(Problem("linear", FIELDS), Contender("dense", "x"))
    right = Row(case, Status.OK, draws=(1, 2), samples_us=(1.0, 2.0, 3.0))
    owners: Owners = {}
    assert without_faults(right, owners) is right
    row = without_faults(replace(right, replicate=1, scope="op", **facts), owners)
    assert (row.status, row.replicate, row.scope) == (Status.FAILED, 1, "op")
    assert not row.samples_us
    assert reason in row.detail


@pytest.mark.parametrize(("waited_s", "seconds"), [(0.125, 0.375), (0.75, 0.0)])
def test_the_clock_of_the_judge_leaves_out_what_it_waited_for(waited_s, seconds, monkeypatch):
    calls = object.__new__(GuestCalls)
    waits = iter([Waits(0, 0, 0), Waits(int(1e9 * waited_s), 0, 0)])
    calls.process = SimpleNamespace(waits=waits.__next__)  # type: ignore[assignment]
    monkeypatch.setattr(guest_calls, "perf_counter", iter([1.0, 1.5]).__next__)
    assert calls.clock(lambda: "done") == (seconds, "done")


def test_a_gpu_for_one_process_alone_runs_no_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_process, "exclusive", lambda device: True)
    process = GuestProcess()
    try:
        with pytest.raises(GuestLoss, match="a GPU that several processes may use") as loss:
            process.begin(torch.device("cuda:0"))
    finally:
        process.child.kill()
    assert loss.value.status is Status.UNSUPPORTED


def test_an_arena_has_the_arrays_of_its_layout_on_both_sides() -> None:
    layout = {"x": ([3, 5], "bfloat16"), "y": ([7], "float64"), "empty": ([0, 2], "int8")}
    arena = Arena(layout, CPU)
    mine, theirs = arena.arrays, open_arena(arena.handle, layout)
    mine["x"].fill_(1.5)
    theirs["y"].fill_(-2.0)
    assert bool((theirs["x"] == 1.5).all())
    assert bool((mine["y"] == -2.0).all())
    assert theirs["empty"].shape == (0, 2)
    arena.close()

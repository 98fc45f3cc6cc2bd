"""Guests: kernels from outside the package, each in a process of its own."""

from typing import Any

import pytest
import torch

from sparsebench._discovery import outside
from sparsebench.harness.bench import contest, guest_process
from sparsebench.harness.bench.arena import Arena, open_arena
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.guest_process import GuestLoss, GuestProcess
from sparsebench.harness.catalog import is_outside
from sparsebench.results.record import Contender, Problem, Row, Status

CPU = torch.device("cpu")
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

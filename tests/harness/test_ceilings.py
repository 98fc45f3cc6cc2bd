"""harness/bench/ceilings.py: what a device can do at most, and what is faster than that."""

from dataclasses import asdict, replace

import pytest
import torch

from sparsebench.harness.bench import contest
from sparsebench.harness.bench.ceilings import Ceilings, measure
from sparsebench.harness.bench.entry import ContestOptions
from sparsebench.results.record import Contender, Problem, Status

CEILINGS = Ceilings(
    read_gb_per_s=1000.0,
    copy_gb_per_s=900.0,
    matrix_tflops={"fp16": 100.0, "bf16": 100.0, "fp32": 10.0, "tf32": 50.0},
    launch_us=4.0,
    l2_bytes=1_000_000,
)


def test_the_bound_is_the_longer_of_moving_and_multiplying() -> None:
    assert CEILINGS.bound("bf16", 1e9, 5_000_000, 0, "cold") == (10.0, "compute")
    assert CEILINGS.bound("bf16", 1e8, 5_000_000, 0, "cold") == (5.0, "memory")


def test_what_the_cache_may_hold_back_need_not_move() -> None:
    assert CEILINGS.bound("bf16", 0, 5_000_000, 400_000, "cold")[0] == pytest.approx(4.6)
    assert CEILINGS.bound("bf16", 0, 5_000_000, 3_000_000, "cold")[0] == pytest.approx(4.0)
    assert CEILINGS.bound("bf16", 0, 5_000_000, 0, "hot")[0] == pytest.approx(4.0)
    assert CEILINGS.bound("bf16", 0, 500_000, 0, "hot")[0] == 0


def test_products_of_fp32_are_bound_by_tf32() -> None:
    assert CEILINGS.bound("fp32", 1e9, 0, 0, "cold") == (20.0, "compute")


def test_ceilings_are_measured_and_go_to_json_and_back() -> None:
    found = measure(torch.device("cpu"))
    assert found.read_gb_per_s > 0
    assert found.launch_us > 0
    assert found.matrix_tflops.keys() == CEILINGS.matrix_tflops.keys()
    assert Ceilings.from_json(asdict(found)) == found


def test_a_row_has_its_bound_and_a_cpu_is_not_judged_by_it() -> None:
    fields = {"m": 8, "n": 64, "k": 64, "dtype": "fp32", "pattern": "dense", "block": 1}
    problem = Problem("linear", {**fields, "sparsity": 0.0})
    slow = replace(CEILINGS, read_gb_per_s=1e-6, copy_gb_per_s=1e-6, l2_bytes=0)
    options = ContestOptions(ceilings=slow)
    dense = Contender("dense", "torch_dense", baseline=True)
    (row,), _ = contest.run(problem, [dense], torch.device("cpu"), None, options)
    assert row.status is Status.OK
    assert row.bound_by == "memory"
    assert row.bound_us is not None
    assert row.bound_us > 1e6  # a second and more


@pytest.mark.gpu
def test_a_time_below_the_bound_is_no_record() -> None:
    fields = {"m": 8, "n": 4096, "k": 4096, "dtype": "bf16", "pattern": "dense", "block": 1}
    problem = Problem("linear", {**fields, "sparsity": 0.0})
    options = ContestOptions(ceilings=replace(CEILINGS, read_gb_per_s=1.0, copy_gb_per_s=1.0))
    dense = Contender("dense", "cublas", baseline=True)
    (row,), _ = contest.run(problem, [dense], torch.device("cuda:0"), None, options)
    assert row.status is Status.FASTER_THAN_LIGHT
    assert "memory allows" in row.detail
    assert not row.samples_us

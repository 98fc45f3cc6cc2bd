"""Ceilings: measured, recent ones reused, raised by references, and the rows that they judge."""

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.harness.bench import contest, device_ceilings
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.device_ceilings import measure
from sparsebench.harness.plan.selection import references
from sparsebench.harness.plan.suite import read as read_suite
from sparsebench.harness.run import runner
from sparsebench.harness.run.measure import measure as run_suite
from sparsebench.harness.run.run_json import Flags
from sparsebench.results.ceilings import Ceilings, check_bound
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run import store
from tests.tools.suites import BSR, linear

SUITE = linear("n: 4096, k: 4096, m: 16", BSR)
CEILINGS = Ceilings(
    read_gb_per_s=1000.0,
    copy_gb_per_s=900.0,
    matrix_tflops={"fp16": 100.0, "bf16": 100.0, "fp32": 10.0, "tf32": 50.0},
    launch_us=4.0,
    l2_bytes=1_000_000,
)


KNOWS_FP16 = {"matrix_tflops": {"bf16": 0.0, "fp16": 100.0}}
BLIND = {"read_gb_per_s": 0.0, "copy_gb_per_s": 0.0}
FIVE = 5_000_000


@pytest.mark.parametrize(
    ("changed", "arguments", "bound"),
    [  # dtype, flops, bytes of operands, bytes of the output, cache
        ({}, ("bf16", 1e9, FIVE, 0, "cold"), (10.0, "compute")),
        ({}, ("bf16", 1e8, FIVE, 0, "cold"), (5.0, "memory")),
        ({}, ("fp32", 1e9, 0, 0, "cold"), (20.0, "compute")),  # by tf32
        # Bytes that may stay in the cache do not count.
        ({}, ("bf16", 0, FIVE, 400_000, "cold"), (4.6, "memory")),
        ({}, ("bf16", 0, FIVE, 3_000_000, "cold"), (4.0, "memory")),
        ({}, ("bf16", 0, FIVE, 0, "hot"), (4.0, "memory")),
        ({}, ("bf16", 0, 500_000, 0, "hot"), (0.0, "memory")),
        ({"write_gb_per_s": 2000.0}, ("bf16", 0, FIVE, 0, "cold"), (2.5, "memory")),
        # If a ceiling is unknown, use the highest known one, or none.
        ({"matrix_tflops": {}}, ("bf16", 1e9, FIVE, 0, "cold"), None),
        ({"matrix_tflops": {}}, ("bf16", 0, FIVE, 0, "cold"), (5.0, "memory")),
        (KNOWS_FP16, ("bf16", 1e9, 0, 0, "cold"), (10.0, "compute")),
        (BLIND, ("bf16", 1e9, FIVE, 0, "cold"), None),
        (BLIND, ("bf16", 1e9, 0, 0, "cold"), (10.0, "compute")),
    ],
)
def test_the_bound_is_the_longer_of_moving_and_multiplying(changed, arguments, bound) -> None:
    result = replace(CEILINGS, **changed).bound(*arguments)
    assert (result and result[1]) == (bound and bound[1])
    assert (result and result[0]) == pytest.approx(bound and bound[0])


def test_ceilings_are_measured_and_go_to_json_and_back() -> None:
    older = {k: v for k, v in asdict(CEILINGS).items() if k not in ("write_gb_per_s", "by")}
    assert Ceilings.from_json(older) == CEILINGS
    result = measure(torch.device("cpu"))
    assert min(result.read_gb_per_s, result.copy_gb_per_s, result.write_gb_per_s or 0) > 0
    assert result.launch_us > 0
    assert result.matrix_tflops.keys() == CEILINGS.matrix_tflops.keys()
    assert min(result.matrix_tflops.values()) > 0
    assert result.by.keys() == {"read", "copy", "write", *result.matrix_tflops}
    assert Ceilings.from_json(asdict(result)) == result


def reference(bound_by: str, replicate: int, cache: str = "cold") -> Row:
    first = references("cuda")[{"memory": 1, "compute": 2}[bound_by]]
    case = Case(first.problem, first.contenders[0])
    named = {"bound_us": 100.0, "bound_by": bound_by, "cache": cache}
    return Row(case, Status.OK, replicate, reference=True, samples_us=(1.0,), **named)  # type: ignore[arg-type]


def test_a_reference_below_its_bound_is_ok_and_says_that_it_raises_the_ceiling() -> None:
    row = check_bound(reference("memory", 0), 80.0)
    assert (row.status, row.raises) == (Status.OK, 1.25)
    assert "80.00 µs" in row.detail
    assert "100.00 µs" in row.detail
    assert check_bound(reference("memory", 0), 100.0).raises is None
    other = replace(reference("memory", 0), reference=False)
    assert check_bound(other, 96.0) == other
    assert check_bound(other, 80.0).status is Status.FASTER_THAN_LIGHT


def test_raises_are_reported_once_per_contest_and_stay_in_force() -> None:
    contest_of_two = [
        check_bound(reference("memory", 0, c), t) for c, t in [("cold", 80), ("hot", 90)]
    ]
    later = check_bound(reference("memory", 1), 50.0), check_bound(reference("compute", 1), 80.0)
    result, lines = CEILINGS.after([*contest_of_two, *later])
    assert result.bandwidth == result.read_gb_per_s == 2500.0
    assert result.matrix_tflops == {**CEILINGS.matrix_tflops, "bf16": 125.0}
    assert [line.partition(" by ")[0] for line in lines] == [
        "read raised from 1000 to 1250 GB/s",
        "read raised from 1250 to 2500 GB/s",
        "bf16 raised from 100 to 125 TFLOP/s",
    ]
    assert lines[0].endswith("by cublas (m 1, n 16384, k 16384, bf16, cold, replicate 0)")
    assert CEILINGS.after([replace(row, reference=False) for row in later]) == (CEILINGS, [])


def test_a_run_raises_its_ceilings_and_keeps_the_first_ones(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    (tmp_path / "spec.yaml").write_text("efficiency: {dense/cublas: 1.2}\nprocess: 0.0\n")
    flags = Flags(f"sim:{tmp_path / 'spec.yaml'}", replicates=3)
    run = store.read(
        run_suite(read_suite(str(tmp_path / "suite.yaml")), flags, tmp_path / "run", None)
    )
    assert {row.status for row in run.reference} == {Status.OK}
    first = Ceilings.from_json(run.environment["ceilings"])
    last, lines = first.after(run.reference)
    assert last.bandwidth > 1.1 * first.bandwidth
    assert 1 <= len([line for line in lines if line.startswith("read")]) <= 3
    last_bounds = {row.bound_us for row in run.rows if row.replicate == 2}
    assert len(last_bounds) == 1
    assert not any(row.raises for row in run.rows)


def test_a_row_of_a_cpu_has_no_bound() -> None:
    fields = {"m": 8, "n": 64, "k": 64, "dtype": "fp32", "pattern": "dense", "block": 1}
    problem = Problem("linear", {**fields, "sparsity": 0.0})
    slow = replace(CEILINGS, read_gb_per_s=1e-6, copy_gb_per_s=1e-6, l2_bytes=0)
    options = ContestOptions(ceilings=slow)
    dense = Contender("dense", "torch_dense", baseline=True)
    (row,), _ = contest.run(problem, [dense], torch.device("cpu"), None, options)
    assert (row.status, row.bound_us, row.bound_by) == (Status.OK, None, None)
    assert options.bounded(replace(row, clock="graph"), 0).bound_by == "memory"
    on_cpu = runner.Runner("cpu", None, 60.0)
    assert on_cpu.ceilings([]) == {}
    on_cpu.kill()


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


@pytest.mark.gpu
def test_nothing_that_torch_has_beats_the_ceilings() -> None:
    device = torch.device("cuda:0")
    result = measure(device)
    assert result.by.keys() >= {"read", "copy", "write", "bf16"}
    memory = device_ceilings.memory_rates(device)
    assert max(memory["read"].values()) >= memory["read"]["torch.sum"]
    assert max(memory["copy"].values()) >= memory["copy"]["torch.copy_"]
    for planned in references("cuda")[1:]:
        options = ContestOptions(reference=True, ceilings=result)
        rows, _ = contest.run(planned.problem, [*planned.contenders], device, None, options)
        for row in rows:
            assert row.status is Status.OK
            assert row.raises is None or row.raises < 1.01, row.detail


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the ceilings measured with a clock that advances 100 s at each reading."""
    readings = iter(range(0, 100_000, 100))
    monkeypatch.setattr(runner, "monotonic", lambda: float(next(readings)))
    monkeypatch.setattr(runner, "CEILINGS_KEPT_S", 600.0)
    return []


def ceilings(measurements: list[list[str]], card: str, *dtypes: str) -> dict[str, Any]:
    def measure(dtypes: Collection[str]) -> dict[str, Any]:
        measurements.append(sorted(dtypes))
        return {"matrix_tflops": dict.fromkeys(dtypes, 1.0)}

    return runner.recent_ceilings(card, dtypes, measure)


def test_a_run_takes_the_ceilings_of_its_card_and_dtypes_in_the_same_half_hour(
    measurements: list[list[str]],
) -> None:
    assert "age_s" not in ceilings(measurements, "GPU-1", "bf16")
    assert ceilings(measurements, "GPU-1", "bf16")["age_s"] == 100.0
    assert "age_s" not in ceilings(measurements, "GPU-1", "fp16")  # with those before
    assert ceilings(measurements, "GPU-1", "bf16", "fp16")["age_s"] > 0
    ceilings(measurements, "GPU-2", "bf16")
    for _ in range(8):
        ceilings(measurements, "GPU-1", "bf16")
    both = ["bf16", "fp16"]
    assert measurements == [["bf16"], both, ["bf16"], ["bf16"]]

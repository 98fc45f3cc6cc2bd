"""results/tables/frame.py and results/tables/cases.py, on numbers small enough to check by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparsebench.results.record import Case, Contender, Problem, Row, Source, Status, Value
from sparsebench.results.tables.cases import chose_dense, dense_choice, summary
from sparsebench.results.tables.frame import fields, frame, to_csv
from tests.results.made_up import DENSE

BSR = Contender("bsr", "bsr_triton", {"block": 16})
FIELDS: dict[str, Value] = {
    "m": 64,
    "n": 128,
    "k": 256,
    "dtype": "bf16",
    "pattern": "blocks",
    "block": 16,
}


def row(
    contender: Contender = DENSE,
    samples: tuple[float, ...] = (),
    sparsity: float = 0.9,
    source: Source | None = None,
    **changes: Any,
) -> Row:
    problem = Problem("linear", {**FIELDS, "sparsity": sparsity}, source=source)
    status = Status.OK if samples else Status.FAILED
    return Row(Case(problem, contender), **{"status": status, "samples_us": samples, **changes})


@pytest.mark.parametrize(
    ("block", "base", "ours", "speedup"),
    [
        (3, (10, 10, 10, 20, 20, 20, 40, 40, 99), (5, 5, 5, 4, 5, 6, 10, 10, 10), 4),  # 2, 4, 4
        (2, (10, 10, 30, 30, 1, 1), (5, 5, 10, 10), 6**0.5),  # fewer blocks: the first ones
        (2, (10, 10, 777), (5, 5), 2),  # after the last whole block
    ],
)
def test_a_speedup_is_the_median_of_the_ratios_of_paired_blocks(block, base, ours, speedup):
    rows = [row(DENSE, base, samples_per_block=block), row(BSR, ours, samples_per_block=block)]
    line = frame(rows).iloc[1]
    assert line.speedup == pytest.approx(speedup)
    assert line.baseline_label == "dense/cublas"


def test_there_is_no_speed_up_over_the_baseline_of_another_contest() -> None:
    ours = row(BSR, (5.0,))
    others = [
        row(DENSE, (10.0,), replicate=1),
        row(DENSE, (10.0,), attempt=1),
        row(DENSE, (10.0,), scope="graph"),
        row(DENSE, (10.0,), cache="warm"),
        row(DENSE, (10.0,), sparsity=0.5),
        row(DENSE),
    ]
    table = frame([ours, *others])
    assert np.isnan(table.speedup[0])
    assert pd.isna(table.baseline_label[0])


def test_the_baseline_is_the_first_ok_one() -> None:
    failed = row(Contender("dense", "broken", baseline=True))
    second = row(Contender("csr", "cusparse_csr", baseline=True), (20.0,))
    table = frame([failed, row(BSR, (5.0,)), row(DENSE, (10.0,)), second])
    assert table.speedup[1] == pytest.approx(2)
    assert set(table.baseline_label) == {"dense/cublas"}


def test_rates_and_bytes_have_their_units() -> None:
    sizes: dict[str, Any] = {"flops": 4e6, "dense_flops": 4e7, "fewest_bytes": 3000}
    line = frame([row(BSR, (2.0,), **sizes, stored_bytes=50, dense_bytes=200)]).iloc[0]
    assert (line.tflops, line.dense_tflops, line.gb_per_s) == pytest.approx((2, 20, 1.5))
    assert line.bytes_of_dense == 0.25


def test_fields_become_columns_and_blocks_become_text() -> None:
    one = Problem("linear", {**FIELDS, "block": [16, 32]})
    two = Problem("ffn", {"m": 1, "dtype": "fp16", "block": [8, 8], "active": 0.1})
    table = frame([Row(Case(p, DENSE), Status.TIMEOUT) for p in (one, two)])
    assert fields(table) == ["m", "n", "k", "dtype", "pattern", "sparsity", "block", "active"]
    assert list(table.block) == ["16x32", "8"]
    assert table.n.dtype == "Int64"
    assert pd.isna(table.n[1])
    assert list(table.status) == ["timeout", "timeout"]


def test_parameters_join_a_label_only_where_the_label_is_shared() -> None:
    wide = Contender("bsr", "bsr_triton", {"block": 64})
    assert list(frame([row(BSR), row(DENSE)]).label) == ["bsr/bsr_triton", "dense/cublas"]
    labels = list(frame([row(BSR), row(wide), row(DENSE)]).label)
    assert labels == ["bsr/bsr_triton block=16", "bsr/bsr_triton block=64", "dense/cublas"]


SLOWED: dict[str, tuple[dict[str, float], str]] = {
    "nothing": ({"seconds": 2.0, "power_capped_us": 3e5, "thermal_us": 0.0}, ""),
    "power": ({"seconds": 2.0, "power_capped_us": 5e5}, "power-limited"),
    "heat": ({"seconds": 2.0, "thermal_us": 1.0, "hardware_us": 1.0}, "thermal, hardware slowdown"),
    "no window": ({"power_capped_us": 5e5}, ""),
    "no sensor": ({}, ""),
}


@pytest.mark.parametrize("what", SLOWED)
def test_a_row_of_a_slowed_contest_is_marked_and_kept(what: str) -> None:
    telemetry, mark = SLOWED[what]
    line = frame([row(BSR, (2.0,), telemetry=telemetry)]).iloc[0]
    assert (line.mark, line.median_us) == (mark, 2)


WAITED = (10.0,) * 4 + (14.0,) * 6  # the median is 1.4 times the tenth percentile


@pytest.mark.parametrize(
    ("samples", "facts", "late"),
    [
        ((2.0,), {"clock": "graph", "late": 0.25}, 0.25),
        (WAITED, {"clock": "graph", "late": 0.0}, 0.0),  # the clock knows better
        (WAITED, {"clock": "graph"}, 0.6),  # up to 0.2.0
        (WAITED, {"clock": "graph", "scope": "op"}, None),
        (WAITED, {"clock": "host"}, None),
        ((10.0,) * 6 + (14.0,) * 4, {"clock": "events"}, 0.0),
    ],
)
def test_a_row_is_marked_if_its_host_was_late(samples, facts, late) -> None:
    line = frame([row(BSR, samples, **facts)]).iloc[0]
    assert line.mark == ("host late" if late else "")
    assert pd.isna(line.late) if late is None else line.late == pytest.approx(late)


def test_a_case_has_the_marks_of_all_its_processes_and_the_largest_share_of_late_samples() -> None:
    hot = {"seconds": 1.0, "thermal_us": 9.0}
    capped = hot | {"power_capped_us": 5e5}
    facts = zip([hot, {}, capped], [0.0, 0.5, None], strict=True)
    rows = [row(BSR, (2.0,), replicate=i, telemetry=t, late=s) for i, (t, s) in enumerate(facts)]
    (case,) = summary(frame(rows)).itertuples()
    assert (case.mark, case.late) == ("host late, power-limited, thermal", 0.5)


def test_sensors_bounds_and_bytes_come_through() -> None:
    sensors = {"sm_mhz": 1980.0, "power_w": 500.0, "temperature_c": 45.0}
    held: dict[str, Any] = {"held_bytes": 10, "peak_bytes": 30, "code": "c0de", "energy_j": 0.5}
    bound: dict[str, Any] = {"bound_us": 1.5, "bound_by": "memory", "clock": "graph"}
    line = frame([row(BSR, (2.0,), telemetry=sensors, **held, **bound)]).iloc[0]
    assert (line.of_bound, line.bound_by) == (0.75, "memory")
    assert (line.held_bytes, line.peak_bytes, line.code, line.energy_j) == (10, 30, "c0de", 0.5)
    assert (line.sm_mhz, line.power_w, line.temperature_c) == (1980, 500, 45)


@pytest.mark.parametrize(("clock", "share"), [("graph", 1.0), ("events", 1.0), ("host", None)])
def test_no_share_of_the_limit_is_above_one_and_a_cpu_has_none(clock, share) -> None:
    above = row(BSR, (2.0,), bound_us=2.05, bound_by="memory", clock=clock)
    line = frame([above]).iloc[0]
    if share:
        assert (line.of_bound, line.bound_us, line.bound_by) == (share, 2.05, "memory")
    else:
        assert pd.isna([line.of_bound, line.bound_us, line.bound_by]).all()


def test_eight_processes_give_an_interval_beside_students() -> None:
    rows = []
    for replicate in range(8):
        us = 10 / np.exp(replicate)
        rows += [row(DENSE, (10.0,), replicate=replicate), row(BSR, (us,), replicate=replicate)]
    line = summary(frame(rows)).iloc[1]
    interval = line.speedup, line.speedup_low, line.speedup_high
    assert interval == pytest.approx((np.exp(3.5), np.e, np.exp(6)))
    assert 1 < line.t_low < line.speedup < line.t_high
    assert line.speedups == pytest.approx(tuple(np.exp(range(8))))
    assert (line.interval, line.processes) == ("95 % interval over 8 processes", 8)


OTHER = Contender("dense", "reference", baseline=True)


@pytest.mark.parametrize(("baseline", "clock"), [(OTHER, "graph"), (DENSE, "events")])
def test_processes_with_another_baseline_or_clock_are_not_mixed_in(baseline, clock) -> None:
    rows = [row(baseline, (99.0,), clock=clock), row(BSR, (5.0,), clock=clock)]
    for i in (1, 2):
        rows += [row(c, (us,), replicate=i, clock="graph") for c, us in ((DENSE, 10.0), (BSR, 5.0))]
    case = summary(frame(rows)).set_index("kernel").loc["bsr_triton"]
    assert (case.speedup, case.baseline_label, case.clock) == (2, "dense/cublas", "graph")
    assert (case.speedups, case.interval) == ((2.0, 2.0), "range over 2 processes")


def test_a_case_that_failed_in_one_process_is_not_ok() -> None:
    rows = [row(BSR, (1.0,)), row(BSR, replicate=1, detail="illegal address")]
    line = summary(frame(rows)).iloc[0]
    assert (line.status, line.detail, line.processes) == ("failed", "illegal address", 2)
    assert np.isnan(line.median_us)


def test_a_later_attempt_replaces_an_earlier_one() -> None:
    rows = [row(DENSE, (99.0,)), row(DENSE, (10.0,), attempt=1)]
    line = summary(frame(rows)).iloc[0]
    assert (line.median_us, line.processes) == (10, 1)


@pytest.mark.parametrize(
    ("requested", "achieved", "level"),
    [
        (0.0, 0.8125, 0.8125),
        (0.5, 0.9899, 0.9899),
        (0.9, 0.9899, 0.9899),
        (0.5, 0.52, 0.52),
        (0.99, 0.991, 0.991),
        (0.5, 0.502, 0.5),  # a grid of blocks meets no level exactly
        (0.5, None, 0.5),
    ],
)
def test_the_level_of_weights_from_a_file_is_the_one_that_they_have(requested, achieved, level):
    source = Source("rn50/layer.smtx", "0" * 64)
    of_file = row(BSR, (1.0,), sparsity=requested, source=source)
    drawn = row(BSR, (1.0,), sparsity=0.7)
    cases = summary(frame([replace(each, sparsity=achieved) for each in (of_file, drawn)]))
    assert list(cases.level) == [level, 0.7]
    assert list(cases.sparsity) == [level if requested else 0.0, 0.7]


@pytest.mark.parametrize(
    ("sources", "shown"),
    [
        (["a:encoder/layer_0/w", "a:encoder/layer_1/w"], ["layer_0/w", "layer_1/w"]),
        (["0.5/a.smtx", "0.9/a.smtx", "0.9/b.smtx"], ["0.5/a.smtx", "0.9/a.smtx", "b.smtx"]),
        (["x/model.st:w", "y/model.st:w"], ["x/model.st:w", "y/model.st:w"]),
        (["kernel", "a/kernel"], ["kernel", "a/kernel"]),
        (["a/b/c.mtx"], ["c.mtx"]),
    ],
)  # fmt: skip
def test_a_source_is_named_by_the_shortest_ending_that_no_other_has(sources, shown) -> None:
    paths = [source.partition(":") for source in sources]
    rows = [
        row(source=Source(path, f"{number}", tensor or None))
        for number, (path, _, tensor) in enumerate(paths)
    ]
    assert list(frame(rows).source) == shown


def test_csv_comes_back_with_the_same_numbers(tmp_path: Path) -> None:
    table = frame([row(DENSE, (10.0,)), row(BSR, (4.0,)), row(BSR)])
    to_csv(table, tmp_path / "rows.csv")
    again = pd.read_csv(tmp_path / "rows.csv")
    assert [*again.columns, "blocks_us"] == list(table.columns)
    assert list(again.speedup[:2]) == pytest.approx([1, 2.5])


BEST = Contender("cvse", "ffn_sparse", options={"way": "best"})
DENSE_CHOICE = {"chosen": "dense, ffn_dense_triton"}
TRITON = "dense/ffn_dense_triton (chosen by cvse/ffn_sparse way=best)"


@pytest.mark.parametrize(
    ("kernel", "choice", "chosen"),
    [
        ("ffn_sparse", {"chosen": "dense, cublas", "way": "dense"}, "dense, cublas"),
        ("ffn_sparse", {"chosen": "cvse, ffn_few"}, "cvse, ffn_few"),
        ("ffn_sparse", {"chosen": "sparse activations, ffn_few"}, "cvse, ffn_few"),
        ("ffn_sparse", {}, ""),
        ("cublas", {"library": "cublas"}, ""),
    ],
)
def test_a_row_names_what_a_portfolio_chose(kernel, choice, chosen) -> None:
    table = frame([row(Contender("dense", kernel), (1.0,), choice=choice)])
    assert list(table.chosen) == list(summary(table).chosen) == [chosen]


def test_a_dense_kernel_that_a_portfolio_chose_has_its_own_name() -> None:
    for choice, ran in (
        (DENSE_CHOICE, TRITON),
        ({"chosen": "cvse, ffn_few"}, f"{BEST.label} (chosen: cvse, ffn_few)"),
    ):
        cases = summary(frame([row(DENSE, (10.0,)), row(BEST, (5.0,), choice=choice)]))
        assert (cases.label[1], cases.ran[1]) == (BEST.label, ran)


@pytest.mark.parametrize(
    ("chosen", "dense"),
    [
        ("", ""),
        ("cvse, ffn_few", ""),
        ("dense, cublas", "cublas"),
        ("dense, cublas or dense, ffn_dense_triton", "cublas or ffn_dense_triton"),
        ("cvse, ffn_few or dense, cublas", "cublas"),
    ],
)
def test_the_dense_kernels_are_those_of_any_process(chosen: str, dense: str) -> None:
    assert dense_choice(chosen) == dense
    assert [*chose_dense(pd.DataFrame({"chosen": [chosen]}))] == [bool(dense)]


def test_a_cell_of_a_csv_is_text_and_no_formula(tmp_path: Path) -> None:
    table = pd.DataFrame({"=name": ["=1+1", "@x", "-5", "bsr", None], "us": [-1.0, 2, 3, 4, 5]})
    to_csv(table, tmp_path / "t.csv")
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines == ["'=name,us", "'=1+1,-1.0", "'@x,2.0", "'-5,3.0", "bsr,4.0", ",5.0"]

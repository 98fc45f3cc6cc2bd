"""Two GPUs are compared by workload, over the cells that both measured."""

from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pandas as pd
import pytest

from sparsebench.reports.cells import cells, text_of
from sparsebench.reports.site.cards import run_lines
from sparsebench.reports.workloads import WORKLOADS, of_cells, two_gpus
from sparsebench.results.comparison import sides
from sparsebench.results.files import parse_json
from sparsebench.results.run import bundle, store
from sparsebench.results.tables.analysis import analyse
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.paths import PUBLISHED

RUNS = [PUBLISHED / gpu / "decoder-8b" for gpu in ("nvidia-h100-80gb-hbm3", "nvidia-h200")]


@pytest.fixture(scope="module")
def lines() -> pd.DataFrame:
    runs = [run_lines(analyse(store.read(run)), run.name) for run in RUNS]
    return pd.concat(runs, ignore_index=True)


def test_a_workload_has_the_means_of_times_and_gains_over_shared_cells(lines: Any) -> None:
    two = two_gpus(lines, *lines.gpu.unique())
    (decoding,) = two.workloads
    assert decoding.title == next(iter(WORKLOADS))
    assert (len(decoding.dense), decoding.every) == (8, 8)  # the H200 measured 16 tokens alone
    products = zip(decoding.dense, decoding.gains[0], decoding.gains[1], strict=True)
    sparse = [dense * a / b for dense, a, b in products]
    assert sparse == pytest.approx(list(decoding.sparse))
    less = [round(100 - 100 * geometric_mean(times)) for times in (decoding.dense, decoding.sparse)]
    said = f"H200 takes {less[0]} % less time dense and {less[1]} % less time sparse"
    assert f"compared with H100, {said}" in two.sentence
    assert "sparsity gains less there" in two.sentence
    back = two_gpus(lines, *reversed(lines.gpu.unique()))
    assert "sparsity gains more there" in back.sentence
    assert "faster in every cell of 1 of 1 workload, and slower in every cell of 0." in two.sentence


def test_a_gpu_is_not_faster_where_a_cell_is_slower(lines: Any) -> None:
    first, second = lines.gpu.unique()
    one = (lines.gpu == second) & (lines["shape"] == lines["shape"].iloc[0])
    mixed = lines.assign(median_us=lines.median_us.mask(one, lines.median_us * 2))
    assert "faster in every cell of 0 of 1 workload" in two_gpus(mixed, first, second).sentence


def test_a_gpu_that_is_much_slower_takes_times_as_long(lines: Any) -> None:
    first, second = lines.gpu.unique()
    slow = lines.assign(median_us=lines.median_us.mask(lines.gpu == second, lines.median_us * 16))
    two = two_gpus(slow, first, second)
    (decoding,) = two.workloads
    assert f"takes {geometric_mean(decoding.dense):.1f} times as long dense" in two.sentence
    assert 11 < geometric_mean(decoding.dense) < 13


def test_formats_that_nobody_would_use_are_counted_and_not_averaged(lines: Any) -> None:
    slow = lines.assign(gain=lines.gain.mask(lines.row == "2:4", 0.5))
    (decoding,) = two_gpus(slow, *lines.gpu.unique()).workloads
    assert (len(decoding.dense), decoding.every) == (6, 8)


def test_dense_on_the_same_zeros_is_the_reference_if_one_side_has_no_other(lines: Any) -> None:
    first, second = lines.gpu.unique()
    other = (lines.gpu == first) & (lines.side != "dense")
    unpruned = lines.assign(
        gain=lines.gain.mask(other, 99), over=lines.over.mask(other, "original")
    )
    (decoding,) = two_gpus(unpruned, first, second).workloads
    (expected,) = two_gpus(lines, first, second).workloads
    assert sorted(decoding.gains[0]) == pytest.approx(sorted(expected.gains[0]))


def test_gpus_that_share_no_cell_say_so(lines: Any) -> None:
    first, second = lines.gpu.unique()
    apart = lines.assign(problem_id=lines.problem_id.where(lines.gpu == first, "other"))
    two = two_gpus(apart, first, second)
    assert two.sentence == "H100 and H200 share no cell that gains."
    assert "not measured on both" in two.table.markdown()


def test_compare_prints_one_screen_and_every_case_with_cells() -> None:
    done = sparsebench("compare", *RUNS)
    assert len(done.stdout.splitlines()) < 12
    assert "decoding, 8B model" in done.stdout
    assert "read 0/" not in done.stdout
    cells = output("compare", *RUNS, "--cells")
    assert "Every case, largest difference first" in cells
    assert "decoding, 8B model" in cells


def test_cells_give_the_same_table_as_the_lines_that_they_come_from(lines: Any) -> None:
    first, second = lines.gpu.unique()
    written = parse_json(text_of(cells(lines)))["cells"]
    numbers = pd.DataFrame([cell["numbers"] for cell in written])
    expected, actual = two_gpus(lines, first, second), of_cells(numbers, first, second)
    assert (actual.table, actual.sentence) == (expected.table, expected.sentence)


def test_published_gpus_are_compared_without_reading_a_run(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # without a folder of runs
    monkeypatch.setattr(store, "read", None)
    shown = output("compare", "H100 SXM", "H200")
    assert "H200 against H100" in shown
    assert "decoding, 8B model" in shown
    assert shown.endswith("Every case: --cells\n")
    assert "did you mean H100?" in refusal("compare", "H1OO", "H200")


def test_the_table_of_published_gpus_is_the_same_above_every_case(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    table, _, _ = output("compare", "H100", "H200").partition("Every case")
    names = zip(RUNS, ("H100", "H200"), strict=True)
    read = [sides.side(store.read(run), name=name) for run, name in names]
    monkeypatch.setattr(sides, "find", lambda *_: read)
    above, _, below = output("compare", "H100", "H200", "--cells").partition("Baselines aside")
    assert above == table
    assert "Every case, largest difference first" in below


def test_replaced_runs_are_left_out_unless_their_folder_is_named() -> None:
    home = RUNS[0].parent
    assert RUNS[0] in sides.bundles([home])
    assert not [run for run in sides.bundles([home]) if bundle.EARLIER in run.parts]
    assert len(sides.bundles([home / bundle.EARLIER])) > 2


def test_published_experts_have_a_row_of_their_own(lines: Any) -> None:
    experts = lines.assign(op="experts", shape="1536 × 2048", problem_id=lines.problem_id + "e")
    two = two_gpus(pd.concat([lines, experts]), *lines.gpu.unique())
    assert [each.title for each in two.workloads] == [next(iter(WORKLOADS)), "experts"]
    assert two.workloads[1].dense == two.workloads[0].dense

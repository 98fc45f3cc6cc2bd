"""results/statistics.py: which contenders are compared, and the one definition of a ratio."""

from dataclasses import replace

import numpy as np
import pytest

from sparsebench.results.cases import has_baseline, summary, winners
from sparsebench.results.frame import blocks_us, frame, opponents
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.statistics import IntervalKind, ratio_over

DENSE = Contender("dense", "cublas", baseline=True)
BSR = Contender("bsr", "bsr_triton")
CSR = Contender("csr", "cusparse_csr")
PROBLEM = Problem("linear", {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "sparsity": 0.9})


def row(contender: Contender, times_us: list[float], replicate: int = 0) -> Row:
    """Return a row with blocks of one sample."""
    case = Case(PROBLEM, contender)
    return Row(case, Status.OK, replicate, samples_us=tuple(times_us), bound_by="memory")


def twin(contender: Contender) -> Contender:
    return replace(contender, baseline=False, twin=True)


def test_a_twin_is_never_taken_for_its_original() -> None:
    """Twins come first here, and are the fastest of all: no speedup, lead or verdict is theirs."""
    rows = [row(twin(DENSE), [1.0]), row(twin(BSR), [0.5]), row(DENSE, [10.0]), row(BSR, [5.0])]
    problems = [PROBLEM.id] * 4
    originals = [rows[2], rows[3], None, None]
    assert opponents(rows, problems) == [(rows[2], original) for original in originals]
    cases = summary(frame(rows))
    assert cases.set_index("label").speedup["bsr/bsr_triton"] == pytest.approx(2)
    (best,) = winners(cases).to_dict("records")
    assert (best["label"], best["runner_up"]) == ("bsr/bsr_triton", "dense/cublas")
    assert best["lead"] == pytest.approx(2)
    assert list(cases.label[has_baseline(cases)]) == ["bsr/bsr_triton"]


def test_a_ratio_of_two_contenders_is_the_median_of_ratios_within_blocks() -> None:
    """The clock doubles midway: medians of whole rows say 1.33, blocks say 2."""
    ours, over = row(BSR, [1.0, 1.0, 2.0, 4.0]), row(CSR, [2.0, 2.0, 4.0, 2.0])
    ratio = ratio_over({(0, 0): blocks_us(ours)}, {(0, 0): blocks_us(over)})
    assert ratio is not None
    assert ratio.value == pytest.approx(2)
    assert ratio.interval_kind is IntervalKind.QUARTILES
    assert np.median(over.samples_us) / np.median(ours.samples_us) < 1.5


def test_a_ratio_is_paired_within_the_processes_that_both_ran_in() -> None:
    ours = {(p, 0): np.array([1.0]) for p in range(8)}
    over = {(p, 0): np.array([2.0 + p]) for p in range(3, 8)} | {(2, 1): np.array([99.0])}
    ratio = ratio_over(ours, over)
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((5, 9))
    assert ratio_over({(0, 0): np.array([1.0])}, {(1, 0): np.array([1.0])}) is None


def test_a_lead_is_a_speed_up_over_the_runner_up() -> None:
    rows = []
    for process in range(8):
        drift = 1 + process / 4  # moves all contenders of a process alike
        rows += [row(DENSE, [10.0 * drift], process), row(BSR, [4.0 * drift], process)]
        rows += [row(CSR, [5.0 * drift], process)]
    (best,) = winners(summary(frame(rows))).to_dict("records")
    assert (best["runner_up"], best["tied"]) == ("csr/cusparse_csr", False)
    assert best["lead"] == pytest.approx(1.25)

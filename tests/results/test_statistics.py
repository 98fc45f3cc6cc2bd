"""results/statistics/ratio.py: small numbers by hand, and the promise, kept on simulated clocks."""

import numpy as np
import pytest
from scipy import stats

from sparsebench.results.statistics.outcome import Outcome, outcome
from sparsebench.results.statistics.ratio import (
    FEWEST,
    IntervalKind,
    hodges_lehmann,
    more_processes,
    p_value,
    q_values,
    ratio,
    ratio_over,
    student,
    welch,
)

EIGHT = np.arange(8.0)


def test_the_estimate_is_the_median_of_walsh_averages() -> None:
    estimate = hodges_lehmann([0, 1, 2, 3, 4, 100])
    assert estimate.estimate == 2.5  # 21 averages; the plain mean is 18.3
    assert (estimate.low, estimate.high) == (0, 100)  # of six processes 95 % needs the whole range


def test_the_interval_of_eight_ends_at_the_fourth_walsh_average_from_each_end() -> None:
    estimate = hodges_lehmann(EIGHT)  # 0, 0.5, 1, 1 ... 6, 6, 6.5, 7
    assert (estimate.estimate, estimate.low, estimate.high) == (3.5, 1, 6)


def test_one_outlier_among_eight_is_kept_and_moves_the_ratio_little() -> None:
    values = np.array([*EIGHT[:7], 1000.0])
    assert hodges_lehmann(values).estimate == pytest.approx(3.5, abs=0.5)
    assert student(values).estimate > 100


@pytest.mark.parametrize("count", [6, 7, 8, 12, 20])
def test_the_interval_excludes_1_exactly_where_the_signed_rank_test_rejects(count: int) -> None:
    for logs in np.random.default_rng(count).normal(0.8, 1, (200, count)):
        estimate = hodges_lehmann(logs)
        rejects = stats.wilcoxon(logs, method="exact").pvalue <= 0.05
        assert rejects == (estimate.low > 0 or estimate.high < 0)


def test_an_interval_has_four_outcomes() -> None:
    assert outcome(1.006, 1.2) is Outcome.FASTER
    assert outcome(1.001, 1.02) is Outcome.FASTER
    assert outcome(0.9, 0.995) is Outcome.SLOWER
    assert outcome(0.996, 1.004) is Outcome.EQUAL
    assert outcome(1.001, 1.009) is Outcome.EQUAL  # there, but less than 1 %
    assert outcome(0.996, 1.02) is Outcome.NOT_SETTLED
    assert outcome(0.96, 1.02, margin=0.05) is Outcome.EQUAL


def test_p_is_of_the_two_sided_t_test() -> None:
    expected = stats.ttest_1samp(EIGHT, 0).pvalue
    assert p_value(EIGHT) == pytest.approx(expected)
    assert p_value(-EIGHT) == pytest.approx(expected)


def test_q_is_p_times_lines_over_rank() -> None:
    assert list(q_values([0.01, 0.5, 0.03, 0.04])) == pytest.approx([0.04, 0.5, 0.16 / 3, 0.16 / 3])
    assert q_values([]).size == 0


def test_more_processes_are_asked_for_until_the_half_width_fits() -> None:
    logs = np.array([-1, -1, -1, -1, 1, 1, 1, 1]) * 0.01 + 0.006
    extra = more_processes(logs)
    assert extra is not None
    way, sd = 0.006, np.std(logs, ddof=1)  # nearer to the margin than to 1
    halves = [stats.t.ppf(0.975, n - 1) * sd / np.sqrt(n) for n in (8 + extra - 1, 8 + extra)]
    assert halves[1] < way
    assert extra == 1 or halves[0] >= way


def test_one_definition_of_a_ratio_serves_looks_and_verdicts() -> None:
    blocks = [np.array([0.0, 0.1, 0.5]), np.array([0.3]), np.array([0.2, 0.2])]  # 0.1, 0.3, 0.2
    look = ratio(blocks)
    assert np.log([look.value, look.low, look.high]) == pytest.approx([0.2, 0.1, 0.3])
    assert look.interval_kind is IntervalKind.RANGE
    alone = ratio(blocks[:1])
    assert np.log([alone.value, alone.low, alone.high]) == pytest.approx([0.1, 0.05, 0.3])
    assert alone.interval_kind is IntervalKind.QUARTILES
    eight = ratio([np.array([log]) for log in EIGHT])
    assert np.log([eight.value, eight.low, eight.high]) == pytest.approx([3.5, 1, 6])
    assert eight.interval_kind is IntervalKind.CONFIDENCE


def test_two_sides_differ_by_their_means_with_welchs_interval() -> None:
    difference, half = welch([0.0, 1.0, 2.0], [4.0, 4.5, 5.0, 5.5])
    exact = stats.ttest_ind([4.0, 4.5, 5.0, 5.5], [0.0, 1.0, 2.0], equal_var=False)
    assert difference == pytest.approx(3.75)
    assert half == pytest.approx(exact.confidence_interval().high - difference)
    assert welch([1.0, 1.0], [2.0, 2.0]) == (1.0, 0.0)
    assert np.isnan(welch([1.0], [2.0, 3.0])[1])


def test_a_ratio_is_paired_within_the_processes_that_both_ran_in() -> None:
    ours = {(p, 0): np.array([1.0]) for p in range(8)}
    over = {(p, 0): np.array([2.0 + p]) for p in range(3, 8)} | {(2, 1): np.array([99.0])}
    paired = ratio_over(ours, over)
    assert paired is not None
    assert (paired.low, paired.high) == pytest.approx((5, 9))
    assert ratio_over({(0, 0): np.array([1.0])}, {(1, 0): np.array([1.0])}) is None


def test_five_processes_have_no_interval() -> None:
    with pytest.raises(ValueError, match="expected 6 processes, found 5"):
        hodges_lehmann(np.zeros(FEWEST - 1))


def test_processes_that_agree_to_the_last_digit_still_have_a_p() -> None:
    assert p_value(np.zeros(8)) == 1
    assert p_value(np.full(8, np.log(2))) < 1e-9


def test_half_way_to_the_margin_is_hardest_to_decide() -> None:
    spread = np.tile([-0.01, 0.01], 4)
    most = more_processes(np.log1p(0.01) / 2 + spread)
    assert most is not None
    for mean in (0.0, 0.002, 0.008, 0.012):
        fewer = more_processes(mean + spread)
        assert fewer is not None
        assert fewer < most
    assert more_processes(np.log1p(0.01) / 2 + 10 * spread) is None

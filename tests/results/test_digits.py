"""results/digits.py: no digit that the measurement does not support."""

import math

import pytest

from sparsebench.results.digits import plus_minus, rounded


@pytest.mark.parametrize(
    ("value", "uncertainty", "written"),
    [
        (5.6234, 0.083, "5.62 ± 0.09"),
        (5.6234, 0.1, "5.6 ± 0.1"),
        (5.6234, 0.11, "5.6 ± 0.2"),  # rounded up: never narrower than it is
        (5.6234, 0.91, "6 ± 1"),
        (9.97, 0.1, "10.0 ± 0.1"),
        (0.9712, 0.0043, "0.971 ± 0.005"),
        (1.00042, 0.00002, "1.000 ± 0.001"),
        (187.3, 24.0, "190 ± 30"),
        (1.53, 0.4, "1.5 ± 0.4"),
    ],
)
def test_a_value_ends_where_its_uncertainty_does(
    value: float, uncertainty: float, written: str
) -> None:
    assert plus_minus(value, uncertainty) == written
    assert rounded(value, uncertainty) == written.partition(" ")[0]


def test_without_an_uncertainty_there_are_two_digits() -> None:
    for unknown in (math.nan, 0.0):
        assert plus_minus(5.6234, unknown) == rounded(5.6234, unknown) == "5.6"
        assert rounded(0.3456, unknown) == "0.35"
        assert rounded(1234.5, unknown) == "1234"


def test_no_value_is_a_dash() -> None:
    assert rounded(math.nan, 0.1) == plus_minus(math.nan, math.nan) == "–"

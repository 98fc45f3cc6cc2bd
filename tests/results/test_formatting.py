"""results/formatting.py: no digit that the measurement does not support; units and names."""

import math

import pytest

from sparsebench.results.formatting import (
    between,
    brackets,
    duration,
    number,
    percent,
    selection,
    significant,
    times,
)


@pytest.mark.parametrize(
    ("value", "uncertainty", "written"),
    [
        (5.6234, 0.083, "5.62"),
        (5.6234, 0.1, "5.6"),
        (5.6234, 0.11, "5.6"),  # rounded up: never narrower than it is
        (5.6234, 0.91, "6"),
        (9.97, 0.1, "10.0"),
        (0.9712, 0.0043, "0.971"),
        (1.00042, 0.00002, "1.000"),
        (187.3, 24.0, "190"),
        (1.53, 0.4, "1.5"),
        (0.051511, 0.0001, "0.052"),  # and not 0.0515, then 0.051
        (5.6234, math.nan, "5.6"),
        (0.3456, 0.0, "0.35"),
        (1234.5, math.nan, "1234"),
        (math.nan, 0.1, "–"),
    ],
)
def test_a_value_ends_where_its_uncertainty_does(value, uncertainty, written) -> None:
    assert number(value, uncertainty) == written


@pytest.mark.parametrize(
    ("value", "low", "high", "uncertainty", "written"),
    [
        (5.5812, 5.5401, 5.6042, math.nan, "5.58× [5.54, 5.60]"),
        (5.5812, 5.5401, 5.6042, 0.12, "5.6× [5.5, 5.6]"),
        (0.8001, 0.7984, 0.8016, math.nan, "0.800× [0.798, 0.802]"),
        (0.121, 0.117, 0.213, math.nan, "0.12× [0.12, 0.21]"),  # 0.1 would be outside
        (5.5812, math.nan, math.nan, math.nan, "5.6×"),
        (math.nan, math.nan, math.nan, math.nan, "–"),
    ],
)
def test_an_interval_ends_where_its_value_does(value, low, high, uncertainty, written) -> None:
    assert between(value, low, high, uncertainty) == written
    assert times(value, uncertainty).strip("×") == number(value, uncertainty)


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (duration, {52.04: "52.0 µs", 3700: "3.70 ms", 999.6: "1.00 ms", 1.2e6: "1.20 s"}),
        (percent, {0.9: "90 %", 0.875: "87.5 %", 0.998: "99.8 %", 0.0: "0 %"}),
        (significant, {0.0: "0", 0.00123: "0.00123", 1.5: "1.50", 9.996: "10.0", 52190: "52,190"}),
    ],
)
def test_quantities_have_three_digits_and_the_unit_that_people_use(written, values) -> None:
    assert {value: written(value) for value in values} == values


def test_a_selection_of_many_cases_is_written_as_their_number() -> None:
    assert selection("m=16|64 block=64") == "m=16|64 block=64"
    assert selection("case=a|b") == "case=a|b"
    assert selection("m=16 case=a|b|c|d") == "m=16 4 cases"
    assert selection("kernel=a|b|c|d m=16|32|64|128") == "4 kernels m=16|32|64|128"
    assert selection("") == ""


def test_brackets_name_each_kind_of_interval_once() -> None:
    over, quartiles = "95 % interval over {} processes", "quartiles of the rounds in one process"
    kinds = [over.format(8), over.format(6), over.format(10), quartiles, math.nan, ""]
    assert brackets(kinds) == f"brackets: {over.format('6 or 8 or 10')}, or {quartiles}"
    assert brackets([""]) == ""

"""The sentence that a survey begins with, and the intervals of its grid."""

import pandas as pd

from sparsebench.reports.survey import _finding, grid

LINE = {"name": "BSR", "op": "linear", "level": 0.9, "m": 16, "best_half": 0.01, "settled": False}


def test_a_format_without_a_time_is_named_with_its_dtype() -> None:
    """On a CPU, BSR runs in fp32, where its rows have the name of the fastest format."""
    lines = [{**LINE, "dtype": "bf16", "best_gain": float("nan")}]
    lines.append({**LINE, "name": "CSR", "dtype": "fp32", "best_gain": 1.2, "settled": True})
    finding = _finding(pd.DataFrame(lines))
    assert "No kernel runs here for BSR in bf16." in finding


def test_the_terminal_says_how_far_the_intervals_of_settled_cells_reach() -> None:
    held = "95 % interval over 6 processes, plus variation between runs"
    gains = [(2.0, 1.9, 2.04, True), (1.0, 0.5, 2.0, False)]  # only the first is settled
    columns = ["best_gain", "best_low", "best_high", "settled"]
    lines = [{**LINE, "dtype": "bf16", "interval": held} | dict(zip(columns, g, strict=True))
             for g in gains]  # fmt: skip
    title = grid(pd.DataFrame(lines)).title
    assert f"Intervals reach ±5.3\N{NO-BREAK SPACE}% at most ({held})" in title
    assert "Intervals" not in grid(pd.DataFrame(lines[1:])).title

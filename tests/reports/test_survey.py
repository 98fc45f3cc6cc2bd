"""The sentence that a survey begins with."""

import pandas as pd

from sparsebench.reports.survey import _finding

LINE = {"name": "BSR", "op": "linear", "level": 0.9, "m": 16, "best_half": 0.01, "settled": False}


def test_a_format_without_a_time_is_named_with_its_dtype() -> None:
    """On a CPU, BSR runs in fp32, where its rows have the name of the fastest format."""
    lines = [{**LINE, "dtype": "bf16", "best_gain": float("nan")}]
    lines.append({**LINE, "name": "CSR", "dtype": "fp32", "best_gain": 1.2, "settled": True})
    finding = _finding(pd.DataFrame(lines))
    assert "No kernel runs here for BSR in bf16." in finding

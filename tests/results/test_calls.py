"""Calls from Python beside their device time: which cases count, and what the sentence says."""

import pandas as pd

from sparsebench.results.tables.calls import sentence

COLUMNS = ["case_id", "name", "scope", "cache", "median_us"]


def test_the_shortest_call_of_each_kernel_has_both_times() -> None:
    lines = [
        ("a", "slow", "kernel", "cold", 6.0),
        ("a", "slow", "op", "cold", 50.0),
        ("b", "fast", "kernel", "cold", 9.0),
        ("b", "fast", "op", "cold", 12.5),
        ("c", "fast", "kernel", "cold", 30.0),  # a longer call, of which less is the host's
        ("c", "fast", "op", "cold", 30.1),
        ("d", "alone", "kernel", "cold", 1.0),  # never called from Python
    ]
    text = sentence(pd.DataFrame(lines, columns=COLUMNS))
    assert text.endswith("in brackets): fast 12.5 µs (9.00 µs), slow 50.0 µs (6.00 µs).")


def test_a_run_of_one_way_to_time_has_no_sentence() -> None:
    lines = [("a", "fast", "op", "cold", 12.5), ("a", "fast", "kernel", "hot", 9.0)]
    assert sentence(pd.DataFrame(lines, columns=COLUMNS)) == ""

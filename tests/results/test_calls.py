"""Calls from Python beside their device time: the problem that is shown, and the sentence."""

import pandas as pd

from sparsebench.results.tables.calls import sentence

COLUMNS = ["problem_id", "case_id", "name", "scope", "cache", "median_us"]
PROBLEM = {"op": "linear", "source": "", "m": 1, "format": "bsr", "level": 0.9}
Line = tuple[str, str, str, str, str, float]


def cases(lines: list[Line]) -> pd.DataFrame:
    table = pd.DataFrame(lines, columns=COLUMNS).assign(**PROBLEM)
    return table[[*PROBLEM, *COLUMNS]]  # `fields` are those between two columns


def test_the_problem_of_the_shortest_call_has_both_times_of_each_contender() -> None:
    lines = [
        ("p", "a", "slow", "kernel", "cold", 6.0),
        ("p", "a", "slow", "op", "cold", 50.0),
        ("p", "b", "fast", "kernel", "cold", 9.0),
        ("p", "b", "fast", "op", "cold", 12.5),
        ("p", "d", "never called", "kernel", "cold", 1.0),
        ("p", "a", "slow", "kernel", "hot", 5.0),  # a warm cache is not what users have
        ("p", "a", "slow", "op", "hot", 40.0),
        ("q", "c", "fast", "kernel", "cold", 30.0),  # another problem, whose calls are longer
        ("q", "c", "fast", "op", "cold", 11.0),
    ]
    text = sentence(cases(lines))
    assert text.endswith("brackets): fast 12.5 µs (9.00 µs), slow 50.0 µs (6.00 µs); m 1, 90 %.")


def test_a_run_of_one_way_to_time_has_no_sentence() -> None:
    lines = [("p", "a", "fast", "op", "cold", 12.5), ("p", "a", "fast", "kernel", "hot", 9.0)]
    assert sentence(cases(lines)) == ""

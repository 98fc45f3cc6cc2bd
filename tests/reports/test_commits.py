"""Runs over commits: what changed since a headline was first measured."""

from types import SimpleNamespace
from typing import Any

from sparsebench.reports.site.commits import chart, series


def version(commit: str, day: str, *gain: float, problem: str = "p", **other: Any) -> Any:
    """Return the card of a run whose headline is the faster of two sparse contenders."""
    ends = dict(zip(("zeros_gain", "zeros_low", "zeros_high"), gain, strict=True))
    half = {end: value / 2 for end, value in ends.items()}
    lines = [
        {"case_id": case, "problem_id": problem, "side": side, **values}
        for case, side, values in (("a", "ours", ends), ("b", "peer", half), ("c", "dense", ends))
    ]
    facts = {"name": "decode", "gpu": "NVIDIA H200", "commit": commit, "verdict": True, **other}
    facts |= {"slug": f"{facts['name']}-{commit}", "headline": {"case": "a"}}
    return SimpleNamespace(**facts, started=day, lines=lines)


BEFORE = version("1111111", "2026-11-24", 2.0, 1.98, 2.02)
AFTER = version("2222222", "2026-11-27", 3.0, 2.97, 3.03)
SAME = version("2222222", "2026-11-27", 2.01, 1.99, 2.03)


def test_a_run_has_a_point_for_each_version_as_a_ratio_to_the_first() -> None:
    (line,) = series([AFTER, BEFORE])
    assert [(card.commit, round(ratio, 3)) for card, ratio, *_ in line.points] == [
        ("1111111", 1.0),
        ("2222222", 1.5),
    ]
    assert line.has_changed
    assert line.name == "decode, H200"


def test_the_sentence_and_the_chart_name_the_runs_that_changed() -> None:
    other = version("2222222", "2026-11-27", 2.01, 1.99, 2.03, name="ffn")
    before = version("1111111", "2026-11-24", 2.0, 1.98, 2.02, name="ffn")
    every = series([AFTER, other, BEFORE, before])
    sentence, svg = chart(every)
    assert sentence == "1 of 2 headlines changed by more than 1 %: decode, H200 1.50× [1.48, 1.52]."
    assert ">decode, H200<" in svg
    assert ">ffn, H200<" not in svg
    assert ">1111111<" in svg


def test_a_look_shows_no_change() -> None:
    look = version("2222222", "2026-11-27", 3.0, 2.97, 3.03, verdict=False)
    (line,) = series([BEFORE, look])
    assert not line.has_changed
    assert chart([line])[0] == "0 of 1 headline changed by more than 1 %."


def test_a_run_without_versions_or_whose_problem_is_new_has_no_line() -> None:
    assert not series([SAME])
    other = version("1111111", "2026-11-24", 2.0, 1.98, 2.02, problem="q")
    assert not series([SAME, other])

"""Cliffs in the number of tokens: which cases count, and what the sentence says."""

import pandas as pd
import pytest

from sparsebench.results.tables.cliffs import COUNTS, ratios, sentence


def cases(times: list[float]) -> pd.DataFrame:
    names = "op", "source", "m", "block", "format", "level", "label"  # `fields` looks for two
    same = dict.fromkeys(names, "same")
    return pd.DataFrame([{**same, "m": m, "median_us": us} for m, us in enumerate(times, start=1)])


@pytest.mark.parametrize(("peak", "count"), [(10.0, 0), (10.4, 0), (12.0, 1)])
def test_a_cliff_takes_more_than_any_case_of_more_tokens(peak: float, count: int) -> None:
    table = cases([9.0] * (COUNTS - 3) + [peak, 10.0, 11.0])
    assert sentence(table).startswith(f"{count} of {COUNTS - 1} cases")
    line = ratios(table).set_index("m").loc[COUNTS - 2]
    assert line.ratio == pytest.approx(peak / 10.0)
    assert (line.least_us, line.more) == (10.0, COUNTS - 1)


def test_a_run_of_few_numbers_of_tokens_has_no_sentence() -> None:
    assert sentence(cases([9.0] * (COUNTS - 1))) == sentence(cases([])) == ""

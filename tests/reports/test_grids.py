"""How grids and findings are written: sentences, tables and cells, of a run and of a site."""

import re
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparsebench.reports import grids
from sparsebench.reports.site.grids import SiteGrid, beside, site_grids
from sparsebench.reports.survey import survey_grid
from sparsebench.results.tables.grid import Finding, findings, grid

OLD = {"run": "old", "verdict": False, "processes": 1, "day": "2026-11-21", "shape": "8 × 8"}
SLOW = {"run": "slow", "day": "2026-11-30"}


PLACES = count()


def lines(*gains: tuple[str, float], **same: Any) -> pd.DataFrame:
    """Return the lines of a contest, dense included: row and gain."""
    place = {
        "run": "r",
        "place": next(PLACES),
        "op": "linear",
        "dtype": "bf16",
        "m": 1,
        "level": 0.5,
    }
    place |= {"level": 0.5, "shape": "64 × 64", "decided": True, "cache": "cold", "median_us": 9.0}
    place |= {"on_cards": 1, "limited_processes": 0, "of_units": False, "dense_name": "cublas"}
    place |= {"pattern": "blocks", "gpu": "GPU", "wins": False, "dense_us": 10.0, "block": "64"}
    place |= {
        "over": "pruned",
        "case_id": "c",
        "processes": 8,
        "day": "2026-11-24",
        "verdict": True,
        **same,
    }
    place["problem_id"] = " ".join(str(place[name]) for name in ("op", "shape", "m", "level"))
    return pd.DataFrame(
        [
            {**place, "fields": {}, "kind": row, "row": row, "name": f"{row}_kernel", "gain": gain}
            | {"low": gain - 0.01, "high": gain + 0.01}
            | {"side": "dense" if row == "dense" else "ours"}
            for row, gain in [("dense", 1.0), *gains]
        ]
    )


def joined(*tables: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True)


def only(table: pd.DataFrame) -> SiteGrid:
    """Return the only grid of these lines."""
    (drawn,) = site_grids(table)
    return drawn


def shown(drawn: SiteGrid) -> dict[str, list[str]]:
    """Return the texts of each row's cells."""
    rows = drawn.grid.rows.items()
    return {row: [grids.cell_texts(cell)[0] for cell in cells.values()] for row, cells in rows}


def said(table: pd.DataFrame, x: str = "level") -> list[str]:
    return grids.sentences(findings(grid(table, x)))


def test_a_range_over_problems_has_the_outer_ends_of_its_intervals() -> None:
    tables = lines(("BSR", 0.892)), lines(("BSR", 1.5), shape="8 × 8")
    ((cell,),) = (row.values() for row in only(joined(*tables)).grid.rows.values())
    assert grids.cell_texts(cell) == ("0.89–1.50×", "[0.88, 1.51]")
    slow = joined(lines(("CSR", 0.0221)), lines(("CSR", 0.0224), shape="8 × 8"))
    slow = slow.assign(low=0.0219, high=0.0229)
    ((cell,),) = (row.values() for row in only(slow).grid.rows.values())
    assert grids.cell_texts(cell) == ("0.022×", "[0.022, 0.023]")


@pytest.mark.parametrize(
    ("tables", "cells"),
    [
        ([lines(("2:4", 1.4), ("int4", 3.5))], {"2:4": ["1.40×"]}),  # not quantised
        (  # the largest gain comes first
            [lines(("CSR", 0.23), ("BSR", 3.17), ("2:4", 1.4))],
            {"BSR": ["3.17×"], "2:4": ["1.40×"], "CSR": ["0.23×"]},
        ),
        (  # a verdict replaces a look of the same row only
            [lines(("BSR", 2.16)), lines(("BSR", 3.0), ("CSR", 3.15), **OLD)],
            {"CSR": ["3.15×"], "BSR": ["2.16×"]},
        ),
        (  # a run with few contenders does not stand for its format
            [lines(("BSR", 0.13), **SLOW), lines(("BSR", 3.0), ("BSR", 2.0))],
            {"BSR": ["3.00×"]},
        ),
        (  # nor does one without the kernel that is fastest in another
            [
                lines(("BSR", 2.0), ("CSR", 0.5)).assign(name="slower"),
                lines(("BSR", 3.0), run="alone", median_us=6.0).assign(name="faster"),
            ],
            {"BSR": ["3.00×"], "CSR": ["0.50×"]},
        ),
    ],
)
def test_cells_of_a_grid_of_a_site(tables: list[pd.DataFrame], cells: dict[str, list[str]]) -> None:
    assert [*shown(only(joined(*tables))).items()] == [*cells.items()]


def test_each_shape_has_a_grid_after_that_of_every_shape() -> None:
    two = joined(lines(("BSR", 2.0)), lines(("BSR", 3.0), shape="8 × 8"), lines(("CSR", 4.0), m=16))
    grids = [(each.tokens, each.shape) for each in site_grids(two, each_shape=True)]
    assert grids == [(1, "all"), (1, "64 × 64"), (1, "8 × 8"), (16, "all")]
    small = site_grids(two, each_shape=True)[2]
    assert shown(small) == {"BSR": ["3.00×"]}
    assert [each.shape for each in site_grids(two)] == ["all", "all"]


def test_a_cell_of_a_site_names_its_kernel_in_its_text() -> None:
    html = only(lines(("BSR", 2.0))).html("")
    (text,) = re.findall('<a class="cell.*?>(.*?)</a>', html)
    assert "BSR_<wbr>kernel" in text


def test_findings_are_sentences_by_outcome_with_their_columns_and_largest_gain() -> None:
    table = joined(
        lines(("blocks of 16", 0.75), ("blocks of 32", 1.2), ("2:4", 1.5), ("CSR", 0.1)),
        lines(("blocks of 16", 1.5), ("blocks of 32", 1.9), ("CSR", 0.2), level=0.8),
        lines(("blocks of 64", 2.0), level=0.8),
    )
    assert said(table) == [
        "Faster than dense: blocks of 16 and 64 at 80 % sparsity, up to 2.00× [1.99, 2.01]; "
        "blocks of 32 from 50 % to 80 % sparsity, up to 1.90× [1.89, 1.91]; "
        "2:4 at 50 % sparsity, up to 1.50× [1.49, 1.51].",
        "Slower: CSR.",
    ]


def test_rows_with_the_same_columns_are_named_together() -> None:
    table = lines(("blocks of 64", 2.0), ("blocks of 128", 3.0), ("2:4", 1.5))
    (sentence,) = said(table)
    assert sentence.startswith("Faster than dense: blocks of 64 and 128 and 2:4 at 50 % sparsity")


def test_an_open_row_is_not_settled_and_a_mixed_one_is_faster_for_some_problems() -> None:
    near = lines(("bitmap", 1.0)).assign(decided=False)
    near["low"] = 0.9
    mixed = [lines(("BSR", gain)) for gain in (0.7, 1.5)]
    assert said(joined(near, *mixed)) == [
        "Faster than dense: BSR for some problems, up to 1.50× [1.49, 1.51].",
        "Not settled: bitmap.",
    ]
    assert grids.sentences(list[Finding]()) == [grids.NOTHING]


def test_a_table_marks_what_is_not_settled() -> None:
    table = joined(lines(("BSR", 3.0)), lines(("BSR", 1.0), level=0.9).assign(decided=False))
    drawn = grids.table(grid(table, "level"))
    assert drawn.columns == ["format", "50 %", "90 %"]
    assert drawn.lines == [["BSR", ("3.00× ", "good"), ("1.00×?", "unsure")]]


def test_a_cell_of_html_has_its_interval_its_link_and_its_problems() -> None:
    drawn = grids.html(grid(lines(("BSR", 3.0)), "level"), lambda case: f"#{case['case_id']}", "")
    (title,) = re.findall('title="([^"]*)"', drawn)
    assert title == (
        "BSR at 50 %: n × k 64 × 64: BSR_kernel, 3.00× [2.99, 3.01], 9.00 µs, 8 processes, "
        "one card, not limited by power or heat, 2026-11-24"
    )
    assert 'href="#c"' in drawn
    assert "[2.99, 3.01]" in drawn.partition("<td")[2]
    assert "undecided" not in drawn


def test_dense_attention_multiplies_no_zeros() -> None:
    mask = lines(("mask", 6.0), op="attention").replace({"kind": {"mask": "block_mask"}})
    assert grids.against(mask) == "over dense (cublas, 10.0 µs)"


def test_models_and_attention_have_findings_beside_the_grids() -> None:
    step = {"op": "decoder", "shape": "Qwen3-8B", "run": "steps"}
    mask = {"op": "attention", "shape": "", "dtype": "fp16", "m": 8192, "level": 0.9, "run": "mask"}
    both = joined(lines(("BSR", 1.9), **step), lines(("mask", 6.0), **mask))
    newer = joined(both, lines(("mask", 2.0), **{**mask, "processes": 3, "run": "newer"}))
    for table in (both, newer):
        model, attention = beside(table)["GPU"]
        assert model[0::2] == ("Model, decoding", "steps")
        assert attention[0::2] == ("Attention, blocks given", "mask")
        assert "up to 6.00× [5.99, 6.01]" in attention[1]


def test_of_the_runs_of_a_model_the_one_that_another_gpu_has_too_stands_beside_the_grids() -> None:
    step = {"op": "decoder", "shape": "Qwen3-8B"}
    shared = [lines(("BSR", 1.9), **step, run="a", m=m) for m in (1, 16)]
    more = [lines(("2:4", 1.2), **step, run="b", m=m, processes=9) for m in (2, 3, 4)]
    alone = joined(*shared, *more)
    assert [run for *_, run in beside(alone)["GPU"]] == ["b"]
    both = joined(alone, *(each.assign(gpu="another", run="c") for each in shared))
    assert [run for *_, run in beside(both)["GPU"]] == ["a"]
    assert [run for *_, run in beside(both)["another"]] == ["c"]


def survey_lines(*gains: tuple[float, bool]) -> pd.DataFrame:
    held = "95 % interval over 6 processes, plus variation between runs"
    tables = [lines(("BSR", gain)).assign(decided=sure) for gain, sure in gains]
    table = joined(*tables).assign(format_name="BSR", row="BSR, 50 %", gain_interval=held)
    table.loc[~table.decided, ["low", "high"]] = np.nan
    return table[table.side != "dense"]


def test_a_settled_problem_comes_before_a_look_with_a_larger_gain() -> None:
    drawn = survey_grid(survey_lines((2.0, True), (3.0, False)))
    assert [case["gain"] for case in drawn.cases] == [2.0]

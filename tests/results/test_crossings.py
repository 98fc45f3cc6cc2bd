"""Lengths from which on selecting keys is faster: from rows to attention.json and a page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsebench.errors import ResultError
from sparsebench.reports import crossings as presented
from sparsebench.reports.site import attention
from sparsebench.reports.site.pages import Site
from sparsebench.results.advice.crossings import (
    FILE,
    AttentionEvidence,
    SelectionCurve,
    crossing,
    packaged_attention,
)
from sparsebench.results.files import read_model
from sparsebench.results.model_shapes import read_shapes
from tests.results.selection_examples import (
    GAINS,
    NOISE,
    Gains,
    curves,
    evidence,
    rows,
    selected,
)
from tests.tools.command_line import output, refusal
from tests.tools.paths import PUBLISHED


def test_a_curve_crosses_between_two_measured_lengths() -> None:
    (curve,) = curves(*rows(GAINS, selected("pooled")))
    about = curve.phase, curve.method, curve.contender, curve.share, curve.keys, curve.block
    assert about == ("prompt", "pooled", "attention_selected", 0.1, None, (64, 64))
    assert curve.faster_from == pytest.approx(4096 * 2 ** (np.log(1.25) / np.log(2)), abs=2)
    assert 4096 < curve.maybe_from < curve.faster_from < curve.surely_from < 8192
    assert [(p.tokens, p.dense, p.processes) for p in curve.points] == [
        (length, "fa3", 6) for length in GAINS
    ]
    assert curve.points[0].gain == pytest.approx(0.5, rel=0.01)
    at = {p.tokens: p.gain for p in curve.points}
    band = [np.interp(np.log(end), *np.log([[*at], [*at.values()]])) for end in curve_ends(curve)]
    half = max(NOISE)  # of six processes, all of them; and the noise floor
    assert band == pytest.approx([-half, 0, half], abs=0.01)
    assert -band[0] > half < band[2]


def curve_ends(curve: SelectionCurve) -> list[int]:
    return [curve.maybe_from or 0, curve.faster_from or 0, curve.surely_from or 0]


@pytest.mark.parametrize(
    ("gains", "ends", "texts"),
    [
        ({2048: 1.5, 8192: 3.0}, [2048] * 3, ("≤ 2,048", "already at the shortest length")),
        ({2048: 0.2, 8192: 0.9}, [0] * 3, ("> 8,192", "not faster up to 8,192 tokens")),
        ({8192: 1.5}, [8192] * 3, ("≤ 8,192", "at 8,192 tokens (")),
        ({2048: 1.5, 4096: 0.5, 8192: 2.0}, None, ("5,790", "faster from 5,790 tokens on")),
    ],
)
def test_nothing_is_extrapolated(gains: Gains, ends: Any, texts: tuple[str, str]) -> None:
    (curve,) = curves(*rows(gains, selected("pooled")))
    assert ends is None or curve_ends(curve) == ends
    assert presented.table("", [curve]).lines[0][3][0] == texts[0]
    assert texts[1] in presented.finding([curve])


def test_a_finding_names_what_is_a_look() -> None:
    for gains in (GAINS, {4096: 1.9, 16384: 6.0}):
        every = rows(gains, selected("pooled"))
        assert "a look" not in presented.finding(curves(*every))
        assert "a look)" in presented.finding(curves(*(r for r in every if not r.replicate)))


def test_an_end_of_the_interval_may_lie_beyond_the_lengths() -> None:
    (curve,) = curves(*rows({2048: 0.99, 8192: 1.01}, selected("pooled")))
    assert curve.maybe_from == 2048
    assert curve.surely_from is None
    assert 2048 < (curve.faster_from or 0) < 8192
    assert presented.table("", [curve]).lines[0][4] == "≤ 2,048 to > 8,192"


def test_unknown_ends_hold_every_length() -> None:
    values = [(2048, 0.0 + 1e-12), (8192, 1e-12)]
    assert crossing(values) is None
    assert crossing([(2048, float("inf")), (8192, float("inf"))]) == 2048
    assert crossing([(2048, 0.5), (8192, float("inf"))]) == 2048


def test_a_curve_keeps_a_share_or_a_number_of_keys() -> None:
    levels = {"sparsity": {8192: 0.75, 32768: 0.9375, 65536: 0.9375}}
    gains = {8192: 0.9, 32768: 2.0, 65536: 3.0}
    found = curves(*rows(gains, selected("means", "attention_decode"), **levels))
    kept = [(c.phase, c.sequences, c.share, c.keys, len(c.points)) for c in found]
    assert kept == [("decode", 16, 0.0625, None, 2), ("decode", 16, None, 2048, 2)]
    of_one_length = curves(*rows({8192: 2.0}, selected("means", "attention_decode"), **levels))
    assert [(c.share, c.keys) for c in of_one_length] == [(None, 2048)]


def test_rows_of_causal_prompts_keep_equally_many_blocks() -> None:
    blocks = {length: length // 64 for length in (4096, 16384)}
    shares = {n: sum(min(16, row + 1) for row in range(b)) / (b * (b + 1) / 2)
              for n, b in blocks.items()}  # fmt: skip
    levels = {"sparsity": {n: round(1 - share, 4) for n, share in shares.items()}}
    (curve,) = curves(*rows({4096: 0.5, 16384: 2}, selected("nsa"), **levels))
    assert (curve.share, curve.keys) == (None, 1024)


def test_a_file_and_a_page_hold_what_was_computed(tmp_path: Path) -> None:
    shown = evidence()
    (tmp_path / FILE).write_text(shown.text)
    again = read_model(tmp_path / FILE, AttentionEvidence, shown.schema)
    assert again.text == shown.text
    page, file = (text for _, text in attention.pages(Site(), shown))
    assert file == shown.text
    assert "faster from 5,120 tokens on" in page
    assert "attention-decode-select --replicates 6" in page
    assert "sparsebench run attention-select" not in page
    assert "+0.250" in page
    assert "2.00×" in page
    text = presented.markdown(shown.curves, shown)
    assert "| pooled top-k |" in text
    assert "attention-decode-select" in text


def test_without_rows_a_line_says_what_measures_them() -> None:
    empty = AttentionEvidence([])
    (_, page), _ = attention.pages(Site(), empty)
    for suite in ("attention-select", "attention-decode-select"):
        assert f"sparsebench run {suite} --replicates 6 --out runs/{suite}" in page
    assert presented.select_curves(empty, "H200", read_shapes("Llama-3-8B")) == []
    for wrong in ("H2000", " "):
        with pytest.raises(ResultError, match="--gpu: expected"):
            presented.select_curves(empty, wrong)


def test_curves_are_chosen_by_gpu_and_heads() -> None:
    shown = evidence()
    assert presented.select_curves(shown, "H200", read_shapes("Llama-3-8B")) == shown.curves
    with pytest.raises(ResultError, match=r"--gpu: expected .*NVIDIA H200; found 'B200'"):
        presented.select_curves(shown, "B200")
    with pytest.raises(ResultError, match="expected heads that were measured: 32/8 heads of 128"):
        presented.select_curves(shown, None, read_shapes("Gemma-3-270m"))


def test_the_command_prints_the_published_curves() -> None:
    packaged = packaged_attention()
    written = json.loads(output("advise", "--attention", "--json"))
    assert len(written["curves"]) == len(packaged.curves)
    shown = output("advise", "--attention")
    assert all(line in shown for line in presented.missing(packaged.curves))
    assert "--batch" in refusal("advise", "--attention", "--batch", "8")
    assert "--gpu, --batch" in refusal("advise", "Llama-3-8B")
    assert "a run on a GPU with kernels that select" in refusal(
        "advise", "--attention", "--run", PUBLISHED / "nvidia-h200/attention"
    )


def test_lengths_that_are_all_the_shortest_one_have_no_chart() -> None:
    always = curves(*rows({4096: 1.9, 16384: 6.0}, selected("pooled")))
    sometimes = curves(*rows(GAINS, selected("pooled")))
    pages = [
        next(attention.pages(Site(), AttentionEvidence(each, [])))[1]
        for each in (always, sometimes)
    ]
    assert ["<figure" in page for page in pages] == [False, True]
    assert ["<details open>" in page for page in pages] == [True, False]
    assert "the shortest length measured: with pooled top-k 1.9" in presented.finding(always)


def test_a_chart_has_the_curves_that_cross_between_measured_lengths() -> None:
    always = curves(*rows({4096: 1.9, 16384: 6.0}, selected("pooled")))
    later = curves(*rows(GAINS, selected("nsa")))
    never = curves(*rows({4096: 0.5, 16384: 0.6}, selected("moba")))
    drawn = attention.chart([*always, *later, *never])
    assert ["NSA" in drawn, "MoBA" in drawn, "pooled" in drawn] == [True, True, False]
    assert drawn.count("<title>") == 1


def test_a_page_shows_the_group_of_the_most_curves_and_chooses_among_the_others() -> None:
    few = curves(*rows(GAINS, selected("nsa"), heads=64))
    many = [c for kind in ("pooled", "moba") for c in curves(*rows(GAINS, selected(kind)))]
    (_, page), _ = attention.pages(Site(), AttentionEvidence([*few, *many], []))
    assert page.count('<select name="heads"') == 1
    assert '<select name="phase"' not in page  # all are prompts
    first, second = page.split('<section class="view')[1:]
    assert "32/8 heads of 128" in first
    assert "64/8 heads of 128" in second
    assert " hidden>" in second.partition("\n")[0]

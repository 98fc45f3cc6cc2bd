"""The answer of a run on a terminal, as Markdown and as JSON."""

import re
import shutil
from dataclasses import replace
from html import unescape
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sparsebench.errors import LeftOut
from sparsebench.reports.findings import contender_name, general, headlines
from sparsebench.reports.published_answer import PublishedAnswer
from sparsebench.reports.tables import Table
from sparsebench.reports.terminal import RunAnswer, answer_json, answer_markdown, count_statuses
from sparsebench.results.record import UNPRUNED, Case, Contender, Problem, Row, Status
from sparsebench.results.run.store import StoredRun, read
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.families import by_default
from tests.results.made_up import BSR, DENSE, TWIN, WOBBLE, stored
from tests.tools.paths import PUBLISHED
from tests.tools.reports import printed, report_of


def run(processes: int, bsr_us: float, noise: float = 1, **state: Any) -> StoredRun:
    """Return a run of one problem with an A/A pair whose halves differ only by noise."""
    fields = {"m": 1, "n": 64, "k": 64, "dtype": "bf16", "pattern": "blocks", "sparsity": 0.9}
    problem = Problem("linear", {**fields, "block": 16})
    rows = [
        Row(Case(problem, c), Status.OK, p, bound_by="memory", samples_us=(us * np.exp(d),))
        for p, d in enumerate(WOBBLE[:processes])
        for c, us, d in [(DENSE, 100, 0), (TWIN, 100, d), (BSR, bsr_us, noise * d)]
    ]
    return stored(rows, **state)


def lines(shown: StoredRun, width: int = 160) -> list[str]:
    return [line.rstrip() for line in printed(RunAnswer(analyse(shown)), width).splitlines()]


def text_of(shown: StoredRun, width: int = 160) -> str:
    return " ".join(" ".join(lines(shown, width)).split())


@pytest.mark.parametrize(("failing", "name"), [(TWIN, "cublas (twin)"), (BSR, "bsr_triton")])
def test_failures_are_counted_and_named_with_their_reason(failing: Contender, name: str) -> None:
    failed = {"status": Status.FAILED, "samples_us": (), "detail": "illegal address"}
    whole = run(3, 50.0)
    rows = [replace(r, **failed) if r.case.contender == failing else r for r in whole.rows]
    broken = replace(whole, rows=rows)
    assert count_statuses(analyse(broken))["failed"] == 1
    assert f"illegal address: {name}" in text_of(broken)


def test_the_answer_is_a_sentence() -> None:
    text = text_of(run(3, 50.0))
    assert text.count("--replicates 8") == 1
    assert "[LOOK: 3 processes]" in text
    assert "above 1 / (1 - sparsity)" not in text
    assert "1 speedup is above 1 / (1 - sparsity)" in text_of(run(3, 5.0))
    assert "2.00× [2.00, 2.00] as fast as cublas (100 µs): bsr_triton 50.1 µs" in text
    assert "linear, bf16, m 1, 64 × 64, 90 %, 16 × 16 blocks" in text


def test_a_kernel_from_outside_stands_beside_all_its_rivals() -> None:
    """Two kernels of one format: a grid shows the faster one alone."""
    rival = replace(BSR, kernel="acme.fast")
    whole = run(8, 50.0)
    more = [
        replace(row, case=Case(row.case.problem, rival), samples_us=(row.samples_us[0] * 1.3,))
        for row in whole.rows
        if row.case.contender == BSR
    ]
    both = replace(whole, rows=[*whole.rows, *more])
    assert "beside its rivals" not in text_of(both)  # a kernel that the package had once
    outside = replace(both, environment={"plugins": {"acme": {}}})
    shown = lines(outside)
    start = next(i for i, line in enumerate(shown) if "acme.fast beside its rivals" in line)
    names = [line.split()[0] for line in shown[start + 2 : start + 5]]
    assert names == ["bsr_triton", "acme.fast", "cublas"]
    assert "1.54" in shown[start + 3]
    assert "acme.fast" in answer_markdown(analyse(outside))
    assert "beside its rivals" in report_of(outside)


def test_the_answer_is_for_each_dtype() -> None:
    half, full = run(8, 125.0), run(8, 50.0)
    rows = [
        replace(r, case=Case(replace(r.case.problem, fields=fields), r.case.contender))
        for r in full.rows
        for fields in [{**r.case.problem.fields, "dtype": "fp32"}]
    ]
    both = replace(half, rows=[*half.rows, *rows])
    text = text_of(both)
    assert "bf16: Slower: blocks of 16." in text
    assert "fp32: Faster than dense: blocks of 16 at 90 % sparsity, up to 2.00×" in text
    slower, faster = headlines(analyse(both))
    assert (slower.outcome, faster.outcome) == ("slower", "faster")
    assert all(finding.group in text for finding in (slower, faster))


def test_the_winner_has_its_lead_over_the_next_kernel() -> None:
    other = Contender("bsr", "torch_bsr", options={"tuned": True})
    result = run(8, 50.0)
    more = [
        replace(r, case=Case(r.case.problem, other)) for r in result.rows if r.case.contender == BSR
    ]
    factors = 1.12 * np.exp(3 * np.array(WOBBLE))
    slower = [replace(r, samples_us=(factors[r.replicate] * r.samples_us[0],)) for r in more]
    text = text_of(replace(result, rows=[*result.rows, *slower]))
    assert "1.12× [1.11, 1.13] as fast as torch_bsr tuned=True" in text


def test_the_answer_says_what_users_get_if_another_kernel_is_the_fastest() -> None:
    result = run(8, 50.0)
    bsr = [r for r in result.rows if r.case.contender == BSR]

    def others(contender: Contender, factor: float, **choice: Any) -> list[Row]:
        return [
            replace(
                r,
                case=Case(r.case.problem, contender),
                samples_us=tuple(factor * us for us in r.samples_us),
                choice=choice,
            )
            for r in bsr
        ]

    second, users = others(Contender("bsr", "bsr_small"), 1.1), Contender("bsr", "default")
    for factor, kernel, expected in (
        (1.2, "bsr_wgmma", "1.10× as fast as bsr_small; users get bsr_wgmma (by default), 60"),
        (0.9, "bsr_wgmma", "as fast as cublas (100 µs): bsr_wgmma (by default) 45"),
        # The winner is no rival of itself.
        (1.01, "bsr_triton", "1.10× as fast as bsr_small; users get bsr_triton by default (50.5"),
        (0.99, "bsr_triton", "1.10× as fast as bsr_small; users get bsr_triton by default (49.5"),
    ):
        default = others(users, factor, kernel=kernel)
        text = text_of(replace(result, rows=[*result.rows, *second, *default]))
        assert expected in text
        sentences, _, _ = text.partition("brackets: ")
        assert "bsr_triton (by default)" not in sentences


@pytest.mark.parametrize(
    ("name", "chosen", "shown"),
    [
        ("ffn_dense_triton", "dense, ffn_dense_triton", "ffn_dense_triton (by ffn_sparse)"),
        ("ffn_sparse way=best", "cvse, ffn_few", "ffn_sparse way=best"),
    ],
)
def test_a_portfolio_has_its_own_name_unless_it_chose_dense(name, chosen, shown) -> None:
    case = {"name": name, "kernel": "ffn_sparse", "chosen": chosen}
    assert contender_name(case) == shown


def test_a_kernel_that_runs_dense_weights_too_has_the_format_beside_its_name() -> None:
    name = "serving_transformers"
    case = {"name": name, "dense_name": name, "kernel": name, "chosen": name, "side": "ours"}
    case |= {"kind": "spense", "tile": "", "block": "64", "pattern": "two_four_blocks"}
    case |= {"label": f"spense/{name}"}
    assert contender_name(case) == "serving_transformers (2:4)"
    half = case | {"label": f"spense/{name} dense_fraction=0.5 split=rows"}
    assert contender_name(half) == "serving_transformers (half 2:4)"
    assert contender_name(case | {"side": "dense"}) == name
    assert contender_name(case | {"dense_name": name + UNPRUNED}) == f"{name} (2:4)"


def test_a_finding_of_one_of_several_views_names_it() -> None:
    result = run(8, 50.0)
    few, many = (
        [
            replace(r, case=Case(Problem("linear", fields), r.case.contender))
            for r in result.rows
            for level in (0.8, 0.9)
            for fields in [{**r.case.problem.fields, "m": m, "sparsity": level}]
        ]
        for m in (1, 4096)
    )
    (alone,), (first,) = (
        general(analyse(replace(result, rows=rows))) for rows in (few, few + many)
    )
    assert first == f"m 1: {alone}"


def test_a_layer_is_named_by_the_kernels_of_all_its_products() -> None:
    gate, up = {"kernel": "bsr_wgmma"}, {"kernel": "bsr_small"}
    assert by_default("bsr", {"wg": gate, "wu": up, "wd": gate}) == (
        "bsr_wgmma + bsr_small (by default)"
    )
    assert by_default("bsr", {}) == "BSR (by default)"


def test_lines_below_a_winner_keep_their_indentation_when_they_wrap() -> None:
    shown = lines(run(8, 50.0), width=40)
    winner = next(i for i, line in enumerate(shown) if "as fast as cublas" in line)
    below = list(takewhile(bool, shown[winner:]))
    first = next(i for i, line in enumerate(below) if line.startswith("  "))
    assert len(below[first:]) > 1
    assert all(line.startswith("  ") for line in below[first:])


BRACKETS = re.compile(r"\[[\d.]+, [\d.]+\]")
HELD = {1: "quartiles of the rounds in one process", 3: "range over 3 processes"}
HELD |= {8: "95 % interval over 8 processes"}


def with_rounds(shown: StoredRun) -> StoredRun:
    """Return a run whose samples differ from round to round, so that one process has quartiles."""
    rows = [replace(r, samples_us=tuple(f * r.samples_us[0] for f in ROUNDS)) for r in shown.rows]
    return replace(shown, rows=[replace(r, samples_per_block=1) for r in rows])


ROUNDS = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.03, 0.97)


@pytest.mark.parametrize("processes", HELD)
def test_whatever_has_brackets_says_what_they_hold_in_this_run(processes: int) -> None:
    shown = with_rounds(run(processes, 50.0))
    bsr = [r for r in shown.rows if r.case.contender == BSR]
    users = [replace(r, case=Case(r.case.problem, Contender("bsr", "default"))) for r in bsr]
    rows = [replace(r, samples_us=r.samples_us[::-1]) for r in users]
    shown = replace(shown, rows=[*shown.rows, *rows])
    (heading,) = (line for line in lines(shown) if "; brackets: " in line)
    assert f"; brackets: {HELD[processes]}" in heading
    assert f"brackets: {HELD[processes]}" in answer_markdown(analyse(shown))
    parts = re.split(r"(?=<header|<section id=)", unescape(report_of(shown)))
    bracketed = [part for part in parts if BRACKETS.search(part)]
    assert len(bracketed) >= 3
    assert all(HELD[processes] in part for part in bracketed)
    wrong = {text for count, text in HELD.items() if count != processes}
    assert not [text for text in wrong if any(text in part for part in parts)]


CEILINGS = {"read_gb_per_s": 4e3, "copy_gb_per_s": 4e3, "matrix_tflops": {"bf16": 8e2}}
CEILINGS |= {"launch_us": 4.5, "l2_bytes": 0}


@pytest.mark.parametrize(("scale", "chained"), [(0.1, True), (1.0, False)])
def test_the_headline_of_a_short_call_is_its_time_inside_a_chain(scale, chained) -> None:
    """Isolated, dense takes 10 and BSR 5 µs (or ten times that); inside a chain 8 and 2 µs."""
    result = replace(run(8, 50.0), environment={"ceilings": CEILINGS})
    us = {("kernel", "cublas"): 100, ("kernel", "bsr_triton"): 50}
    us |= {("chain", "cublas"): 80, ("chain", "bsr_triton"): 20}
    rows = [
        replace(
            row,
            scope=scope,
            clock="graph",
            late=0.0,
            samples_us=(scale * us[scope, row.case.contender.kernel],),
        )
        for scope in ("kernel", "chain")
        for row in result.rows
    ]
    result = replace(result, rows=rows)
    (finding,) = headlines(analyse(result))
    assert (finding.best["scope"] == "chain") is chained
    text, page = text_of(result), report_of(result)
    for shown in (text, page):
        assert ("bsr_triton 2.00 µs" in shown) is chained
        assert ("isolated 5.00 µs, 2.00×" in shown) is chained
    assert ("An empty launch takes 4.50 µs" in text) is chained
    assert ("An empty launch takes 4.50 µs" in page) is chained


def test_page_and_terminal_print_the_same_findings() -> None:
    result = run(8, 50.0)
    page, text = report_of(result), text_of(result)
    for finding in general(analyse(result)):
        assert finding in text
        assert finding.partition(": ")[2] in page


@pytest.mark.parametrize(
    ("bsr_us", "noise", "outcome"),
    [(50.0, 1, "Faster than dense"), (99.4, 5, "Not settled"), (99.9, 1, "Equal to dense")],
)
def test_a_verdict_has_an_outcome(bsr_us: float, noise: float, outcome: str) -> None:
    text = text_of(run(8, bsr_us, noise))
    assert "VERDICT: 8 processes" in text
    assert outcome in text
    assert "Noise floor of one process: 0.5 % (above 100 µs)" in text
    assert "This run is reliable: 0 of 1 A/A pairs" in text
    assert "a look" not in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_lines_fit_the_window_and_the_winner_is_whole(width: int) -> None:
    best = Contender("bsr", "bsr_triton", options={"tuned": True, "way": "a_long_one"})
    problem_rows = run(8, 50.0).rows
    rows = [
        replace(r, case=replace(r.case, contender=best)) if r.case.contender == BSR else r
        for r in problem_rows
    ]
    long = replace(run(8, 50.0), rows=rows)
    assert max(map(len, lines(long, width))) <= width
    assert "bsr_triton tuned=True way=a_long_one" in text_of(long, width)


def test_a_busy_machine_has_a_badge() -> None:
    finding = {"check": "other work on the host", "level": "warning", "found": "1.8 of 2 cores"}
    busy = run(3, 50.0, fitness={"before": [finding], "during": []})
    text = text_of(busy)
    assert "[BUSY MACHINE]" in text
    assert "before the run: 1.8 of 2 cores" in text


def test_the_json_holds_the_same_answer() -> None:
    result = run(8, 50.0)
    answer = answer_json(analyse(result))
    assert answer["noise_floor"] == {"above 100 µs": 0.005}
    assert answer["reliability"] == "reliable"
    assert answer["badges"] == ["VERDICT: 8 processes"]
    (found,) = answer["answer"][0]["findings"]
    assert (found["contender"], found["outcome"]) == ("blocks of 16", "faster")
    assert [each["contender"] for each in answer["headlines"]] == ["bsr_triton"]


def test_markdown_has_the_grid_for_pasting() -> None:
    text = answer_markdown(analyse(run(8, 50.0)))
    assert "| format | 90 % |" in text
    assert "| blocks of 16 | 2.00×  |" in text or "| blocks of 16 | 2.00× |" in text


EVIL = "<script> [x](javascript:a) [1[2]](a) {{ a }} `a` | *a* _a_ ~~a~~ &lt; http://a $a$"
RAW = re.compile(r"(?<!\\)(<script|\[x\]|\[1\[|\{|\}|`|\*a\*|~|&lt;|://|\$|\b_a_)")


@pytest.mark.parametrize("place", ["title", "suite", "device", "reason", "kernel"])
def test_no_text_of_a_run_is_markup_in_markdown(place: str) -> None:
    of = run(8, 50.0)
    renamed = replace(BSR, kernel=EVIL)
    case = replace(of.rows[-1].case, contender=renamed if place == "kernel" else BSR)
    facts: dict[str, Any] = {"case": case}
    if place == "reason":
        facts |= {"status": Status.FAILED, "samples_us": (), "detail": EVIL}
    changed: dict[str, dict[str, Any]] = {
        "title": {"suite": {"title": EVIL}},
        "suite": {"state": {**of.state, "suite": EVIL}},
        "device": {"environment": {"gpu": {"name": EVIL}}},
    }
    rows = [replace(r, **facts) if r.case.contender == BSR else r for r in of.rows]
    text = answer_markdown(analyse(replace(of, rows=rows, **changed.get(place, {}))))
    assert "javascript" in text
    assert not RAW.search(text)


def test_an_outcome_has_a_colour_only_on_a_colour_terminal() -> None:
    for system in ("standard", None):
        colours = {"color_system": system, "no_color": system is None}
        text = printed(RunAnswer(analyse(run(8, 50.0))), 80, **colours)
        assert ("\x1b[32m" in text) == (system is not None)


def test_a_machine_without_a_gpu_sees_the_published_answer_marked() -> None:
    here = read(PUBLISHED / "cpu" / "quick-cpu")
    first, *rest = printed(PublishedAnswer(here, PUBLISHED), 120).strip().splitlines()
    assert first.startswith("NOT MEASURED HERE")
    assert "nvidia-h200/quick" in first
    assert any("bsr_wgmma" in line for line in rest)
    fp32 = [row for row in here.rows if row.case.problem.fields["dtype"] == "fp32"]
    without = printed(PublishedAnswer(replace(here, rows=fp32), PUBLISHED), 120)
    assert "NOT MEASURED HERE" not in without  # the GPU has rows of these problems, and no time


def test_a_broken_published_run_is_left_out(tmp_path: Path) -> None:
    here = read(PUBLISHED / "cpu" / "quick-cpu")
    for name in ("quick", "broken"):
        shutil.copytree(PUBLISHED / "nvidia-h200" / "quick", tmp_path / "gpu" / name)
    state = tmp_path / "gpu" / "broken" / "run.json"
    state.write_text(state.read_text().replace('"replicates": 8', '"replicates": 99'))
    (tmp_path / "gpu" / "broken" / "rows.jsonl.gz").write_bytes(b"")
    (tmp_path / "gpu" / "empty").mkdir()
    (tmp_path / "gpu" / "empty" / "run.json").write_text("{}")
    with pytest.warns(LeftOut, match="left out: "):
        assert "gpu/quick" in printed(PublishedAnswer(here, tmp_path), 120)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 140, 200, 400])
def test_no_window_cuts_a_text(width: int) -> None:
    words = [f"word{i}" for i in range(60)]
    line = ["a-claim-with-a-long-name", "RTX PRO 6000", "not carried over", "12.5", " ".join(words)]
    columns = ("claim", "GPU", "verdict", "speedup", "why")
    table = Table(columns=columns, lines=[line], words={*columns} - {"speedup"})
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert set("".join(line).replace(" ", "")) <= set(text)
    last = max(text.splitlines()[0].rfind("why"), 0)
    shown = "".join(each[last:].replace(" ", "") for each in text.splitlines()[1:])
    assert shown == "".join(words)


def test_a_cell_is_escaped_in_html_and_markdown() -> None:
    name = "<script>|[x](y)`"
    sheet = Table(title="t", columns=("a",), lines=[[name]])
    assert "<script>" not in sheet.html()
    assert "\\<script>\\|\\[x](y)\\`" in sheet.markdown()


@pytest.mark.parametrize(("width", "is_narrow"), [(60, False), (20, True)])
def test_a_narrow_window_says_which_sides_it_leaves_out(width: int, is_narrow: bool) -> None:
    columns = ("problem", "H100", "H200", "gain")
    table = Table(
        columns=columns,
        lines=[["50 %", "12.5 µs", "10.5 µs", "gains more"]],
        words=("problem", "gain"),
        spare=("gain", "H100"),
        essential=("H100",),
    )
    console = Console(width=width, record=True)
    console.print(table)
    text = console.export_text()
    assert ("A wider window" in text and "also shows H100" in " ".join(text.split())) == is_narrow
    assert ("12.5 µs" in text) != is_narrow

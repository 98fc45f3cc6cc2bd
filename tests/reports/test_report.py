"""Every kind of run has a page. The runs are synthetic, with seeded noise."""

import base64
import gzip
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from sparsebench.errors import ResultError
from sparsebench.reports.build import figures
from sparsebench.reports.figures import answer, remarks, roofline
from sparsebench.reports.figures._chart import round_values
from sparsebench.reports.figures._svg import shade
from sparsebench.results.record import Case, Contender, Problem, Row, Source, Status
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import Analysis, analyse
from tests.results.made_up import DENSE, TWIN
from tests.tools.reports import report_of

SPARSE = [
    Contender("bsr", "bsr_triton"),
    Contender("bsr", "torch_bsr"),
    Contender("bsr", "cusparse_bell"),
    Contender("bsr", "cusparse_bsr"),
    Contender("csr", "cusparse_csr"),
]
OVERHEAD = {"bsr_triton": 1.3, "torch_bsr": 1.8, "cusparse_bell": 1.6, "cusparse_bsr": 4.0}
H200 = {
    "gpu": {"name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.1"},
    "versions": {"torch": "2.13.0", "triton": "3.7.0", "cublas": "13.1.0.3"},
    "commit": "0123456789ab",
    "dirty": True,
}
CPU = {"cpu": {"name": "Some CPU"}, "versions": {"torch": "2.13.0"}, "commit": "0123456789ab"}


def fields(m: int, n: int, k: int, sparsity: float, block: int | list[int] = 1) -> dict[str, Any]:
    pattern = "blocks" if block != 1 else "random"
    sizes = {"m": m, "n": n, "k": k, "dtype": "bf16", "pattern": pattern}
    return {**sizes, "sparsity": sparsity, "block": block}


def contest(
    problem: Problem, replicate: int, noise: np.random.Generator, level: float | None = None
) -> list[Row]:
    """Return a row per contender with times by 800 TFLOP/s, 4 TB/s and a launch of 4 µs."""
    m, n, k = (problem[name] for name in "mnk")
    sparsity = problem["sparsity"] if level is None else level
    rows = []
    for contender in [DENSE, *SPARSE]:
        density = 1.0 if contender == DENSE else 1 - sparsity
        slower = OVERHEAD.get(contender.kernel, 1.0 if contender == DENSE else 12.0)
        flops, size = 2.0 * m * n * k * density, 2 * (n * k * density + m * k + m * n)
        us = 4 + slower * max(flops / 8e8, size / 4e6)
        samples = us * np.exp(noise.normal(0, 0.004, 15) + noise.normal(0, 0.01))
        row = Row(
            Case(problem, contender),
            Status.OK,
            replicate=replicate,
            device="GPU-1",
            clock="graph",
            error_of_bound=0.1,
            sparsity=sparsity,
            nnz=int(n * k * density),
            flops=flops,
            dense_flops=2.0 * m * n * k,
            fewest_bytes=int(size),
            stored_bytes=int(2 * n * k * density * (1 if contender == DENSE else 1.1)),
            dense_bytes=2 * n * k,
            convert_us=None if contender == DENSE else 900.0,
            prepare_s=0.5,
            samples_us=tuple(samples.tolist()),
            samples_per_block=3,
        )
        rows.append(spoilt(row))
    return rows


def spoilt(row: Row) -> Row:
    """Refuse, break and time out some of the cases, by rule."""
    problem, kernel = row.case.problem, row.case.contender.kernel
    if kernel == "cusparse_bsr" and problem["block"] == 128:
        return bad(row, Status.UNSUPPORTED, "blocks above 64 are not served")
    if kernel == "cusparse_csr" and problem["m"] == 4096 and problem["sparsity"] < 0.6:
        return bad(row, Status.TIMEOUT, f"no answer within {problem['n'] / 100} s")
    if kernel == "cusparse_bell" and problem["sparsity"] == 0.99 and problem["m"] == 64:
        return bad(row, Status.WRONG, "<script>alert(1)</script> error 3.1 of its bound")
    if kernel == "torch_bsr" and problem["block"] == 16 and row.replicate == 1:
        return bad(row, Status.FAILED, "RuntimeError: misaligned address")
    return row


def bad(row: Row, status: Status, detail: str) -> Row:
    return replace(row, status=status, detail=detail, samples_us=())


def sweep(levels: Sequence[float] = (0.5, 0.9, 0.95, 0.99)) -> list[Row]:
    """Return the rows of one process: each shape, block and level."""
    noise = np.random.default_rng(0)
    return [
        row
        for m in (64, 4096)
        for n in (4096, 14336)
        for block in (16, 128)
        for level in levels
        for row in contest(Problem("linear", fields(m, n, 4096, level, block)), 0, noise)
    ]


def dlmc() -> list[Row]:
    noise = np.random.default_rng(1)
    return [
        row
        for n, k in [(64, 256), (512, 128), (2048, 512)]
        for level in noise.uniform(0.4, 0.98, 12)
        for row in contest(
            Problem(
                "linear",
                fields(256, n, k, 0.0) | {"pattern": "file"},
                source=Source(f"rn50/{n}x{k}/{level:.3f}.smtx", f"{level}"),
            ),
            0,
            noise,
            level=float(level),
        )
    ]


def decode() -> list[Row]:
    noise = np.random.default_rng(2)
    return [
        row
        for m in (1, 2, 4, 8, 16, 32, 64)
        for level in (0.8, 0.9)
        for row in contest(Problem("linear", fields(m, 4096, 4096, level, [16, 32])), 0, noise)
    ]


def quick() -> list[Row]:
    noise = np.random.default_rng(3)
    rows = [
        row
        for level in (0.5, 0.9)
        for row in contest(Problem("linear", fields(8, 64, 64, level, 8)), 0, noise)
    ]
    return [*rows, replace(rows[0], case=replace(rows[0].case, contender=TWIN))]


def nothing_ok() -> list[Row]:
    return [bad(row, Status.FAILED, "no kernel image") for row in quick()]


def without_baseline() -> list[Row]:
    return [r if not r.case.contender.baseline else bad(r, Status.FAILED, "") for r in quick()]


def other_op() -> list[Row]:
    few: dict[str, Any] = {"m": 8, "hidden": 64, "dtype": "bf16", "active": 0.02, "gated": True}
    rows = []
    for active in (0.01, 0.02):
        problem = Problem("ffn", few | {"active": active})
        for contender, us in [(DENSE, 10.0), (Contender("twell", "twell_cupy"), 300 * active)]:
            rows.append(Row(Case(problem, contender), Status.OK, samples_us=(us,)))
    return rows


def attention() -> list[Row]:
    """Return rows in which the sparse contender reaches 80 % of the dense rate."""
    same: dict[str, Any] = {"m": 4096, "heads": 8, "dtype": "bf16", "pattern": "top_k_blocks"}
    rows = []
    for level in (0.5, 0.75):
        problem = Problem("attention", same | {"block": 64, "sparsity": level})
        sparse = Contender("block_mask", "attention_triton")
        dense = replace(DENSE, kernel="sdpa_cudnn")
        for contender, us in [(dense, 100.0), (sparse, 125 * (1 - level))]:
            work: dict[str, Any] = {"flops": 1e9 * (1 - level), "dense_flops": 1e9}
            row = Row(Case(problem, contender), Status.OK, samples_us=(us,) * 3, sparsity=level)
            rows.append(replace(row, **work))
    return rows


def run(rows: list[Row], environment: dict[str, Any] = H200, status: str = "finished") -> StoredRun:
    suite = {"title": "Which format wins?", "description": "Every format at every sparsity."}
    state = {"status": status, "started": "2026-11-21T06:00:00Z"}
    return StoredRun(
        Path("runs/one"), suite, "title: Which format wins?\n", environment, state, rows
    )


NEED_MORE = {
    "noise",
    "ceilings",
    "requests",
    "parts",
    "roofline",
    "drift",
    "power",
}  # figures whose data `sweep` does not have


def frames(rows: list[Row]) -> Analysis:
    return analyse(run(rows))


RUNS: dict[str, Callable[[], StoredRun]] = {
    "sparsity": lambda: run(sweep()),
    "dlmc": lambda: run(dlmc()),
    "decode": lambda: run(decode()),
    "quick": lambda: run(quick(), CPU),
    "nothing_ok": lambda: run(nothing_ok(), status="interrupted"),
    "without_baseline": lambda: run(without_baseline()),
    "other_op": lambda: run(other_op()),
    "attention": lambda: run(attention()),
    "two_ops": lambda: run(quick() + other_op()),
    "one_row": lambda: run(quick()[:1]),
    "no_rows": lambda: run([], {}),
}


@cache
def page_of(kind: str) -> str:
    return report_of(RUNS[kind]())


class Page(HTMLParser):
    """Collects what a browser would fetch, the elements, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            inside = (value or "").startswith(("#", "data:"))
            if name in ("src", "srcset", "data", "poster", "action", "xlink:href") and not inside:
                self.fetched.append(f"{tag} {name}={value}")


@pytest.mark.parametrize("kind", RUNS)
def test_every_kind_of_run_has_a_page_with_unique_ids_that_loads_nothing(kind: str) -> None:
    text = page_of(kind)
    page = Page(text)
    assert page.fetched == []
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    assert not re.search(r"@import|https?://|url\((?!#)", text)
    ids = re.findall(r'<section id="([^"]*)"', text)
    assert (*ids[:2], ids[-1]) == ("answer", "measured", "words")
    ids = [name for name in ids if name not in ("measured", "words")]
    assert ids == [figure.name for figure in figures() if figure.name in ids]
    every = re.findall(r' id="([^"]*)"', text)
    assert len(every) == len(set(every))
    assert {*re.findall(r'href="#(case-[^"]*)"', text)} <= {*every}
    if kind == "sparsity":
        assert {*ids} == {figure.name for figure in figures()} - NEED_MORE


def test_text_of_a_run_is_never_markup() -> None:
    text = page_of("sparsity")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; error 3.1 of its bound" in text


def test_a_speed_up_is_shown_with_interval_baseline_shape_dtype_and_device() -> None:
    text = page_of("quick")
    answer = text[text.index('<section id="answer">') : text.index('<section id="measured">')]
    for word in ["over dense on the same zeros (cublas, ", "64 × 64", "m 8", "bf16", "× ["]:
        assert word in answer
    assert text.index("<b>Some CPU</b>") < text.index('<section id="answer">')
    assert "quartiles of the rounds in one process" in text
    assert frames(quick()).noise.sentence in text


def test_only_the_page_of_a_gpu_says_how_often_the_device_was_slowed() -> None:
    assert "a slowed GPU" in page_of("sparsity")
    assert not re.search("slowed GPU|GPU slowed", page_of("quick"))  # of a CPU


def test_a_page_says_how_many_choices_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    data = frames([row for row in sweep((0.5, 0.9)) if row.case.problem["m"] == 64])
    views = len(data.views)
    assert f"1 of {views} choices" not in answer.draw(data)
    monkeypatch.setattr("sparsebench.reports.figures.answer.MOST", views - 1)
    assert f"1 of {views} choices" in answer.draw(data)


def test_costs_are_written_in_a_line_for_each_format() -> None:
    text = str(remarks.draw(frames(sweep(levels=(0.5, 0.9)))))
    assert "CSR: 0.110–0.550 of the dense bytes; conversion 900 µs, never" in text
    assert re.search(r"BSR: .*; conversion 900 µs, paid back after [\d–,]+ calls", text)


def test_the_figures_of_all_choices_have_one_axis() -> None:
    """The data range of each choice differs, so figures with axes of their own would, too."""
    page = report_of(run(sweep()))
    figures = re.findall(r'<svg[^>]*aria-label="Speedup over dense by [^"]*".*?</svg>', page)
    grids = {re.search(r'<path d="([^"]*)" [^>]*opacity="0.13"', each)[1] for each in figures}
    assert len(figures) > 1
    assert len(grids) == 1


def test_a_failing_figure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "SIDES", None)
    place = r"figure answer \(sparsebench.reports.figures.answer\): TypeError"
    with pytest.raises(RuntimeError, match=place):
        report_of(RUNS["quick"]())


def test_a_figure_that_does_not_apply_is_refused_if_it_is_drawn_alone() -> None:
    with pytest.raises(ResultError, match="figure roofline: expected cases to draw, found none"):
        report_of(RUNS["quick"](), only="roofline")


def test_a_part_of_a_suite_shows_the_selection() -> None:
    assert "<dt>only</dt>" not in page_of("quick")
    part = run(quick())
    part = replace(part, state=part.state | {"flags": {"only": "m=16|64 n=4096"}})
    assert "<dt>only</dt><dd>m=16|64 n=4096</dd>" in report_of(part, only="remarks")


def test_a_case_without_a_time_has_its_reason() -> None:
    text = page_of("without_baseline")
    assert "11 ok cases have no speedup" in text
    assert "no reason given" in text
    text = page_of("nothing_ok")
    assert ">NO TIMES</span>" in text
    assert "its status is interrupted." in text
    assert "no kernel image" in text


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0.8, 12, [1, 1.5, 2, 3, 5, 7, 10]),
        (0.9, 2.2, [1, 1.2, 1.4, 1.6, 1.8, 2, 2.2]),
        (0.95, 1.12, [0.95, 1, 1.05, 1.1]),
        (0.01, 200, [0.01, 0.1, 1, 10, 100]),
    ],
)
def test_ticks_are_round_values_and_include_one(low, high, values) -> None:
    assert round_values(low, high) == values


def test_the_same_run_gives_the_same_bytes() -> None:
    assert report_of(RUNS["quick"]()) == page_of("quick")


def test_links_lead_from_the_page_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rows.jsonl.gz").touch()
    (tmp_path / "site").mkdir()
    here = replace(run(quick()), path=tmp_path / "one")
    assert 'href="rows.jsonl.gz"' in report_of(here)
    report_of(here, tmp_path / "site" / "index.html")
    text = (tmp_path / "site" / "index.html").read_text()
    assert 'href="../one/rows.jsonl.gz"' in text
    assert 'href="suite.yaml"' not in text


NASTY = "x\"'/<script>alert(2)</script>$\\frac{$" + "y" * 200


def nasty() -> list[Row]:
    rows = []
    for row in quick():
        contender = row.case.contender
        if contender.kernel == "torch_bsr":
            contender = replace(contender, kernel=NASTY)
        if contender.kernel == "cusparse_bsr":
            contender = replace(contender, kernel="=1+1")
        rows.append(replace(row, case=replace(row.case, contender=contender)))
    return rows


def test_names_that_are_markup_formulas_or_long_stay_text() -> None:
    text = report_of(run(nasty()))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(2)&lt;/script&gt;$\\frac{$" in text
    packed = re.search(r'download="cases.csv(?:.gz)?" href="data:[^,]*,([^"]*)"', text)
    assert packed
    data = base64.b64decode(packed[1])
    csv = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    assert b"'=1+1" in csv
    assert b",=1+1" not in csv


def test_markers_have_tooltips_with_their_values() -> None:
    titles = re.findall(r"<title>([^<]*)</title></(?:path|circle)>", page_of("decode"))
    assert any("bsr/bsr_triton" in title and "×" in title for title in titles)


def test_the_best_case_of_each_kernel_has_its_name_in_the_roofline() -> None:
    ceilings = {"read_gb_per_s": 4e3, "copy_gb_per_s": 4e3, "matrix_tflops": {"bf16": 800.0}}
    drawn = roofline.draw(analyse(run(sweep((0.5, 0.9)), H200 | {"ceilings": ceilings})))
    names = re.findall(r'<g text-anchor="start"><text[^>]*>([^<]+)', drawn)
    kernels = {contender.kernel for contender in [DENSE, *SPARSE]}
    assert {*names} == {"hardware limit", "TFLOP/s of non-zeros, bf16", *kernels}
    assert len(names) == len({*names})


@pytest.mark.parametrize("ratio", [0.01, 0.2, 0.5, 0.7, 0.95, 1.0, 1.3, 2.0, 4.0, 6.0, 100.0])
def test_text_on_a_cell_has_a_contrast_of_4_5(ratio: float) -> None:
    def light(colour: str) -> float:
        parts = np.array(to_rgb(colour))
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted(light(colour) for colour in shade(ratio))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_run_with_ceilings_energy_and_sensors_has_their_figures() -> None:
    telemetry = {"seconds": 1.0, "power_capped_us": 5e5, "sm_mhz": 1755.0, "temperature_c": 60.0}
    rows = [
        replace(row, replicate=replicate, energy_j=0.1, telemetry=telemetry)
        for replicate in range(2)
        for row in quick()
    ]
    ceilings = {"read_gb_per_s": 4e3, "copy_gb_per_s": 4e3, "matrix_tflops": {"bf16": 800.0}}
    text = report_of(
        run(rows, H200 | {"ceilings": ceilings | {"launch_us": 4.5, "l2_bytes": 2**26}})
    )
    drift = text[text.index('<section id="drift">') : text.index('<section id="remarks">')]
    for words in ("4 of 4 contests", "SM clock 1,755 MHz.", "Temperature 60.00 °C."):
        assert words in drift
    assert drift.count("<svg") == 1
    assert "hardware limit: 800 TFLOP/s, 4,000 GB/s" in text

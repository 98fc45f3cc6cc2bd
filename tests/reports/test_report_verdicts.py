"""Verdicts, A/A pairs, ceilings and marks on the page. The times are synthetic.

Every contender's log-ratio to the baseline wobbles over the processes by WOBBLE times a scale.
"""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.reports.build import build
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import Analysis, analyse
from tests.results.made_up import DENSE, TWIN
from tests.tools.reports import report_of

WOBBLE = (-4, 3, -2, 1, -1, 2, -3, 4)
TIMES = {  # µs, scale of the wobble
    "fast": (50.0, 0.001),
    "faster_perhaps": (40.0, 0.5),
    "equal": (100.0, 0.0005),
    "slow": (200.0, 0.001),
}
CEILINGS = {
    "read_gb_per_s": 4100.0,
    "copy_gb_per_s": 3900.0,
    "matrix_tflops": {"bf16": 800.0},
    "launch_us": 4.5,
    "l2_bytes": 2**26,
}


def problem(m: int = 64, sparsity: float = 0.9, block: int = 16, seed: int = 0) -> Problem:
    sizes: dict[str, Any] = {"m": m, "n": 4096, "k": 4096, "dtype": "bf16", "pattern": "blocks"}
    return Problem("linear", sizes | {"sparsity": sparsity, "block": block}, seed)


def timed(of: Problem, contender: Contender, us: float, process: int, **other: Any) -> Row:
    facts = {
        "clock": "graph",
        "bound_us": 20.0,
        "bound_by": "memory",
        "convert_us": 1000.0,
        "prepare_s": 2.0,
    }
    facts |= {
        "sparsity": of["sparsity"],
        "samples_us": (us,) * 4,
        "dense_bytes": 2**25,
        "stored_bytes": 2**22,
    }
    return Row(Case(of, contender), Status.OK, replicate=process, **{**facts, **other})


def contest(of: Problem, process: int, **other: Any) -> list[Row]:
    rows = [timed(of, DENSE, 100.0, process, **other)]
    for kernel, (us, scale) in TIMES.items():
        us *= np.exp(scale * WOBBLE[process])
        rows.append(timed(of, Contender("bsr", kernel), us, process, **other))
    return rows


def pairs(process: int, twin: float) -> list[Row]:
    """Return the reference pairs of a process: launch, memory and compute; `twin` times as slow."""
    kinds = [(1, 5.0, "memory", 2**13), (2, 100.0, "memory", 2**29), (3, 200.0, "compute", 2**25)]
    rows = []
    for m, us, bound, size in kinds:
        of, facts = problem(m, seed=9), {"bound_by": bound, "reference": True, "dense_bytes": size}
        wobble = np.exp(0.0005 * WOBBLE[process])
        rows += [timed(of, DENSE, us, process, **facts)]
        rows += [timed(of, TWIN, us * twin * wobble, process, **facts)]
    return rows


def run(
    processes: int = 8, twin: float = 1.0, kinds: tuple[tuple[str, str], ...] = (), **other: Any
) -> StoredRun:
    problems = [problem(sparsity=s, block=b) for s in (0.8, 0.9) for b in (16, 32)]
    rows = [
        row
        for process in range(processes)
        for of in problems
        for scope, cache in kinds or [("kernel", "cold")]
        for row in contest(of, process, scope=scope, cache=cache, **other)
    ]
    reference = [row for process in range(processes) for row in pairs(process, twin)]
    environment = {"gpu": {"name": "A GPU"}, "ceilings": CEILINGS}
    state = {"status": "finished"}
    return StoredRun(
        Path("runs/one"), {"title": "T"}, "title: T\n", environment, state, rows, reference
    )


@cache
def frames(**how: Any) -> Analysis:
    return analyse(run(**how))


@cache
def page(name: str, **how: Any) -> str:
    """Return a page with one figure; all of them take seconds."""
    return build(frames(**how), only=name)


def drawn(name: str, **how: Any) -> str:
    return section(name, page(name, **how))


def alone(name: str, of: StoredRun) -> str:
    return section(name, report_of(of, only=name))


def section(name: str, text: str) -> str:
    after = text.partition(f'<section id="{name}">')[2]
    assert after, name
    return after.partition("</section>")[0]


def test_an_unreliable_run_has_a_badge_above_everything_else() -> None:
    text = page("noise", twin=1.03)
    why = text.index('<p class="why unreliable">This run is unreliable: 3 of')
    assert text.index(">UNRELIABLE</span>") < text.index("<h1>") < why < text.index("<main>")
    assert "UNRELIABLE" not in page("remarks")
    assert '<p class="quiet">This run is reliable: 0 of 3 A/A pairs' in page("remarks")
    assert ">VERDICT: " in page("remarks")
    assert "Brackets: 95 % interval over 8 processes" in page("remarks")


def test_a_look_is_marked_once() -> None:
    text = page("noise", processes=5)
    assert text.count('<p class="why look">5 processes: a look, no verdict') == 1
    assert "LOOK" not in page("remarks")
    assert "Brackets: range over 5 processes" in page("remarks", processes=5)
    assert '<p class="why look">1 process: a look' in report_of(run(processes=1), only="remarks")


def test_undecided_cells_are_hatched() -> None:
    assert 'class="cell undecided"' in drawn("answer")


def test_the_noise_floor_is_written_and_drawn_by_class() -> None:
    sentence = "Noise floor of one process: 2.1 % (below 8 µs), 0.5 % (above 100 µs)."
    assert sentence in page("noise")
    figure = drawn("noise")
    assert re.findall("<figure><h3>(.*?)</h3>", figure) == ["below 8 µs", "above 100 µs"]
    assert re.findall(r"different: (\d of \d)", figure) == ["0 of 1", "0 of 2"]
    different = drawn("noise", twin=1.03)
    assert re.findall(r"different: (\d of \d)", different) == ["1 of 1", "2 of 2"]
    assert drawn("noise", processes=5).count("different: unknown") == 3


def test_figures_draw_kernel_time_with_a_cold_cache_and_the_table_lists_the_rest() -> None:
    kinds = ("op", "hot"), ("op", "cold"), ("kernel", "hot"), ("kernel", "cold")
    assert "Kernel time, cold cache." in drawn("ceilings", kinds=kinds)
    assert "As called from Python, hot cache." in drawn("ceilings", kinds=kinds[:1])
    assert all(f"<td>{cache}</td>" in drawn("cases", kinds=kinds) for cache in ("hot", "cold"))


def test_values_shared_by_all_measures_are_written_once() -> None:
    kinds = ("kernel", "cold"), ("kernel", "hot"), ("op", "cold"), ("op", "hot")
    broken = run(kinds=kinds)
    rows = [
        replace(row, status=Status.WRONG, detail="error 3", samples_us=())
        if row.case.contender.kernel == "slow"
        else row
        for row in broken.rows
    ]
    of = replace(broken, rows=rows)
    assert "16 ok, 4 wrong, of 4 problems" in report_of(of, only="remarks")
    assert "4 cases wrong: error 3: slow" in alone("remarks", of)


def test_the_fraction_of_the_bound_is_shown_by_contender() -> None:
    figure = drawn("ceilings")
    assert "reading 4,100 GB/s; copying 3,900 GB/s; matrix products bf16 800 TFLOP/s" in figure
    assert "an empty launch 4.50 µs; L2 cache 64.0 MiB" in figure
    assert ">bsr/slow: 10, 10</text>" in figure


def test_a_raised_ceiling_is_reported() -> None:
    of = run()
    above = replace(of.reference[2], raises=1.05)  # dense against dense, bound by memory
    figure = alone("ceilings", replace(of, reference=[above, *of.reference]))
    sentence = (
        "Read raised from 4100 to 4305 GB/s by cublas (m 2, n 4096, k 4096, bf16, cold, replica"
    )
    assert sentence in figure
    assert "raised" not in drawn("ceilings")


def test_marks_are_counted_in_a_sentence_and_listed_in_the_table() -> None:
    telemetry = {"seconds": 1.0, "power_capped_us": 5e5, "power_w": 690.0, "sm_mhz": 1755.0}
    sizes: dict[str, Any] = {"held_bytes": 10**7, "peak_bytes": 2 * 10**7}
    text = report_of(run(telemetry=telemetry, energy_j=0.25, **sizes), only="cases")
    assert re.search(r"\d+ cases are marked: power-limited", text)
    assert '<div id="power-limited"><dt>power-limited</dt>' in section("words", page("cases"))
    table = section("cases", text)
    for cell in ["power-limited", "690", "1,755", "10.0", "20.0", "250"]:
        assert f">{cell}</td>" in table, cell
    assert not re.search("energy, mJ|power, W|SM clock|held, MB", drawn("cases"))


def test_a_run_that_was_stopped_after_its_pairs_has_a_page() -> None:
    text = report_of(replace(run(), rows=[]))
    assert "<svg" not in section("answer", text)
    assert "different: 0 of 1" in section("noise", text)

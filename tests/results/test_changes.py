"""What changed and from what: changes.py and sides.py of results, comparison.py of reports."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparsebench.errors import LeftOut, ResultError
from sparsebench.reports.comparison import compare_sides, html, markdown, to_json
from sparsebench.results.comparison.causes import Cause
from sparsebench.results.comparison.changes import (
    Changes,
    changes,
    gate_failures,
    mean,
    threshold,
)
from sparsebench.results.comparison.compare import GAIN, TIME, outcomes, ratio_of_means
from sparsebench.results.comparison.sides import Side, distinct_names, find, short_name, side
from sparsebench.results.record import Case, Problem, Row, Status
from sparsebench.results.run import bundle
from sparsebench.results.run.store import StoredRun
from tests.results.made_up import BSR, DENSE, TWIN, stored
from tests.tools.paths import PUBLISHED
from tests.tools.reports import printed

LEVELS = (0.5, 0.8, 0.9)
H200 = PUBLISHED / "nvidia-h200"


def run(
    name: str = "a",
    gpu: str = "A",
    dense_us: float = 100.0,
    bsr_us: Sequence[float] = (50.0, 20.0, 10.0),
    processes: int = 8,
    card: str = "GPU-1",
    code: str = "sass:1",
    **environment: Any,
) -> StoredRun:
    """Return a run with BSR at three levels, whose processes differ by 0.1 %."""
    rows = []
    for level, us in zip(LEVELS, bsr_us, strict=True):
        fields = {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "pattern": "blocks"}
        problem = Problem("linear", {**fields, "sparsity": level, "block": 16})
        for process in range(processes):
            part = 1 + 0.001 * (process % 3 - 1)
            for contender, t in ((DENSE, dense_us), (TWIN, dense_us), (BSR, us * part)):
                case, digest = Case(problem, contender), code if contender == BSR else None
                rows.append(
                    Row(case, Status.OK, process, device=card, bound_us=1.0, samples_us=(t,) * 2,
                        code=digest, telemetry={"sm_mhz": 1980.0})
                )  # fmt: skip
    facts = {"gpu": {"name": gpu}, "versions": {"torch": "2.0"}, "code_sha256": "1", **environment}
    return stored(rows, name, facts, flags={"replicates": processes})


@cache
def first() -> Side:
    """Return the run with which most others are compared; its analysis takes 0.1 s."""
    return side(run(), name="A")


def changed(b: StoredRun, a: StoredRun | None = None) -> Changes:
    return changes(side(a, name="A") if a else first(), side(b, name="B"))


def words(b: StoredRun, column: str = "word", a: StoredRun | None = None) -> list[str]:
    return [str(word) for word in changed(b, a).contenders.sort_values("level")[column]]


def with_bsr(original: StoredRun, **row: Any) -> StoredRun:
    rows = [replace(r, **row) if r.case.contender == BSR else r for r in original.rows]
    return replace(original, rows=rows)


def shown(*runs: StoredRun, width: int = 120) -> str:
    names = distinct_names(runs)
    sides = [side(each, name=name) for each, name in zip(runs, names, strict=True)]
    return printed(compare_sides(sides), width)


def test_a_case_is_slower_equal_or_faster_by_its_time() -> None:
    assert words(run(bsr_us=(60, 20, 8))) == ["slower", "equal", "faster"]


def test_two_cards_settle_only_what_differs_by_more_than_cards_do() -> None:
    other = run(bsr_us=(50 * 1.005, 20 * 1.005, 10 * 1.12), card="GPU-2")
    assert words(other) == ["not settled", "not settled", "slower"]


def test_a_slower_device_with_equal_gains_is_slower_and_gains_as_much() -> None:
    slow = run("b", "B", 200.0, (100, 40, 20), card="GPU-1")
    assert words(slow) == ["slower"] * 3
    assert words(slow, "gain") == ["equal"] * 3
    assert words(slow, "cause") == [""] * 3
    assert not gate_failures(changed(slow), 0.03).size


SLOWER = {"bsr_us": (60, 24, 12)}
NEWER = {"versions": {"torch": "2.1"}}
MORE = {"versions": {"torch": "2.0", "stanford-stk": "0.7.1"}}  # no case of both sides uses it


@pytest.mark.parametrize(
    ("other", "choice", "cause", "fails"),
    [
        ({**SLOWER, "code": "sass:2", "code_sha256": "2"}, {}, Cause.KERNEL, 3),
        ({**SLOWER, "code_sha256": "2"}, {}, Cause.UNKNOWN, 3),  # the same compiled code
        ({**SLOWER, **NEWER}, {}, Cause.LIBRARY, 3),
        ({**SLOWER, "dense_us": 120.0, **MORE}, {}, Cause.CARD, 0),
        ({**SLOWER}, {"tile": 64}, Cause.CONFIGURATION, 3),
        ({**SLOWER, "card": "GPU-2"}, {}, Cause.CARD, 0),
        ({**SLOWER, "dense_us": 120.0, "card": "GPU-2"}, {}, Cause.CARD, 0),
        ({**SLOWER, "dense_us": 120.0}, {}, Cause.CARD, 0),  # its clock
        ({"dense_us": 80.0, **NEWER}, {}, Cause.LIBRARY, 0),  # of the baseline
        ({"code_sha256": "2", "code": "sass:2"}, {}, Cause.NONE, 0),
    ],
)
def test_a_change_names_its_cause_and_only_that_of_a_kernel_fails_the_gate(
    other, choice, cause, fails
) -> None:
    result = changed(with_bsr(run("b", **other), choice=choice))
    assert set(result.contenders.cause) == {cause}
    assert len(gate_failures(result, 0.03)) == fails


def test_a_cpu_is_no_card() -> None:
    cpu: dict[str, Any] = {"card": "CPU 1", "cpu": {"name": "CPU 1"}}
    before, after = (
        replace(each, environment={**each.environment, "gpu": None})
        for each in (run(**cpu), run("b", **SLOWER, dense_us=120.0, **cpu))
    )
    result = changed(after, before)
    assert set(result.contenders.cause) == {Cause.MACHINE}
    assert not len(gate_failures(result, 0.03))
    assert not re.search("card|GPU", shown(before, after))


def test_a_baseline_with_inherited_configurations_is_a_cause() -> None:
    moved = run("b", dense_us=150.0)
    moved.state["choices"] = "bundle"
    result = changed(moved)
    assert set(result.contenders.cause) == {Cause.BASELINE}
    assert set(result.contenders.gain) == {"faster"}
    assert not len(gate_failures(result, 0.03))


def test_a_power_limit_in_one_run_stands_beside_the_cause() -> None:
    limited = {"seconds": 1.0, "power_capped_us": 9e5}
    result = changed(with_bsr(run("b", **SLOWER), telemetry=limited))
    assert all(result.contenders.why.str.endswith("; not marked, then power-limited"))


def test_a_case_that_broke_is_not_measured_and_fails_the_gate() -> None:
    broken = with_bsr(run("b"), status=Status.WRONG, detail="all zero", samples_us=())
    result = changed(broken)
    assert result.counts == {"not measured": 3, "broken": 3}
    assert set(result.contenders.why) == {"wrong: all zero"}
    assert len(gate_failures(result, 0.5)) == 3


@pytest.mark.parametrize(
    ("limit", "count"), [("slower:3%", 1), ("slower: 30%", None), ("slower:30 %", 0)]
)
def test_the_gate_takes_what_is_slower_by_more(limit: str, count: int | None) -> None:
    if count is None:
        with pytest.raises(ResultError, match="expected slower:P%"):
            threshold(limit)
        return
    result = changed(run(bsr_us=(60, 20, 10)))
    assert len(gate_failures(result, threshold(limit))) == count


def test_another_kind_of_gpu_is_gated_by_its_gains() -> None:
    assert len(gate_failures(changed(run(gpu="B", bsr_us=(60, 20, 10))), 0.03)) == 1


def test_any_number_of_runs_stand_beside_the_first() -> None:
    text = shown(run(), run("b", bsr_us=(50, 20, 20)), run("c"), width=200)
    counts = "b is faster than a in 0 of 3 cases and slower in 1; 2 cases are equal"
    assert f"Baselines aside, {counts}" in text
    assert "c is faster than a in 0 of 3 cases" in text
    first = next(line for line in text.splitlines() if "bsr_triton" in line)
    assert first.startswith("90 %")  # the largest change


def test_what_differs_has_names_for_readers() -> None:
    text = shown(run(), run("b", code_sha256="2"), width=200)
    assert "a and b differ in hash of the code (1 and 2)." in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_comparison_fits_the_window_and_names_the_contender(width: int) -> None:
    text = shown(run(), run("b", bsr_us=(50, 20, 20)), width=width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert any("bsr_triton" in line and "a 50 % shorter" in line for line in lines)


def test_terminal_markdown_and_page_say_the_same_words() -> None:
    sides = [side(run(), name="H100"), side(run(gpu="B", bsr_us=(60, 20, 8)), name="H200")]
    result = compare_sides(sides)
    texts = printed(result, 1000), markdown(result), unescape(html(result))
    for said in (*result.findings, *result.notes):
        assert all(said in text for text in texts)
    for text in texts:
        assert "H200 20 % shorter" in text
        assert "gains less" in text
        assert not re.search(r"gains? [\w ]*slower", text)
    assert "http" not in html(result)
    assert to_json(result)["changes"]["H200"]["faster"] == 1


def test_speedups_beside_times_have_intervals_and_their_baseline_is_named() -> None:
    result = compare_sides([first(), side(run("b", "B", bsr_us=(60, 20, 8)), name="b")])
    for text in (printed(result, 1000), markdown(result), unescape(html(result))):
        gains = re.findall(r"µs \d[\d.]*× ?\\?(\[?)", text)
        assert len(gains) >= 6
        assert set(gains) == {"["}
        assert "over the baseline of the same contest (cublas)" in text


def test_every_mean_has_its_interval_and_its_number_of_cases() -> None:
    other = run("b", "B", 120.0, (60, 20, 8), card="GPU-2")
    result = compare_sides([first(), side(other, name="b")])
    ((_, of),) = to_json(result)["changes"].items()
    texts = printed(result, 1000), markdown(result), unescape(html(result))
    for name, cases, columns in (
        ("baselines_mean", result.others[0].cases[result.others[0].cases.is_baseline], TIME),
        ("times_mean", result.others[0].contenders, TIME),
        ("geometric_mean", result.others[0].contenders, GAIN),
    ):
        ratio = mean(cases, columns)
        assert ratio is not None
        assert of[name] == {
            "value": ratio.value, "low": ratio.low, "high": ratio.high, "cases": 3
        }  # fmt: skip
        assert ratio.low < ratio.value < ratio.high
        assert "[" in ratio.text
        assert columns is TIME or all(ratio.text in text for text in texts)
    assert mean(result.others[0].cases[:0], TIME) is None


@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_the_interval_of_a_mean_covers_it_however_the_cases_depend(common: float) -> None:
    """`common` is the share of the variance that all cases of a run have in common."""
    draw, covered = np.random.default_rng(5), []
    spread = np.array([0.002, 0.01, 0.02, 0.005])
    for _ in range(2000):
        errors = np.sqrt(common) * draw.normal() + np.sqrt(1 - common) * draw.normal(size=4)
        logs = pd.Series(spread * errors)
        ends = {"low": logs - 1.96 * spread, "high": logs + 1.96 * spread}
        ratio = mean(np.exp(pd.DataFrame({"ratio": logs, **ends})), GAIN)
        assert ratio is not None
        covered.append(ratio.low <= 1 <= ratio.high)
    assert np.mean(covered) >= 0.94  # 0.95, less two standard errors of the simulation


def test_two_devices_have_a_grid_of_their_gains_above_every_case() -> None:
    result = compare_sides([first(), side(run("b", "B", 200.0, (100, 40, 20)), name="b")])
    best, every = result.tables
    assert best.columns[1:] == ["A", "b"]
    assert [cell[0].strip("? ") for cell in best.lines[0][1:]] == ["2.00–10.00×"] * 2
    assert [line[1] for line in every.lines].count("cublas (baseline)") == len(LEVELS)


def test_names_are_text_on_a_page() -> None:
    evil = replace(run("b"), path=Path("<script>alert(1)</script>"))
    result = compare_sides([first(), side(evil, name="<b>")])
    assert "<script>" not in html(result)
    assert not re.search(r"(?<!\\)<script>", markdown(result))


def test_an_interval_without_limits_in_practice_says_that_processes_are_missing() -> None:
    """Two processes a side may give 0.0000000013 to 158,000,000,000 %."""
    pair = [run(name, processes=2) for name in "ab"]
    wild = [
        replace(row, samples_us=(row.samples_us[0] * (1 + 20 * row.replicate),) * 2)
        for row in pair[1].rows
    ]
    assert "not settled (too few processes)" in shown(
        pair[0], replace(pair[1], rows=wild), width=400
    )
    assert "too few" not in shown(*pair, width=400)


def test_runs_with_nothing_to_compare_are_refused_in_a_line() -> None:
    gone = {"status": Status.UNSUPPORTED, "detail": "no GPU", "samples_us": ()}
    refused = replace(run(), rows=[replace(row, **gone) for row in run().rows])
    with pytest.raises(ResultError, match="expected a case with a time on either"):
        changed(refused, refused)
    other = replace(run("b"), rows=[row for row in run("b").rows if row.case.contender == DENSE])
    with pytest.raises(ResultError, match="a and b: expected a shared case"):
        compare_sides([side(run()), side(other)])
    with pytest.raises(ResultError, match="expected 2 to 26 runs or names, found 1"):
        find(["H100"], [])


@pytest.mark.parametrize(
    ("device", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GB200", "GB200"),
        ("Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Processor"),
    ],
)
def test_a_gpu_has_the_name_of_its_model(device: str, short: str) -> None:
    assert short_name(device) == short


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two small runs on two GPUs."""
    to = tmp_path_factory.mktemp("runs")
    for name, gpu in (("second", "NVIDIA H200"), ("other", "NVIDIA H100 80GB HBM3")):
        shutil.copytree(H200 / "ffn-step", to / name)
        file = to / name / "environment.json"
        facts = json.loads(file.read_text())
        facts["gpu"] |= {"name": gpu}
        file.write_text(json.dumps(facts))
        bundle.seal(to / name)
    return to


def test_sides_are_found_by_name(folder, monkeypatch) -> None:
    monkeypatch.setattr(
        "sparsebench.results.comparison.sides.analyse", lambda run: SimpleNamespace(run=run)
    )
    places = find(["h100", "H200"], [folder])
    assert [each.name for each in places] == ["h100", "H200"]
    assert [each.runs[0].path.name for each in places] == ["other", "second"]


@pytest.mark.parametrize("name", ["environment.json", "run.json", "rows.jsonl"])
def test_a_broken_run_beside_others_is_left_out(name, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "sparsebench.results.comparison.sides.analyse", lambda run: SimpleNamespace(run=run)
    )
    shutil.copytree(folder, tmp_path / "runs")
    shutil.copytree(folder / "other", tmp_path / "runs" / "broken")
    (tmp_path / "runs" / "broken" / "rows.jsonl.gz").unlink()
    (tmp_path / "runs" / "broken" / name).write_text("{")
    with pytest.warns(LeftOut, match=f"left out: .*broken/{name}"):
        places = find(["h100", "H200"], [tmp_path / "runs"])
    assert [run.path.name for run in places[0].runs] == ["other"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("NVIDIA", "expected one match, found NVIDIA H100 80GB HBM3, NVIDIA H200"),
        ("H2OO", "did you mean H200"),
        ("H20", "no published run is on such a GPU"),
        ("secnd", "did you mean .*/second"),
        ("torch==2.1", "the path of a run .also for a commit, a card or a library"),
        ("x", r"or a GPU \(H100, H200\)"),
        (str(PUBLISHED), "found no run.json"),
    ],
)
def test_a_name_of_nothing_or_of_several_is_refused_in_a_line(folder, name, match) -> None:
    with pytest.raises(ResultError, match=match):
        find(["H100", name], [folder])


def test_a_name_that_is_given_twice_is_refused(folder: Path) -> None:
    with pytest.raises(ResultError, match="H100: expected each name once"):
        find(["H100", "H100"], [folder])


def test_sides_without_a_common_suite_are_refused(folder: Path) -> None:
    with pytest.raises(ResultError, match="H200 has ffn-step"):
        find([str(H200 / "quick"), "H200"], [folder])


@pytest.mark.parametrize(("look", "word"), [([9.9, 10.0, 10.1], "faster"), ([4, 9, 30], "not")])
def test_a_look_whose_processes_scatter_has_an_interval_as_wide(look, word) -> None:
    verdict = np.log([5.0, 5.1, 4.9, 5.0, 5.2, 4.9, 5.0, 5.1]).tolist()
    test = ratio_of_means(verdict, np.log(look).tolist(), {"tolerance": 0.05})
    assert outcomes(pd.DataFrame([test], columns=[*GAIN, "p"]))[0].startswith(word)
    *_, low, high, _ = ratio_of_means(verdict, [np.log(10.0)], {"tolerance": 0.05})
    assert high / low == pytest.approx(1.05**2)


def test_more_cases_of_one_run_do_not_narrow_the_interval_of_their_mean() -> None:
    line = {"ratio": 1.1, "low": 1.1 / 1.02, "high": 1.1 * 1.02}
    for count in (1, 3, 300):
        ratio = mean(pd.DataFrame([line] * count), GAIN)
        assert ratio is not None
        assert (ratio.low, ratio.high) == pytest.approx((line["low"], line["high"]))
        assert ratio.cases == count

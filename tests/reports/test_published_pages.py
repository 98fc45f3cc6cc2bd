"""Pages that show published results say what the bundles say, and nothing else."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sparsebench.errors import ResultError
from sparsebench.reports.published import __main__ as command
from sparsebench.reports.published._pages import pages
from sparsebench.reports.published._runs import Published, published, with_names
from sparsebench.reports.published._summary import Question, headline
from sparsebench.reports.published._table import Figure, Table, matched, rendered
from sparsebench.reports.published.tables import PEERS, PERHAPS, QUESTIONS, SECTIONS
from sparsebench.results.analysis import analyse
from sparsebench.results.families import ours
from tests.tools.paths import KERNELS, PUBLISHED, ROOT

EVERY = [table for part in SECTIONS.values() for table in part]


@pytest.fixture(scope="session")
def runs() -> dict[str, Published]:
    return published(ROOT)


def table(**fields: object) -> Table:
    some = Table("t", "Some", ("decode",), "ours", ("shape", "block", "asked"), ("m",))
    return replace(some, **fields)


def test_no_page_differs_from_its_bundles(runs: dict[str, Published]) -> None:
    found = [str(path.relative_to(ROOT)) for path in command.differing(ROOT, runs)]
    assert not found, "run python -m sparsebench.reports.published"


def test_a_cell_is_the_speed_up_of_the_harness(runs: dict[str, Published]) -> None:
    cases = runs["decode"].cases
    known = {(line.case_id, line.scope, line.cache): line for line in cases.itertuples()}
    for line in matched(table(), runs).itertuples():
        case = known[line.case_id, line.scope, line.cache]
        assert line.figure == Figure(
            case.speedup, case.speedup_low, case.speedup_high, case.uncertainty
        )
    over = matched(table(over="kernel == 'cublas'"), runs)
    for line in over.itertuples():  # over the baseline by name: the same, process by process
        assert line.figure.value == pytest.approx(line.speedup)
        assert line.figure.low == pytest.approx(line.speedup_low)


def test_a_figure_of_fewer_processes_than_its_run_says_so(runs: dict[str, Published]) -> None:
    """As where one process timed a call without a graph: its ratios are of the other seven."""
    few = {"m": 1, "n": 14336, "block": "16", "level": 0.9, "kernel": "bsr_triton"}
    decode = runs["decode"]
    cases = decode.cases
    (case,) = cases[(cases[list(few)] == pd.Series(few)).all(axis=1) & ~cases.twin].case_id
    rows = [row for row in decode.run.rows if (row.case.id, row.replicate) != (case, 3)]
    run = replace(decode.run, rows=rows)
    cases = with_names(analyse(run).cases, "decode")
    fewer = {**runs, "decode": replace(decode, run=run, cases=cases)}
    asked = replace(table(), ours="kernel == 'bsr_triton'", where="m == 1 and n == 14336")
    assert rendered(asked, runs).count("(7 processes)") == 0
    assert rendered(asked, fewer).count("(7 processes)") == 1
    question = Question("?", "decode", "m == 1 and n == 14336 and block == '16' and level == 0.9")
    assert "7 processes, a verdict" in headline([replace(question, ours=asked.ours)], fewer)


def test_a_table_that_cannot_be_drawn_says_why(runs: dict[str, Published]) -> None:
    with pytest.raises(ResultError, match="table t: expected one problem at"):
        rendered(table(rows=("block",)), runs)
    with pytest.raises(ResultError, match="expected a published run, found no nothing"):
        rendered(table(runs=("nothing",)), runs)
    with pytest.raises(ResultError, match="expected cases of kernel == 'x', found none"):
        rendered(table(ours="kernel == 'x'"), runs)


def test_a_cell_of_a_portfolio_that_chose_a_dense_kernel_says_so(
    runs: dict[str, Published],
) -> None:
    (shown,) = (table for table in command.drawn(runs) if table.name == "trained")
    found = matched(shown, runs)
    assert found.dense.sum() == rendered(shown, runs).count(" dense |") > 0


def test_kernels_are_ours_by_their_folder() -> None:
    def names(folder: str) -> set[str]:
        files = [f for f in (KERNELS / folder).glob("*.py") if not f.stem.startswith("_")]
        second = {f"{file.stem}_dgrad" for file in files if "\nDGRAD = " in file.read_text()}
        return {file.stem for file in files} | second

    folders = ("bitmap", "bsr", "csr", "spense", "twell")
    assert set(ours()) == set.union(*map(names, folders))
    assert not set(ours()) & (names("dense") | names("peers"))


def test_the_best_peer_of_a_cell_is_the_fastest_of_all_that_are_not_ours(
    runs: dict[str, Published],
) -> None:
    """By medians alone: the tables rank by speed-ups, which differ by the noise of a contest."""
    leads = [table for table in command.drawn(runs) if table.over == PEERS]
    assert len(leads) == 6
    for lead in leads:
        known = pd.concat([runs[run].cases for run in lead.runs])
        rivals = known[(known.status == "ok") & ~known.ours & ~known.twin.astype(bool)]
        least = rivals.groupby(["problem_id", "scope", "cache"]).median_us.min()
        times = rivals.set_index(["problem_id", "scope", "cache", "label"]).median_us
        for line in matched(lead, runs).itertuples():
            cell = line.problem_id, line.scope, line.cache
            assert times[*cell, line.opponent] <= 1.03 * least[cell], (lead.runs, line.opponent)


def test_cublas_masked_counts_as_a_peer_in_the_run_training(runs: dict[str, Published]) -> None:
    leads = {table.name: matched(table, runs) for table in EVERY if table.runs == ("training",)}
    problems = runs["training"].cases.problem_id.nunique()
    assert {len(leads[f"training-{name}"]) for name in ("peers", "sparse")} == {problems}
    assert leads["training-sparse"].opponent.str.contains("cublas_masked").any()


def test_the_headline_names_no_peer_slower_than_the_baseline(runs: dict[str, Published]) -> None:
    lines = headline(QUESTIONS, runs).splitlines()[2:]
    peers = [line.split(" | ")[11] for line in lines]
    assert len(peers) == len(QUESTIONS)
    assert all(float(peer.split()[-1]) >= 1 for peer in peers), peers


def test_every_run_is_listed_and_shown() -> None:
    shown = {run for table in EVERY for run in table.runs}
    shown |= {"quick", "quick-h100", "quick-cpu", "quick-sim", "core-sim"}  # on the site
    again = re.compile(r"claims-.*|announced|.*-(confirmed|elsewhere|again|energy)")
    there = {path.parent.name for path in PUBLISHED.rglob("run.json")}
    assert {name for name in there if not again.fullmatch(name)} <= shown
    assert shown - PERHAPS <= there
    assert len({table.name for table in EVERY}) == len(EVERY)


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str], dict[Path, str]]:
    def write(text: str) -> dict[Path, str]:
        (tmp_path / "suites").mkdir(exist_ok=True)
        (tmp_path / "suites" / "README.md").write_text(text)
        return dict(pages(tmp_path, "whole\n", {"one": "see [it](/results/a.md)"}))

    return write


def test_a_block_is_filled_and_its_links_are_those_of_the_page(
    page: Callable[[str], dict[Path, str]], tmp_path: Path
) -> None:
    found = page("before\n<!-- published: one -->\nold\n<!-- end -->\nafter\n")
    text = "before\n<!-- published: one -->\nsee [it](../results/a.md)\n<!-- end -->\nafter\n"
    assert found[tmp_path / "suites" / "README.md"] == text
    assert found[tmp_path / "results/published/README.md"] == "whole\n"
    assert page(text)[tmp_path / "suites" / "README.md"] == text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<!-- published: two -->\n<!-- end -->\n", "expected a block of one; found 'two'"),
        ("<!-- published: one -->\n", "expected <!-- end --> after"),
    ],
)
def test_a_block_that_cannot_be_filled_is_said(
    page: Callable[[str], dict[Path, str]], text: str, error: str
) -> None:
    with pytest.raises(ResultError, match=re.escape(error)):
        page(text)


def test_check_names_a_page_that_differs_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stale = tmp_path / "README.md"
    stale.write_text("old")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "published", lambda root: {})
    monkeypatch.setattr(command, "differing", lambda root, runs: {stale: "new"})
    monkeypatch.setattr("sys.argv", ["published", "--check"])
    assert command.main() == 1
    assert capsys.readouterr().out.startswith("README.md: differs from the published bundles; run")
    assert stale.read_text() == "old"
    monkeypatch.setattr("sys.argv", ["published"])
    assert command.main() == 0
    assert stale.read_text() == "new"

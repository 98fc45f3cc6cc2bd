"""The Markdown that shows published results holds what the bundles hold."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsebench.errors import ResultError
from sparsebench.reports import defaults, published
from sparsebench.reports.gpu_time import gpu_time
from sparsebench.reports.headline import (
    QUESTIONS,
    PublishedRun,
    Question,
    headline,
    read,
)
from sparsebench.reports.headline_changes import headline_changes
from sparsebench.results.comparison.causes import Cause
from sparsebench.results.run import bundle
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.families import DEFAULT, OURS, ours
from sparsebench.results.tables.noise import Noise, Reliability
from tests.tools.paths import KERNELS, PUBLISHED, ROOT

LARGE = QUESTIONS[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PublishedRun]:
    """Return four runs; to read all takes a minute, and tests/outsider reads them too."""
    root = tmp_path_factory.mktemp("checkout")
    replaced = [PUBLISHED.glob(f"*/earlier/*/{name}") for name in ("sparsity-4096", "decode")]
    for path in chain(PUBLISHED.glob("*/*"), *replaced):
        if path.name in ("chain", "decode", "sparsity-4096", "sparsity-4096-confirmed"):
            link = root / path.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return read(root)


def cells(table: str) -> list[str]:
    """Return the cells of the last line of a Markdown table."""
    return [cell.strip() for cell in table.splitlines()[-1].split("|")[1:-1]]


def test_of_two_gpus_the_one_with_more_runs_keeps_a_name(tmp_path: Path) -> None:
    home, run = tmp_path / "results/published", PUBLISHED / "nvidia-h200" / "chain"
    for name in ("a/chain", "b/chain", "b/other"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(run)
    named = {name: run.home for name, run in read(tmp_path).items()}
    assert named == {
        "a/chain": "results/published/a/chain",
        "chain": "results/published/b/chain",
        "other": "results/published/b/other",
    }


def test_a_figure_rests_on_the_processes_that_timed_both(runs: dict[str, PublishedRun]) -> None:
    where = "m == 1 and n == 14336 and block == '64' and level == 0.9"
    question = Question("?", "decode", where, "kernel == 'bsr_triton'")
    decode = runs["decode"]
    contender = "kernel == 'bsr_triton' and twin == 0 and scope == 'kernel'"
    (case,) = decode.cases.query(f"{where} and {contender}").case_id
    rows = [row for row in decode.run.rows if (row.case.id, row.replicate) != (case, 3)]
    run = replace(decode.run, rows=rows)
    fewer = decode.of(analyse(run).cases, run)
    for of, ending in (
        (runs, "6 processes, a verdict"),
        ({"decode": fewer}, "5 processes, a look"),
    ):
        assert cells(headline(of, [question]))[9].endswith(f" {ending}")


def test_a_short_call_is_shown_inside_a_chain_if_that_was_measured(runs) -> None:
    where = "m == 1 and n == 14336 and block == '64' and level == 0.9"
    shown = cells(headline(runs, [Question("?", "chain", where)]))[3]
    cases = runs["chain"].timed.query(f"{where} and side == 'ours'")
    gains = cases.groupby("scope").gain.max()
    inside, isolated = shown.split(" inside a chain; isolated ")
    assert float(inside.split("×")[0]) == pytest.approx(gains["chain"], rel=0.01)
    assert float(isolated.split("×")[0]) == pytest.approx(gains["kernel"], rel=0.01)


def test_the_confirmed_speedup_is_that_of_the_run_that_confirms(runs, monkeypatch) -> None:
    large, other = runs["sparsity-4096"], runs["sparsity-4096-confirmed"]
    confirms = {"manifest_sha256": bundle.identity(large.run.path)}
    state = other.run.state | {"confirms": confirms}
    both = {"sparsity-4096": large, "alone": replace(other, run=replace(other.run, state=state))}
    alone = cells(headline(both, [LARGE]))[6]
    confirmed = other.timed.query(f"{LARGE.where} and side == 'ours'")
    assert float(alone.split("×")[0]) == pytest.approx(confirmed.gain.max(), abs=0.06)
    assert cells(headline({"sparsity-4096": large}, [LARGE]))[6] == "not yet"
    monkeypatch.setattr(Noise, "reliability", (Reliability.UNRELIABLE, "a reason"))
    assert Reliability.UNRELIABLE in cells(headline(both, [LARGE]))[6]


def test_the_headline_names_the_kernel_that_users_get(runs: dict[str, PublishedRun]) -> None:
    run = runs["sparsity-4096"]
    kernel = str(run.cases.query(f"({LARGE.where}) and kernel == 'bsr_wgmma'").kernel.iloc[0])
    users = run.cases.kernel == kernel
    choice = run.cases.choice.mask(users, f'{{"kernel": "{kernel}"}}')
    cases = run.cases.assign(kernel=run.cases.kernel.mask(users, DEFAULT), choice=choice)
    table = headline(runs | {run.name: run.of(cases)}, [LARGE])
    assert cells(table)[2] == "`bsr_wgmma (by default)`"


def test_the_cells_where_users_get_a_slower_kernel_are_named(runs: dict[str, PublishedRun]) -> None:
    run = runs["sparsity-4096"]
    every = [*defaults.cells_of(run)]
    assert len(every) == (run.timed.kernel == DEFAULT).sum()
    assert all(cell.best["median_us"] <= cell.best_of_ours["median_us"] for cell in every)
    slow = run.timed.kernel.eq(DEFAULT) & run.timed.tile.eq("64")
    times = run.timed.median_us.where(~slow, run.timed.median_us * 1.1 + 0.5)
    slower = replace(run)
    object.__setattr__(slower, "timed", run.timed.assign(median_us=times))
    behind = [cell for cell in defaults.cells_of(slower) if cell.is_behind(cell.best_of_ours)]
    assert {cell.users["tile"] for cell in behind} == {"64"}
    lines = defaults.markdown({run.name: slower}).splitlines()
    assert len(lines) == 4 + len(behind)
    assert f"in {len(every) - len(behind)} of {len(every)} cells" in lines[0]


def test_a_headline_has_the_range_of_all_verdicts(runs: dict[str, PublishedRun]) -> None:
    named = {name: runs[name] for name in ("sparsity-4096", "sparsity-4096-confirmed")}
    gains = [
        run.timed.query(f"{LARGE.where} and kernel == 'bsr_wgmma'").zeros_gain.iloc[0]
        for each in named.values()
        for run in (each, *each.replaced)
    ]
    ends = dict.fromkeys(f"{end:.1f}×" for end in (min(gains), max(gains)))
    shown = cells(headline(named, [LARGE]))[7].replace(" over the same zeros", "")
    assert shown == f"{' to '.join(ends)} in {len(gains)} runs"
    where = "m == 1 and n == 4096 and block == '64' and level == 0.9"
    assert cells(headline(runs, [Question("?", "chain", where)]))[7] == "no verdict"


def test_a_headline_that_cannot_be_written_says_why(runs: dict[str, PublishedRun]) -> None:
    with pytest.raises(ResultError, match="no sparsity-4096"):
        headline({}, [LARGE])
    for where in ("m == 4096", "m == 7"):
        with pytest.raises(ResultError, match="one problem"):
            headline(runs, [replace(LARGE, where=where)])


def test_a_headline_stands_beside_the_one_that_it_replaced(runs: dict[str, PublishedRun]) -> None:
    run = runs["sparsity-4096"]
    question, before, now, change, _ = cells(headline_changes(runs, [LARGE]))
    assert question == LARGE.text
    assert now.startswith(cells(headline(runs, [LARGE]))[3].partition("×")[0])
    gain = run.replaced[-1].timed.query(f"{LARGE.where} and kernel == 'bsr_wgmma'").gain.iloc[0]
    assert float(before.partition("×")[0]) == pytest.approx(gain, abs=0.06)
    assert float(change.partition("×")[0]) == pytest.approx(1, abs=0.1)
    assert "|" not in headline_changes({"sparsity-4096": after(run)}, [LARGE])


def after(run: PublishedRun, *earlier: PublishedRun) -> PublishedRun:
    """Return a run as if it had replaced these."""
    newer = replace(run)
    newer.__dict__["replaced"] = [*earlier]
    return newer


def test_a_change_comes_from_what_the_rows_record(runs: dict[str, PublishedRun]) -> None:
    where = "m == 1 and n == 14336 and block == '64' and level == 0.9"
    decode = after(runs["decode"], runs["decode"].replaced[0])
    cause = cells(headline_changes({"decode": decode}, [Question("?", "decode", where)]))[4]
    assert "the measure: isolated > inside a chain" in cause
    run = runs["sparsity-4096"]
    earlier = run.replaced[0]
    rows = [
        replace(row, samples_us=tuple(1.3 * us for us in row.samples_us), code=f"{row.code}0")
        if row.case.contender.kernel == "bsr_wgmma"
        else row
        for row in earlier.run.rows
    ]
    slower = analyse(replace(earlier.run, rows=rows))
    newer = after(run, earlier.of(slower.cases, slower.run))
    *_, change, cause = cells(headline_changes({"sparsity-4096": newer}, [LARGE]))
    assert float(change.partition("×")[0]) == pytest.approx(1.3, abs=0.1)
    assert f"{Cause.KERNEL}: " in cause


def test_a_page_has_the_gpu_time_of_its_runs(runs: dict[str, PublishedRun]) -> None:
    table = gpu_time(runs, {"a page": ["chain", "decode", "chain"]})
    minutes = sum(runs[name].run.state["seconds"] for name in ("chain", "decode")) / 60
    _, count, time = cells(table)
    assert count == "2"
    assert float(time) == pytest.approx(minutes, rel=0.01)
    decode = runs["decode"]
    on_a_cpu = replace(decode, run=replace(decode.run, environment={"cpu": {"name": "a CPU"}}))
    assert cells(gpu_time({"decode": on_a_cpu}, {"a page": ["decode"]}))[1:] == ["0", "0"]


def test_our_kernels_are_those_of_our_folders() -> None:
    def names(folder: str) -> set[str]:
        files = (KERNELS / folder).glob("*.py")
        return {file.stem for file in files if not file.stem.startswith("_")}

    files = set.union(*map(names, OURS))  # a file may declare its gradient too
    assert files <= {*ours()} <= files | {DEFAULT} | {f"{name}_dgrad" for name in files}
    assert not set(ours()) & (names("dense") | names("peers"))


def test_each_run_has_a_line_and_a_digest(runs: dict[str, PublishedRun]) -> None:
    assert len(published.list_of_runs(runs).splitlines()) == len(runs) + 2
    digests = published.digests(runs).splitlines()[1:-1]
    names = [line.split("  ")[1].split("/")[1] for line in digests]
    assert names[: len(runs)] == [run.name for run in runs.values()]
    assert set(names[len(runs) :]) <= {"earlier"}


@pytest.fixture
def filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: dict[str, PublishedRun]
) -> Callable[[str], str]:
    """Return what a page of another checkout should hold, without what takes seconds."""
    monkeypatch.setattr(published, "BLOCKED", ("docs/README.md",))
    for name in ("headline", "headline_changes", "agreement", "time_of_pages"):
        monkeypatch.setattr(published, name, lambda *arguments: "")
    monkeypatch.setattr(published, "repeated_cases", lambda runs: None)
    monkeypatch.setattr(published.repeats, "text_of", lambda rows: "")
    evidence = SimpleNamespace(text="")
    monkeypatch.setattr(published, "collect_evidence", lambda *arguments: evidence)
    for module, name in ((published.costs, "markdown"), (published.advice, "in_brief")):
        monkeypatch.setattr(module, name, lambda *arguments: "")
    (tmp_path / "docs").mkdir()

    def write(text: str) -> str:
        page = tmp_path / "docs/README.md"
        page.write_text(text)
        return published.differing(tmp_path, runs).get(page, text)

    return write


def test_a_block_is_filled_and_its_links_are_relative(filled: Callable[[str], str]) -> None:
    mark, end = "before\n<!-- published: figure -->\n", "\n<!-- end -->\nafter\n"
    page = filled(f"{mark}old{end}")
    assert page.startswith(mark)
    assert page.endswith(end)
    assert "](../results/published/speedup.svg)" in page
    assert filled(page) == page


@pytest.mark.parametrize(
    "text",
    ["<!-- published: two -->\n<!-- end -->\n", "<!-- published: figure -->\nopen\n"],
    ids=["unknown", "open"],
)
def test_a_block_that_cannot_be_filled_is_an_error(filled: Callable[[str], str], text: str) -> None:
    with pytest.raises(ResultError, match=r"docs/README\.md: expected"):
        filled(text)


def test_check_names_a_page_that_differs_and_writes_nothing(monkeypatch, capsys, tmp_path) -> None:
    stale = tmp_path / "README.md"
    stale.write_text("old")
    monkeypatch.setattr(published, "ROOT", tmp_path)
    monkeypatch.setattr(published, "read", lambda root: {})
    monkeypatch.setattr(published, "differing", lambda root, runs: {stale: "new"})
    monkeypatch.setattr("sys.argv", ["published", "--check"])
    assert published.main() == 1
    assert capsys.readouterr().out.startswith("README.md: ")
    assert stale.read_text() == "old"

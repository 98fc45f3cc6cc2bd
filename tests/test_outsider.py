"""The outsider finds every published figure in the rows, and notices each one that is changed."""

import gzip
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparsebench.harness.plan.suite import read as read_suite
from sparsebench.harness.run.measure import measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.results.run import store
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.frame import records
from tests.outsider import ratios, readme, rows, site
from tests.outsider.__main__ import main
from tests.simulated.in_process import in_this_process
from tests.tools.command_line import output
from tests.tools.paths import PUBLISHED, ROOT, TESTS
from tests.tools.suites import BSR, CSR, linear

PAGE = PUBLISHED / "README.md"
CLAIMS, RUN = ("cusparse-slower", "openai-2017-cublas"), PUBLISHED / "nvidia-h200/sparsity-4096"


def test_every_figure_of_the_pages_is_in_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out


def test_the_outsider_imports_nothing_of_the_project() -> None:
    sources = "".join(file.read_text() for file in (TESTS / "outsider").glob("*.py"))
    imported = {*re.findall(r"^\s*(?:from|import) (\w+(?:\.outsider)?)", sources, re.MULTILINE)}
    assert imported - {*sys.stdlib_module_names} == {"numpy", "pandas", "tests.outsider"}


def changed(pattern: str, text: str) -> str:
    """Return a text in which the last digit of the pattern's group is another one."""
    match = re.search(pattern, text)
    assert match, pattern
    place = match.end(1) - 1
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]


def wrong_with(pattern: str, page: str, reader: Callable[[str], Iterator[str]]) -> int:
    """Return how many figures a reader rejects on a page with one changed digit.

    Without the change it rejects none: see the first test.
    """
    return len([*reader(changed(pattern, page))])


def wrong_in(pattern: str, file: Path, reader: Callable[[Path], Iterator[str]]) -> int:
    """Return the same for a reader of files, and leave the file changed."""
    assert [*reader(file)] == []
    file.write_text(changed(pattern, file.read_text("utf-8")), "utf-8")
    return len([*reader(file)])


CHANGED = {
    "speedup": r"`\w+` \| ([\d.]+)× \[",
    "end of an interval": r"× \[[\d.]+, ([\d.]+)\] \| over",
    "confirmed speedup": r"[\d.]+× \| ([\d.]+)× \[",
    "peer": r"`[\w =]+` ([\d.]+)× \| \d",
    "tokens": r"bf16, m (4096),",
    "card": r"([0-9a-f]{7}\d) \| \d+ \|",
    "power-limited cases": r"reliable \| (\d+) of \d+ \|",
    "processes at a limit": r"H200, one card, limited by [^|]* in (\d+) of \d+ processes \| \[",
    "range of all runs": r"([\d.]+)× in \d+ runs \|",
    "number of all runs": r"× in (\d+) runs \|",
    "slow peers": r"reliable \| \d+ of \d+ \| (\d+) \|",
}


@pytest.mark.parametrize("what", CHANGED)
def test_the_outsider_notices_a_changed_table(what: str) -> None:
    page = PAGE.read_text("utf-8")
    reader = readme.headline if page.index("## Runs") > _start(what, page) else readme.listed
    start = "question" if reader is readme.headline else "run | suite"
    assert 1 <= wrong_with(CHANGED[what], page, lambda p: reader(readme.table(p, start))) <= 6


def _start(what: str, page: str) -> int:
    match = re.search(CHANGED[what], page)
    assert match
    return match.start()


def test_the_outsider_notices_a_changed_agreement_of_two_cards() -> None:
    page = PAGE.read_text("utf-8")
    for start, read, pattern in (
        ("first run", readme.agreement, r"spense-decode-again \| (\d+) \|"),
        ("stratum", readme.strata, r"\| linear_wgrad \| \d+ \| (\d+) of"),
        ("stratum", readme.strata, r"\| below 12 µs \|.*\| ([\d.]+) \|"),
    ):
        reader = lambda text, start=start, read=read: read(readme.table(text, start))  # noqa: E731
        assert wrong_with(pattern, page, reader) == 1


def test_the_outsider_notices_what_differs_in_the_other_tables() -> None:
    page = PAGE.read_text("utf-8")

    def changes(text: str) -> Iterator[str]:
        return readme.changes(*(readme.table(text, s) for s in ("question | before", "question")))

    def gpu_time(text: str) -> Iterator[str]:
        return readme.gpu_time(readme.table(text, "page | runs"))

    for reader, pattern in (
        (changes, r"Are large blocks faster\? \| ([\d.]+)×"),
        (changes, r"Are large blocks faster\? \| [\d.]+×[^|]*\| ([\d.]+)×"),
        (readme.users, r"in (\d+) of \d+ cells that name one"),
        (readme.users, r"included, in \d+ of (\d+)"),
        (readme.users, r"\(by default\) \| ([\d.]+) [µm]s"),
        (gpu_time, r"From which length on\? \| (\d+) \|"),
        (gpu_time, r"All runs \| \d+ \| (\d+)"),
    ):
        assert wrong_with(pattern, page, reader) == 1, pattern


def test_the_outsider_notices_a_changed_caption() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    for pattern in (
        r"blocks of 16 [^×]* ([\d.]+)×",
        r"up to ([\d.]+)× \[",
        r"bsr_wgmma (\d+)\.\d µs",
    ):
        assert wrong_with(pattern, page, readme.captions) == 1, pattern


def test_the_outsider_notices_a_changed_digest() -> None:
    lines = PAGE.read_text("utf-8")
    listed = {*re.findall(r"^([0-9a-f]{64})  (.*)/manifest.json$", lines, re.MULTILINE)}
    assert listed == {(rows.digest(run), run) for run in [*rows.runs(), *rows.earlier()]}


@pytest.mark.exhaustive
def test_the_cells_of_claims_are_in_the_rows(tmp_path: Path) -> None:
    output("claims", "report", *CLAIMS, "--from", RUN, "--out", tmp_path)
    for name in CLAIMS:
        page = tmp_path / "claims" / f"{name}.html"
        assert wrong_in(r'<td class="num">([\d.]+)×', page, site.claimed) == 1


LAYERS = linear("n: 4096, k: 4096, m: [16, 4096], sparsity: 0.9", BSR, CSR)


def test_the_outsider_compares_with_unpruned_weights_as_the_tables_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is simulated, because no published one has such rows yet."""
    in_this_process(monkeypatch)
    (tmp_path / "mine.yaml").write_text(LAYERS)
    run = tmp_path / "gpu/mine"
    measure(read_suite(str(tmp_path / "mine.yaml")), Flags("sim", replicates=6), run, None)
    (run / "rows.jsonl.gz").write_bytes(gzip.compress((run / "rows.jsonl").read_bytes()))
    monkeypatch.setattr(rows, "HOME", tmp_path)
    outside = rows.cases.__wrapped__("gpu/mine")
    assert (outside.base == "dense/cublas, unpruned weights").sum() == 4
    for case in records(analyse(store.read(run)).timed):
        contest = outside[outside.tokens == str(case["m"])]
        ours = contest[contest.label == case["label"]].blocks
        for gain, eligible in (
            ("gain", rows.dense(contest)),
            ("zeros_gain", rows.on_zeros(contest) | rows.dense(contest) & (case["m"] == 16)),
        ):
            base = ratios.fastest(contest, eligible)
            assert base is not None
            assert ratios.ratio(ours.iloc[0], base.blocks)[0] == pytest.approx(case[gain])


GRID = {  # the titles of the cells of a site's index
    "speedup": r'title="[^"]+ at [^"]+?: \w[^",;]*, ([\d.]+)×',
    "end of an interval": r'title="[^"]+ at [^"]+?: \w[^",;]*, [\d.]+× \[[\d.]+, ([\d.]+)\]',
}


@pytest.mark.exhaustive
def test_every_figure_of_a_site_is_in_the_rows(tmp_path: Path) -> None:
    """Two runs have replaced ones beside them, whose addresses and pages are their own."""
    names = "quick", "earlier/2026-11-24-84a765b/quick", "spense-two-four", "serving-1-128"
    names = *names, "earlier/2026-11-24-84a765b/spense-two-four"
    shown = [PUBLISHED / "nvidia-h200" / name for name in names]
    output("publish", *shown, "--out", tmp_path)
    index = tmp_path / "index.html"
    page = index.read_text("utf-8")
    assert page.count('class="cell') > 5
    for what, pattern in GRID.items():
        index.write_text(page, "utf-8")
        assert wrong_in(pattern, index, site.grids) == 1, what
    for name in ("formats/bsr.html", "kernels/bsr_small.html", "kernels/ffn_sparse.html"):
        assert wrong_in(GRID["speedup"], tmp_path / name, site.grids) == 1, name
    of_quick = r'<a href="h200/quick/index.html">.*?<b>([\d.]+)× \['
    assert wrong_in(of_quick, tmp_path / "runs.html", site.listed_runs) == 1
    of_servers = tmp_path / "h200/serving-1-128/index.html"
    assert wrong_in(r"<span>requests per second: [\d.]+ \[(\d+)", of_servers, site.answer) == 1
    for file in {*tmp_path.glob("h200/*/index.html")} - {of_servers}:
        # With another last digit it would be the speedup of another case.
        assert wrong_in(r"<b>(\d)[\d.]*× \[", file, site.answer) == 1, file

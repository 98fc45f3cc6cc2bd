"""Headlines alone, plans on two cards, energy: as the runs have them, and an outsider agrees."""

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import measure
from sparsebench.harness.run.repeat import confirm, reproduce
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.shared_runs.campaign_pieces import pack
from sparsebench.reports.published._again import elsewhere, energy, twins
from sparsebench.reports.published._runs import Published, published
from sparsebench.reports.published._summary import Question, headline
from sparsebench.reports.site.cards import card
from sparsebench.results import bundle
from sparsebench.results.analysis import analyse
from sparsebench.results.noise import Noise, Reliability
from tests import outsider
from tests.simulated.in_process import in_this_process

SUITE = """
schema: sparsebench/suite@1
title: Again
problems:
  - {op: linear, n: 4096, k: 4096, m: [16, 64], dtype: bf16, pattern: blocks, block: 64,
     sparsity: 0.9}
contenders:
  - {format: bsr, kernel: bsr_small, params: {block: $block}}
baselines:
  - {format: dense, kernel: cublas}
  - {format: dense, kernel: torch_dense}
"""
LARGE = Question("Large?", "first", "m == 64")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a checkout's root with a run, its cases alone, and the plan again on another card."""
    root = tmp_path_factory.mktemp("root")
    home = root / "results/published/sim"
    home.mkdir(parents=True)
    (root / "again.yaml").write_text(SUITE)
    cards = []
    for seed in (1, 2):
        (root / f"{seed}.yaml").write_text(f"seed: {seed}")
        cards.append(f"sim:{root}/{seed}.yaml")
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch)
        suite = read(str(root / "again.yaml"), None)
        for name, device in zip(("first", "second"), cards, strict=True):
            measure(suite, Flags(device, replicates=6), home / name, None)
        only = "m=64 kernel=bsr_small"
        first, quiet = home / "first", lambda done, total, problem: None
        given = first, cards[0], None, home / "alone", quiet
        confirm(*given, cases=1, replicates=6, condition=only)
        reproduce(first, cards[1], None, home / "third", quiet)
        part = Flags(cards[1], replicates=6, only="m=16")
        measure(suite, part, home / "fourth", None)
        for run in home.iterdir():
            pack(run)
        patch.setattr(outsider, "HOME", root / "results/published")
        outsider.cases.cache_clear()
        yield root
    outsider.cases.cache_clear()


@pytest.fixture
def runs(root: Path) -> dict[str, Published]:
    return published(root)


def page(text: str) -> str:
    """Return a table as it stands on a page below results/published."""
    return text.replace("](/results/published/", "](") + "\n"


def test_a_headline_says_that_the_run_that_confirms_it_is_unreliable(
    runs: dict[str, Published], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = page(headline([LARGE], runs)).splitlines()[-1].split(" | ")[10]
    monkeypatch.setattr(Noise, "reliability", (Reliability.UNRELIABLE, "so it is"))
    doubtful = page(headline([LARGE], runs)).splitlines()[-1].split(" | ")[10]
    assert doubtful == f"{plain}, unreliable"


def test_a_headline_has_the_figure_of_the_run_that_confirms_it(
    runs: dict[str, Published],
) -> None:
    text = page(headline([LARGE], runs))
    alone = text.splitlines()[-1].split(" | ")[10]
    cases = runs["alone"].cases
    (own,) = cases[(cases.kernel == "bsr_small") & ~cases.twin.astype(bool)].to_dict("records")
    assert abs(float(alone.split()[0]) - own["speedup"]) < 0.006
    assert outsider.checked(text) == []
    assert outsider.checked(text.replace(alone, "7.77 [7.76, 7.78]"))


def test_a_headline_that_nobody_confirmed_says_so(runs: dict[str, Published]) -> None:
    lone = {name: run for name, run in runs.items() if name != "alone"}
    assert " | not yet | " in headline([LARGE], lone)


def test_a_plan_on_two_cards_shows_how_far_they_are_apart(runs: dict[str, Published]) -> None:
    text = page(elsewhere(runs))
    lines = [line.split(" | ") for line in text.splitlines()[2:]]
    assert [line[0].split("]")[0] for line in lines] == ["| [first"] * 3
    found = {re.findall(r"\[(\w+)\]", line[1])[0]: line[3:5] for line in lines}
    assert found == {
        "second": ["its own search", "4"],
        "third": ["those of the first run", "4"],
        "fourth": ["its own search", "2"],  # half of the plan
    }
    assert {line[-1] for line in lines} == {"reproduced |"}
    assert outsider.checked(text) == []
    most = lines[0][7]
    assert outsider.checked(text.replace(most, "1.777"))
    assert elsewhere({"first": runs["first"]}) == ""


def test_a_site_says_what_was_made_of_another_run(runs: dict[str, Published]) -> None:
    roles = {n: card(run.run, analyse(run.run), n, n).role for n, run in runs.items()}
    assert roles == {
        "first": "",
        "second": "",
        "alone": "chosen cases of an earlier run, alone",
        "third": "an earlier run again",
        "fourth": "",
    }


def test_twins_are_counted_over_all_verdicts(runs: dict[str, Published]) -> None:
    text = page(twins(runs))
    (line,) = (line.split(" | ") for line in text.splitlines()[2:])
    pairs = sum(len(run.noise.pairs) for run in runs.values())
    assert line[:3] == ["| simulated H200", "5", str(pairs)]
    assert outsider.checked(text) == []
    assert outsider.checked(text.replace(f"| {pairs} |", f"| {pairs + 1} |"))
    assert twins({}) == ""


def test_energy_is_told_by_case_and_beside_dense(root: Path, runs: dict[str, Published]) -> None:
    assert energy(runs) == ""
    used = root / "results/published/sim/used"
    shutil.copytree(root / "results/published/sim/first", used)
    try:
        _with_energy(used)
        text = page(energy(published(root)))
        sparse = next(line for line in text.splitlines() if "bsr_small" in line)
        assert sparse.split(" | ")[5:7] == ["102.5 [100, 105]", "48.75 [47.5, 50]"]
        assert outsider.checked(text) == []
        assert outsider.checked(text.replace("48.75", "48.76"))
    finally:
        shutil.rmtree(used)


def _with_energy(run: Path) -> None:
    """Give every row an energy: 0.2 J of cuBLAS, a tenth of a joule and more of the others."""
    rows = [json.loads(line) for line in bundle.content(run, bundle.ROWS).splitlines()]
    for row in rows[1:]:
        kernel = row["case"]["contender"]["kernel"]
        joule = {"cublas": 0.2, "bsr_small": 0.1 + 0.001 * row["replicate"]}
        row["energy_j"] = joule.get(kernel, 0.3)
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    (run / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))

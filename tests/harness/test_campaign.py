"""A campaign: measured in order and in pieces, on several cards and in several sittings."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from math import inf, log
from pathlib import Path
from time import monotonic

import pytest

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.costs.estimates import EntryEstimate, campaign_estimates
from sparsebench.harness.costs.measured_times import times_on
from sparsebench.harness.plan.selection import planned
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import Progress, Stopped
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.validation import validate
from sparsebench.harness.shared_runs import campaign_pieces as piecewise
from sparsebench.harness.shared_runs import campaign_sitting as sittings
from sparsebench.harness.shared_runs.campaign_file import Campaign, campaign
from sparsebench.harness.shared_runs.campaign_publication import publish
from sparsebench.harness.shared_runs.campaign_publication import published as published_before
from sparsebench.harness.shared_runs.campaign_sitting import Sitting, state
from sparsebench.reports import published
from sparsebench.results import bundle, store
from tests.simulated.in_process import in_this_process
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED

SUITE = """
schema: sparsebench/suite@1
title: In pieces
problems:
  - {op: linear, n: 4096, k: 4096, m: [16, 64], dtype: bf16, pattern: blocks, block: 64,
     sparsity: [0.5, 0.9]}
contenders:
  - {format: bsr, kernel: bsr_triton, params: {block: $block}}
  - {format: bsr, kernel: bsr_small, params: {block: $block}}
baselines:
  - {format: dense, kernel: cublas}
"""
ENTRIES = """
schema: sparsebench/campaign@1
title: Small
replicates: 2
entries:
  - {suite: FOLDER/several.yaml, only: kernel=bsr_triton}
  - {name: other, suite: FOLDER/several.yaml, only: kernel!=bsr_triton m=16, replicates: 1}
"""
QUIET: Progress = lambda done, total, problem: None  # noqa: E731


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)


@pytest.fixture
def cards(tmp_path: Path) -> list[str]:
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"seed: {number}")
    return [f"sim:{tmp_path}/{number}.yaml" for number in (1, 2)]


@pytest.fixture
def asked(tmp_path: Path) -> Callable[[str], Campaign]:
    """Return a function that reads a campaign with further entries."""

    def make(more: str = "") -> Campaign:
        (tmp_path / "several.yaml").write_text(SUITE)
        file = tmp_path / "campaign.yaml"
        file.write_text((ENTRIES + more).replace("FOLDER", str(tmp_path)))
        return campaign(str(file))

    return make


def stopping(after: int) -> Progress:
    """Return a progress callback that interrupts the thread that measures."""

    def show(done: int, total: int, problem: str) -> None:
        if done >= after:
            raise KeyboardInterrupt

    return show


def sit(
    asked: Campaign, to: Path, *devices: str, until: float = inf, progress: Progress = QUIET
) -> Sitting:
    sitting = Sitting(asked, asked.entries, to, until=until)
    sitting.run(devices, progress)
    return sitting


def stopped(asked: Campaign, to: Path, device: str, after: int) -> None:
    with pytest.raises((Stopped, KeyboardInterrupt)):
        sit(asked, to, device, progress=stopping(after))


def test_each_entry_becomes_a_sealed_run_that_validates(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    said = sit(asked(), tmp_path / "runs", cards[0]).reasons
    assert said == {"several": "", "other": ""}
    for name, replicates in (("several", 2), ("other", 1)):
        run = tmp_path / "runs" / name
        assert all(line.checked for line in validate(run))
        assert store.read(run).state["flags"]["replicates"] == replicates
        assert (run / "rows.jsonl.gz").exists()
        assert not (run / "rows.jsonl").exists()
        assert not piecewise.parts(run).exists()
    kernels = {row.case.contender.kernel for row in store.read(tmp_path / "runs" / "other").rows}
    assert kernels == {"bsr_small", "cublas"}


def test_a_stopped_entry_is_finished_on_another_card_in_another_folder(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    stopped(asked(), tmp_path / "runs", cards[0], after=12)
    assert not (tmp_path / "runs" / "several").exists()
    begun = state(tmp_path / "runs", asked().entries[0])
    assert (begun.status, begun.cards) == ("begun", 1)
    assert 0 < begun.done < begun.of
    texts = [*(tmp_path / "runs").rglob("*.json")]
    texts = [
        file for file in texts if file.name != "environment.json"
    ]  # the simulated GPU's names its file
    assert not [file for file in texts if str(tmp_path) in file.read_text()]
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "runs", moved)
    shutil.rmtree(tmp_path / "runs")
    sit(asked(), moved, cards[1])
    run = store.read(moved / "several")
    keys = Counter((row.case.id, row.replicate) for row in run.rows)
    suite = read(str(tmp_path / "several.yaml"))
    wanted = [c for c in planned(suite, "sim", "kernel=bsr_triton") if not c.reference]
    assert len(keys) == 2 * sum(len(contest.contenders) for contest in wanted)
    assert set(keys.values()) == {1}
    assert {row.device for row in run.rows} == {"sim-1", "sim-2"}
    assert len(run.state["shards"]) == 2
    assert all(line.checked for line in validate(moved / "several"))


def test_pieces_need_the_path_of_a_new_run(asked: Callable[[str], Campaign]) -> None:
    suite, engine = asked().entries[0].read(None), piecewise.Pieces("card", inf).measure
    for out, resume in ((None, Path("old")), (None, None)):
        with pytest.raises(ResultError, match="expected the name of a new run"):
            engine(suite, Flags("cpu"), out, resume)


def test_an_interrupted_entry_is_not_whole(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    sitting = Sitting(asked(), asked().entries, tmp_path / "runs")
    with pytest.raises((Stopped, KeyboardInterrupt)):
        sitting.run(cards[:1], stopping(12))
    assert sitting.reasons == {"several": "interrupted"}


def test_the_same_card_resumes_its_own_piece(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    stopped(asked(), tmp_path / "runs", cards[0], after=12)
    piece = tmp_path / "runs" / "several.parts" / "1"
    before = {(r.case.id, r.replicate): r.samples_us for r in store.rows(piece)}
    numbers = [part.number for part in sit(asked(), tmp_path / "runs", cards[0])._parts]
    assert numbers == [1, 1]  # of each entry; contests keep the order that was drawn
    run = store.read(tmp_path / "runs" / "several")
    after = {(r.case.id, r.replicate): r.samples_us for r in [*run.reference, *run.rows]}
    assert before.items() <= after.items()
    assert "shards" not in run.state
    assert "part" not in run.state


def test_a_killed_piece_keeps_its_complete_contests(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    stopped(asked(), tmp_path / "runs", cards[0], after=12)
    piece = tmp_path / "runs" / "several.parts" / "1"
    piecewise.unpack(piece)
    (piece / bundle.MANIFEST).unlink()
    with (piece / "rows.jsonl").open("a") as file:
        file.write('{"case":')
    sit(asked(), tmp_path / "runs", cards[1])
    assert all(line.checked for line in validate(tmp_path / "runs" / "several"))


def test_two_cards_measure_an_entry_each(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    sit(asked(), tmp_path / "runs", *cards)
    for name in ("several", "other"):
        assert (tmp_path / "runs" / name / "manifest.json").exists()


def test_nothing_begins_in_the_last_seconds_and_an_early_end_is_reported(
    asked: Callable[[str], Campaign],
    cards: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = monotonic() + sittings.LEAST_S / 2
    assert sit(asked(), tmp_path / "runs", cards[0], until=late).reasons == {}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["alike.json"]
    monkeypatch.setattr(sittings, "LEAST_S", -100.0)
    said = sit(asked(), tmp_path / "runs", cards[0], until=monotonic() - 1).reasons
    assert said["several"].startswith("the time ended after ")
    assert not (tmp_path / "runs" / "several").exists()


def test_a_missing_piece_is_an_error(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    stopped(asked(), tmp_path / "runs", cards[0], after=12)
    shutil.rmtree(tmp_path / "runs" / "several.parts" / "1")
    with pytest.raises(ResultError, match="expected 1 pieces, found no 1"):
        sit(asked(), tmp_path / "runs", cards[1])
    assert not (tmp_path / "runs" / "several").exists()


def test_a_changed_piece_is_refused_and_other_entries_are_measured(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    stopped(asked(), tmp_path / "runs", cards[0], after=12)
    piece = tmp_path / "runs" / "several.parts" / "1"
    environment = json.loads((piece / "environment.json").read_text())
    (piece / "environment.json").write_text(json.dumps(environment | {"commit": "0"}))
    sitting = sit(asked(), tmp_path / "runs", cards[1])
    assert "expected SHA-256" in sitting.reasons["several"]
    assert sitting.refused == {"several"}
    assert not (tmp_path / "runs" / "several").exists()
    assert (tmp_path / "runs" / "other" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["code_sha256", "gpu.name"])
def test_other_code_or_another_kind_of_card_is_refused_before_measuring(
    name: str, asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    store.write_json(tmp_path / "runs" / "alike.json", {name: "another"})
    with pytest.raises(ResultError, match=f"expected {name} another as in the first part"):
        sit(asked(), tmp_path / "runs", cards[0])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["alike.json"]


def test_changed_libraries_are_reported(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    stopped(asked(), tmp_path / "runs", cards[0], after=12)
    alike = tmp_path / "runs" / "several.parts" / "alike.json"
    alike.write_text(json.dumps(json.loads(alike.read_text()) | {"gpu.driver": "1.0"}))
    sitting = sit(asked(), tmp_path / "runs", cards[1])
    assert "expected gpu.driver 1.0" in sitting.reasons["several"]
    assert (tmp_path / "runs" / "other").exists()


def test_a_run_of_another_selection_is_an_error(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    sit(asked(), tmp_path / "runs", cards[0])
    file = tmp_path / "campaign.yaml"
    file.write_text(file.read_text().replace("m=16", "m=64"))
    with pytest.raises(ResultError, match="expected only 'kernel!=bsr_triton m=64' as in the camp"):
        state(tmp_path / "runs", campaign(str(file)).entries[1])


AFTER = """
  - {confirm: several, only: m=64, replicates: 6}
  - {reproduce: several}
"""


def test_a_confirming_entry_measures_its_cells_and_a_reproduction_needs_another_card(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    first = sit(asked(AFTER), tmp_path / "runs", cards[0])
    assert first.reasons["several-again"] == "waits for another card of the kind"
    assert {name for name, why in first.reasons.items() if why} == {"several-again"}
    confirmed = store.read(tmp_path / "runs" / "several-confirmed")
    assert {row.case.problem["m"] for row in confirmed.rows} == {64}
    assert confirmed.state["confirms"]["manifest_sha256"]
    second = sit(asked(AFTER), tmp_path / "runs", cards[1])
    assert second.reasons == {"several-again": ""}
    again = store.read(tmp_path / "runs" / "several-again")
    assert again.state["reproduces"]["manifest_sha256"] == bundle.identity(
        tmp_path / "runs" / "several"
    )
    assert {row.device for row in again.rows} == {"sim-2"}


def test_an_entry_apart_from_another_is_measured_on_another_card(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    more = "  - {name: far, suite: FOLDER/several.yaml, replicates: 1, apart: several}\n"
    first = sit(asked(more), tmp_path / "runs", cards[0])
    assert first.reasons == {
        "several": "",
        "other": "",
        "far": "waits for another card of the kind",
    }
    assert sit(asked(more), tmp_path / "runs", cards[1]).reasons == {"far": ""}
    far = store.read(tmp_path / "runs" / "far")
    assert {row.device for row in far.rows} == {"sim-2"}
    assert "reproduces" not in far.state


def test_a_card_first_finishes_the_entry_that_it_has_begun(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    to, whole = tmp_path / "runs", asked()
    sitting = Sitting(whole, whole.named(["other"]), to)
    with pytest.raises((Stopped, KeyboardInterrupt)):
        sitting.run(cards[1:], stopping(3))
    assert state(to, whole.entries[1]).status == "begun"
    sit(whole, to, *cards)
    devices = {
        name: {row.device for row in store.read(to / name).rows} for name in ("several", "other")
    }
    assert devices == {"several": {"sim-1"}, "other": {"sim-2"}}


def test_an_entry_waits_for_the_run_that_it_confirms(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    whole = asked(AFTER)
    sitting = Sitting(whole, whole.named(["several-confirmed"]), tmp_path / "runs")
    sitting.run(cards[:1], QUIET)
    assert sitting.reasons == {"several-confirmed": "waits for several"}


def test_claims_are_judged_by_the_runs_above_and_measure_the_rest(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    more = "  - {claims: [cusparse-slower], replicates: 1}\n"
    sit(asked(more), tmp_path / "runs", cards[0])
    folder = tmp_path / "runs" / "claims"
    verdicts = json.loads((folder / "verdicts.json").read_text())
    assert [*verdicts["claims"]] == ["cusparse-slower"]
    assert (folder / "sparsity" / "rows.jsonl.gz").exists()
    assert state(tmp_path / "runs", asked(more).entries[-1]).status == "whole"


WRONG = {
    "- {only: m=16}": "expected one of suite, confirm, reproduce, claims; found none",
    "- {suite: quick, confirm: quick}": "found suite and confirm",
    "- {suite: quik}": r"found 'quik' \(did you mean quick\?\)",
    "- {suite: quick, only: m=7}": "expected at least one case of m=7, found none",
    "- {suite: quick, only: kernel!=no_such}": "at least one case of kernel!=no_such, found none",
    "- {confirm: quick}": "expected an entry above it, found 'quick'",
    "- {suite: FOLDER/several.yaml}": "unique name",
    "- {suite: quick, name: ../up}": "unique name",
    "- {suite: quick, replicates: two}": r"entries\.2\.replicates: expected a valid integer",
}


@pytest.mark.parametrize("entry", WRONG)
def test_an_invalid_campaign_is_one_clear_error(
    entry: str, asked: Callable[[str], Campaign]
) -> None:
    with pytest.raises(SuiteError, match=WRONG[entry]):
        asked(f"  {entry}\n")


@pytest.fixture(scope="module")
def estimates() -> list[EntryEstimate]:
    return campaign_estimates(campaign("published"), PUBLISHED / "nvidia-h200")


@pytest.mark.exhaustive
def test_the_published_campaign_costs_at_most_its_budget(estimates: list[EntryEstimate]) -> None:

    assert not [each.entry.name for each in estimates if each.seconds is None]
    assert "as the run dlmc-csr" in {
        each.how for each in estimates if each.entry.name == "dlmc-csr"
    }
    assert {each.entry.replicates for each in estimates} >= {8}


@pytest.mark.exhaustive
def test_the_published_campaign_costs_at_most_two_hours(estimates: list[EntryEstimate]) -> None:
    assert (
        sum(each.seconds or 0.0 for each in estimates) <= campaign("published").budget_s <= 120 * 60
    )


@pytest.mark.exhaustive
def test_a_reproduction_takes_less_time_because_it_does_not_search(
    estimates: list[EntryEstimate],
) -> None:
    cost = {each.entry.name: each.seconds or 0.0 for each in estimates}
    assert 0 < cost["spense-decode-again"] < cost["spense-decode"]


@pytest.mark.exhaustive
def test_a_dense_product_is_searched_once_per_process() -> None:
    """In published rows a product takes 1 s at first, and 0.1 to 0.3 s when it is repeated."""
    there = times_on(PUBLISHED / "nvidia-h200")
    size = log(64 * 4096 * 4096)
    searched, met = (there.first["dense/cublas"].case_s(size, met) for met in (False, True))
    assert met < 0.4 * searched
    assert there.searching["dense/cublas"].case_s(size) < 0.4 * searched


def test_the_campaign_commands(asked: Callable[[str], Campaign], tmp_path: Path) -> None:
    asked()
    file, to = tmp_path / "campaign.yaml", tmp_path / "runs"
    status = sparsebench("campaign", "status", file, "--out", to)
    assert "0 of 2 entries are whole" in status.stdout
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "quick").symlink_to(PUBLISHED / "nvidia-h200" / "quick")
    cost = sparsebench("campaign", "plan", file, "--gpu", tmp_path / "gpu")
    assert "of a budget of 2:00:00" in cost.stdout, cost.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        elsewhere = sparsebench("campaign", "plan", file)
    assert elsewhere.returncode == 2
    assert "--gpu: expected published runs" in elsewhere.stderr
    wrong = sparsebench("campaign", "run", file, "--out", to, "--device", "sim", "--budget", "1s")
    assert "--budget: expected 60s or more" in wrong.stderr
    run = sparsebench("campaign", "run", file, "--out", to, "--device", "sim", "--entry", "other")
    assert run.returncode == 0, run.stderr
    assert "1 of 1 entry is whole" in run.stdout


def test_a_campaign_replaces_the_published_runs_completely_or_not_at_all(
    asked: Callable[[str], Campaign], cards: list[str], tmp_path: Path
) -> None:
    into, to = tmp_path / "root" / "results" / "published", tmp_path / "runs"
    before = into / "simulated-h200" / "older"
    before.mkdir(parents=True)
    (before / "run.json").write_text("{}")
    with pytest.raises(ResultError, match="found unfinished several, other"):
        publish(asked(), to, into)
    sit(asked(), to, cards[0])
    (to / "other" / "worker.log").write_text("a warning")
    with pytest.raises(ResultError, match="expected a published run, found no sparsity-4096"):
        publish(asked(), to, into)  # the pages need runs that this campaign does not have
    assert [*before.parent.iterdir()] == [before]
    hidden = into.with_name(".simulated-h200.before")
    shutil.copytree(before.parent, hidden)
    with pytest.raises(ResultError, match=r"h200\.before: expected none"):
        publish(asked(), to, into)
    assert [*before.parent.iterdir()] == [before]
    shutil.rmtree(hidden)
    drawn_from = list[str]()

    def write(root: Path) -> list[Path]:
        files = (root / "results/published").glob("*/*/run.json")
        drawn_from.extend(sorted(file.parent.name for file in files))
        return [root / "README.md"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "write", write)
        assert publish(asked(), to, into) == [tmp_path.resolve() / "root" / "README.md"]
    assert (
        drawn_from == sorted(path.name for path in before.parent.iterdir()) == ["other", "several"]
    )
    assert [path.name for path in into.iterdir()] == ["simulated-h200"]
    code = store.read(to / "other").environment["code_sha256"]
    for digest, names in ((code, ["several", "other"]), ("0", [])):
        store.write_json(to / "alike.json", {"code_sha256": digest, "gpu.name": "simulated H200"})
        assert published_before(asked(), to, into) == names

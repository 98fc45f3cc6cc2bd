"""A campaign: measured in order and in pieces, on several cards and in several sittings."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic

import pytest

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.bench import energy
from sparsebench.harness.claims import checking
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import Progress, Stopped
from sparsebench.harness.run.validation import validate
from sparsebench.harness.shared_runs import campaign_sitting as sittings
from sparsebench.harness.shared_runs.campaign_file import Campaign, campaign
from sparsebench.harness.shared_runs.campaign_publication import publish
from sparsebench.harness.shared_runs.campaign_sitting import Sitting, state
from sparsebench.harness.shared_runs.run_paths import parts_of
from sparsebench.reports import published
from sparsebench.results.run import bundle, store
from tests.simulated.in_process import stopping
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.suites import BSR, linear

pytestmark = pytest.mark.usefixtures("in_one_process")

BSR_SMALL = "{format: bsr, kernel: bsr_small, params: {block: $block}}"
SUITE = linear("n: 4096, k: 4096, m: [16, 64], sparsity: [0.5, 0.9]", BSR, BSR_SMALL)
ENTRIES = """
schema: sparsebench/campaign@1
title: Small
replicates: 2
entries:
  - {suite: FOLDER/several.yaml, only: kernel=bsr_triton}
  - {name: other, suite: FOLDER/several.yaml, only: kernel!=bsr_triton m=16, replicates: 1}
"""


@dataclass(frozen=True)
class Trial:
    """A campaign whose entries two simulated cards measure into `out`."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "runs"

    @property
    def piece(self) -> Path:
        """Return the first piece of the first entry."""
        return self.out / "several.parts" / "1" / "1"

    def campaign(self, more: str = "") -> Campaign:
        """Read the campaign, with further entries."""
        file = self.folder / "campaign.yaml"
        file.write_text((ENTRIES + more).replace("FOLDER", str(self.folder)))
        return campaign(str(file))

    def sit(
        self,
        *cards: int,
        more: str = "",
        names: tuple[str, ...] = (),
        until: float = inf,
        progress: Progress = lambda done, total, problem: None,
    ) -> Sitting:
        """Measure on the cards of these numbers, each 1 or 2."""
        whole = self.campaign(more)
        sitting = Sitting(whole, whole.select(names), self.out, until=until)
        sitting.run([f"sim:{self.folder}/{number}.yaml" for number in cards], progress)
        return sitting

    def stop(self, card: int, after: int = 12, names: tuple[str, ...] = ()) -> None:
        """Interrupt a sitting after some contests."""
        with pytest.raises((Stopped, KeyboardInterrupt)):
            self.sit(card, names=names, progress=stopping(after))


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    (tmp_path / "several.yaml").write_text(SUITE)
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"seed: {number}")
    return Trial(tmp_path)


def test_each_entry_becomes_a_sealed_run_that_validates(trial: Trial) -> None:
    assert trial.sit(1).reasons == {"several": "", "other": ""}
    for name, replicates in (("several", 2), ("other", 1)):
        run = trial.out / name
        assert all(line.checked for line in validate(run))
        assert store.read(run).state["flags"]["replicates"] == replicates
        assert (run / "rows.jsonl.gz").exists()
        assert not (run / "rows.jsonl").exists()
        assert not parts_of(run).exists()
    kernels = {row.case.contender.kernel for row in store.read(trial.out / "other").rows}
    assert kernels == {"bsr_small", "cublas"}


def test_a_stopped_entry_is_finished_on_another_card_in_another_folder(trial: Trial) -> None:
    trial.stop(1)
    assert not (trial.out / "several").exists()
    begun = state(trial.out, trial.campaign().entries[0])
    assert (begun.status, begun.cards) == ("begun", 1)
    assert 0 < begun.done < begun.of
    assert str(trial.out) not in (trial.piece / "run.json").read_text()
    moved = Trial(trial.folder / "elsewhere")
    moved.folder.mkdir()
    for name in ("several.yaml", "1.yaml", "2.yaml", "runs"):
        (trial.folder / name).rename(moved.folder / name)
    moved.sit(2)
    run = store.read(moved.out / "several")
    keys = Counter((row.case.id, row.replicate) for row in run.rows)
    suite = read(str(moved.folder / "several.yaml"))
    contests = [c for c in planned_contests(suite, "sim", "kernel=bsr_triton") if not c.reference]
    assert len(keys) == 2 * sum(len(contest.contenders) for contest in contests)
    assert set(keys.values()) == {1}
    assert {row.device for row in run.rows} == {"sim-1", "sim-2"}
    assert len(run.state["shards"]) == 2
    assert all(line.checked for line in validate(moved.out / "several"))


def test_a_killed_piece_keeps_its_complete_contests(trial: Trial) -> None:
    trial.stop(1)
    (trial.piece / bundle.MANIFEST).unlink()
    with (trial.piece / "rows.jsonl").open("a") as file:
        file.write('{"case":')
    trial.sit(2)
    assert all(line.checked for line in validate(trial.out / "several"))


def test_nothing_begins_in_the_last_seconds_and_an_early_end_is_reported(trial, monkeypatch):
    soon = monotonic() + sittings.LEAST_S / 2
    assert trial.sit(1, until=soon).reasons == {}
    assert [path.name for path in trial.out.iterdir()] == ["alike.json"]
    monkeypatch.setattr(sittings, "LEAST_S", -100.0)
    reasons = trial.sit(1, until=monotonic() - 1).reasons
    assert all(reason.startswith("the time ended after 0 of ") for reason in reasons.values())
    assert not (trial.out / "several").exists()


def test_an_entry_that_another_process_measures_is_left_to_it(trial: Trial) -> None:
    trial.stop(1)
    with store.lock_run(trial.piece.parent):
        sitting = trial.sit(2)
    assert "expected no other process, found one" in sitting.reasons["several"]
    assert not (trial.out / "several").exists()
    assert (trial.out / "other" / "manifest.json").exists()


@pytest.mark.parametrize("older", ["several.parts/pieces.json", "several.shards/plan.json"])
def test_an_entry_that_an_older_version_began_is_refused(older: str, trial: Trial) -> None:
    file = trial.out / older
    file.parent.mkdir(parents=True)
    file.write_text('{"begun": 1}')
    with pytest.raises(ResultError, match="an older version"):
        trial.sit(1)
    assert not (trial.out / "several").exists()


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("1/1/environment.json", {"commit": "0"}, "expected SHA-256"),
        ("alike.json", {"gpu.driver": "1.0"}, "expected gpu.driver 1.0"),
    ],
)
def test_an_entry_with_a_changed_piece_is_refused_and_others_are_measured(
    file, change, reason, trial
) -> None:
    trial.stop(1)
    path = trial.piece.parents[1] / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    sitting = trial.sit(2)
    assert reason in sitting.reasons["several"]
    assert sitting.refused == {"several"}
    assert not (trial.out / "several").exists()
    assert (trial.out / "other" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["code_sha256", "gpu.name"])
def test_other_code_or_another_kind_of_card_is_refused_before_measuring(name, trial) -> None:
    trial.out.mkdir()
    store.write_json(trial.out / "alike.json", {name: "another"})
    with pytest.raises(ResultError, match=f"expected {name} another as in the first part"):
        trial.sit(1)
    assert [path.name for path in trial.out.iterdir()] == ["alike.json"]


def test_a_run_of_another_selection_is_an_error(trial: Trial) -> None:
    trial.sit(1)
    file = trial.folder / "campaign.yaml"
    file.write_text(file.read_text().replace("m=16", "m=64"))
    with pytest.raises(ResultError, match="expected only 'kernel!=bsr_triton m=64' as in the camp"):
        state(trial.out, campaign(str(file)).entries[1])


AFTER = """
  - {confirm: several, only: m=64, replicates: 6}
  - {reproduce: several}
"""


def test_a_confirming_entry_measures_its_cells_and_others_need_another_card(trial: Trial) -> None:
    first = trial.sit(1, more=AFTER)
    waiting = {name: why for name, why in first.reasons.items() if why}
    assert waiting == {"several-again": "waits for another card of the kind"}
    confirmed = store.read(trial.out / "several-confirmed")
    assert {row.case.problem["m"] for row in confirmed.rows} == {64}
    assert confirmed.state["confirms"]["manifest_sha256"]
    assert trial.sit(2, more=AFTER).reasons == {"several-again": ""}
    again = store.read(trial.out / "several-again")
    origin = again.state["reproduces"]["manifest_sha256"]
    assert origin == bundle.identity(trial.out / "several")
    assert {row.device for row in again.rows} == {"sim-2"}


def test_another_card_confirms_a_run_if_there_is_one(trial: Trial) -> None:
    confirming = (
        "  - {confirm: several, only: m=64}\n  - {name: last, suite: FOLDER/several.yaml}\n"
    )
    order: list[str] = []

    def show(done: int, total: int, problem: str) -> None:
        order.append(problem.partition(":")[0])

    trial.sit(1, more=confirming, names=("several",))
    trial.sit(1, more=confirming, progress=show)
    assert [*dict.fromkeys(order)] == ["other", "last", "several-confirmed"]
    shutil.rmtree(trial.out / "several-confirmed")
    shutil.rmtree(trial.out / "last")
    order.clear()
    trial.sit(2, more=confirming, progress=show)
    assert [*dict.fromkeys(order)] == ["several-confirmed", "last"]


def test_a_card_first_finishes_the_entry_that_it_has_begun(trial: Trial) -> None:
    trial.stop(2, after=3, names=("other",))
    assert state(trial.out, trial.campaign().entries[1]).status == "begun"
    trial.sit(1, 2)
    for name, device in (("several", "sim-1"), ("other", "sim-2")):
        assert {row.device for row in store.read(trial.out / name).rows} == {device}


def test_energy_is_not_measured_for_references(trial: Trial, monkeypatch) -> None:
    monkeypatch.setattr(energy, "require_meter", lambda identity: None)
    more = "  - {name: meter, suite: FOLDER/several.yaml, energy: true, only: m=16 kernel=cublas}\n"
    trial.sit(1, more=more, names=("meter",))
    run = store.read(trial.out / "meter")
    assert run.rows
    assert all(row.energy_j for row in run.rows)
    assert {row.energy_j for row in run.reference} == {None}


CLAIMS = """
  - {name: random, claims: [rsh-spmm-2026], replicates: 1}
  - {name: layers, claims: [cats-2024], replicates: 1}
  - {claims: [], replicates: 1}
"""


def test_stopped_claims_are_finished_on_another_card(trial: Trial, monkeypatch) -> None:
    more = CLAIMS.replace("claims: []", "claims: [cats-2024]")
    trial.sit(1, more=more, names=("several", "other"))
    with pytest.raises((Stopped, KeyboardInterrupt)):
        trial.sit(1, more=more, names=("random",), progress=stopping(2))
    (part,) = (trial.out / "random").glob("*.parts")
    begun = json.loads((part / "1" / "1" / "run.json").read_text())["flags"]["only"]
    # A claim that other runs have judged meanwhile needs fewer cases.
    cases = checking.Missing.cases.fget  # type: ignore[attr-defined]
    fewer = property(lambda gap: cases(gap)[:2] if gap.suite.name in part.name else cases(gap))
    monkeypatch.setattr(checking.Missing, "cases", fewer)
    assert trial.sit(2, more=more, names=("random",)).reasons == {"random": ""}
    both = trial.sit(1, 2, more=more)
    assert both.reasons == {"layers": "", "claims": ""}
    devices = [_devices(trial.out / name) for name in both.reasons]
    assert sorted(devices) == [["sim-1"], ["sim-2"]]
    run = store.read(trial.out / "random" / part.stem)
    assert run.state["flags"]["only"] == begun
    assert {row.device for row in run.rows} == {"sim-1", "sim-2"}
    assert (trial.out / "claims" / "verdicts.json").exists()


def _devices(folder: Path) -> list[str]:
    return sorted({row.device for run in store.runs_in(folder) for row in store.rows(run)})


WRONG = {
    "- {only: m=16}": "expected one of suite, confirm, reproduce, claims; found none",
    "- {suite: quick, confirm: quick}": "found suite and confirm",
    "- {suite: quik}": r"found 'quik' \(did you mean quick\?\)",
    "- {suite: quick, only: m=7}": "expected at least one case of m=7, found none",
    "- {suite: quick, only: kernel!=no_such}": "at least one case of kernel!=no_such, found none",
    "- {confirm: quick}": "expected an entry above it, found 'quick'",
    "- {suite: FOLDER/several.yaml}": "unique name",
    "- {suite: quick, name: ../up}": "unique name",
    "- {suite: quick}\nbudget: 120m": "budget: expected none since 0.4; `campaign run --budget`",
    "- {suite: quick, replicates: two}": r"entries\.2\.replicates: expected a valid integer",
}


@pytest.mark.parametrize("entry", WRONG)
def test_an_invalid_campaign_is_one_clear_error(entry: str, trial: Trial) -> None:
    with pytest.raises(SuiteError, match=WRONG[entry]):
        trial.campaign(f"  {entry}\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["attention", "front-door"])
def test_a_campaign_of_the_package_has_entries_with_names(name: str) -> None:
    entries = campaign(name).entries
    assert entries[0].replicates == 8
    assert len({entry.name for entry in entries}) == len(entries) >= 3


def test_status_and_resume_work_on_an_entry_that_has_begun(trial: Trial) -> None:
    trial.stop(1)
    begun = json.loads(output("status", trial.out / "several", "--json"))
    assert begun["contests"]["unclaimed"] == 0
    assert 0 < begun["parts"][0]["contests"] < begun["contests"]["of"]
    output("run", "--resume", trial.out / "several", "--json")
    assert all(line.checked for line in validate(trial.out / "several"))


def test_the_campaign_commands(trial: Trial, tmp_path: Path) -> None:
    trial.campaign()
    file, to = tmp_path / "campaign.yaml", tmp_path / "runs"
    status = sparsebench("campaign", "status", file, "--out", to)
    assert "0 of 2 entries are whole" in status.stdout
    states = json.loads(output("campaign", "status", file, "--json"))
    assert [state["status"] for state in states] == ["open", "open"]
    assert "`check SUITE --device`" in refusal("campaign", "status", file, "--device", "cpu")
    assert "`campaign status` lists the entries" in refusal("campaign", "plan", file)
    command = "campaign", "run", file, "--out", to, "--device", "sim"
    assert "--budget: expected 60s or more" in refusal(*command, "--budget", "1s")
    assert "1 of 1 entry is whole" in output(*command, "--entry", "other")


def test_a_campaign_replaces_the_published_runs_completely_or_not_at_all(
    trial, tmp_path, monkeypatch
) -> None:
    into, to, whole = tmp_path / "root" / "results" / "published", trial.out, trial.campaign()
    before = into / "simulated-h200" / "older"
    before.mkdir(parents=True)
    (before / "run.json").write_text("{}")
    with pytest.raises(ResultError, match="found unfinished several, other"):
        publish(whole, to, into)
    trial.sit(1)
    (to / "other" / "worker.log").write_text("a warning")
    with pytest.raises(ResultError, match="expected a published run, found no sparsity-4096"):
        publish(whole, to, into)  # the pages need runs that this campaign does not have
    assert [*before.parent.iterdir()] == [before]
    hidden = into.with_name(".simulated-h200.before")
    shutil.copytree(before.parent, hidden)
    with pytest.raises(ResultError, match=r"h200\.before: expected none"):
        publish(whole, to, into)
    assert [*before.parent.iterdir()] == [before]
    shutil.rmtree(hidden)
    drawn_from = list[str]()

    def write(root: Path) -> list[Path]:
        files = (root / "results/published").glob("*/*/run.json")
        drawn_from.extend(sorted(file.parent.name for file in files))
        return [root / "README.md"]

    monkeypatch.setattr(published, "write", write)
    assert publish(whole, to, into) == [tmp_path.resolve() / "root" / "README.md"]
    names = sorted(path.name for path in before.parent.iterdir())
    assert drawn_from == names == ["other", "several"]
    assert [path.name for path in into.iterdir()] == ["simulated-h200"]
    (before.parent / "other" / "note.txt").write_text("another run of that name")
    bundle.seal(before.parent / "other")
    assert publish(whole, to, into, ["other"])
    (earlier,) = before.parent.glob("earlier/*/*/run.json")
    assert earlier.parent.name == "other"
    assert (before.parent / "other" / "run.json").exists()

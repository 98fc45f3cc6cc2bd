"""A survey of a card without published rows is taken by every command, and can be contributed."""

import gzip
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sparsebench.errors import ResultError
from sparsebench.harness.run.validation import validate
from sparsebench.reports import contribution
from sparsebench.reports.survey_page import write
from sparsebench.results.comparison.sides import find
from sparsebench.results.run import bundle, store
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED


def contribute(runs: list[Path], out: Path) -> contribution.Contribution:
    def check(run: Path) -> Iterator[str]:
        return (line.text for line in validate(run))

    return contribution.contribute(runs, out, PUBLISHED, check)


SLOWER = 1.0009765625  # the card's times over those of the recorded one
CARD, HOST = "GPU-aaaabbbb-1111-2222-3333-444455556666", "node17"
RECORDED = PUBLISHED / "nvidia-h200" / "decode-confirmed"


def recorded(to: Path, gpu: str, most: int = 1000) -> Path:
    """Write a published run as one of another card, with at most `most` processes; return it."""
    shutil.copytree(RECORDED, to)
    environment = json.loads((to / "environment.json").read_text())
    state = json.loads((to / "run.json").read_text())
    first, *lines = gzip.decompress((to / "rows.jsonl.gz").read_bytes()).decode().splitlines()
    card = json.loads(lines[0])["device"]
    text = json.dumps(environment).replace(environment["gpu"]["name"], gpu).replace(card, CARD)
    (to / "environment.json").write_text(json.dumps({**json.loads(text), "hostname": HOST}))
    processes = min(most, state["flags"]["replicates"])
    done = state["contests"]["done"] * processes // state["flags"]["replicates"]
    state["flags"]["replicates"], state["contests"] = processes, {"done": done, "of": done}
    (to / "run.json").write_text(json.dumps(state))
    rows = [json.loads(line.replace(card, CARD)) for line in lines]
    for row in rows:
        row["samples_us"] = [SLOWER * sample for sample in row["samples_us"]]
    fewer = [json.dumps(row) for row in rows if row["replicate"] < processes]
    (to / "rows.jsonl").write_text("\n".join([first, *fewer, ""]))
    (to / "rows.jsonl.gz").unlink()
    (to / "worker.log").write_text("printed")
    bundle.seal_files(to, sorted(bundle.REQUIRED))
    return to


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a survey of an L40S, of which no run is published."""
    home = tmp_path_factory.mktemp("l40s") / "survey"
    recorded(home / "decide", "NVIDIA L40S")
    recorded(home / "screen", "NVIDIA L40S", 1)
    facts = {"schema": "sparsebench/survey@1", "device": "cuda:0", "budget_s": 600, "suite": "core"}
    (home / "survey.json").write_text(json.dumps({**facts, "seconds": {}, "left": {}, "notes": {}}))
    return home


def test_a_survey_stands_for_its_runs(survey: Path, tmp_path: Path) -> None:
    assert [run.name for run in bundle.runs_of(survey)] == ["decide", "screen"]
    assert bundle.runs_of(survey / "decide") == [survey / "decide"]
    with pytest.raises(ResultError, match=r"found a survey; name \S+/decide or \S+/screen"):
        store.read(survey)
    shutil.copy(survey / "survey.json", tmp_path)
    with pytest.raises(ResultError, match="expected a survey with a run, found none"):
        bundle.runs_of(tmp_path)


def test_a_survey_is_one_side_of_a_comparison(survey: Path) -> None:
    for texts in ([str(survey), str(RECORDED)], [str(survey), "H200"]):
        first, second = find(texts, [RECORDED])
        assert [run.path.name for run in first.runs] == ["decide", "screen"]
        assert (first.device, second.device) == ("NVIDIA L40S", "NVIDIA H200")


@pytest.mark.parametrize("command", ["validate", "publish"])
def test_commands_on_runs_take_a_survey(command: str, survey: Path, tmp_path: Path) -> None:
    site = ["--out", tmp_path / "site"] if command == "publish" else []
    done = sparsebench(command, survey, *site)
    assert done.returncode == 0, done.stderr
    assert command != "publish" or len([*(tmp_path / "site").glob("*/*/manifest.json")]) == 2


def test_a_survey_ends_with_commands_that_take_its_folder(survey: Path) -> None:
    summary = write(survey, [RECORDED])
    lines = [line.partition("\n")[0] for line in summary.next_steps(survey)[1:]]
    steps = [line.split() for line in lines]
    assert [step[1] for step in steps] == ["compare", "advise", "publish", "contribute"]
    assert all(str(survey) in step for step in steps)
    assert steps[0][1:] == ["compare", str(survey), "H200"]


def test_a_contribution_has_valid_bundles_and_no_private_name(survey: Path, tmp_path: Path) -> None:
    made = contribute(bundle.runs_of(survey), tmp_path / "out")
    home = tmp_path / "out" / "results" / "published" / "nvidia-l40s"
    assert [path.name for path in sorted(home.iterdir())] == [
        "decode-aaaabbbb",
        "decode-aaaabbbb-look",
    ]
    for run in store.runs_in(home):
        assert all(line.text for line in validate(run))
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    for file in files:
        data = file.read_bytes()
        assert HOST.encode() not in (gzip.decompress(data) if file.suffix == ".gz" else data)
    assert "worker.log" in made.removed
    assert made.machine["gpu.name"] == "NVIDIA L40S"
    text = (tmp_path / "out" / "pull-request.md").read_text()
    assert all(f"| {name} | " in text for name in made.machine)
    assert "would be a new one" in text


def test_another_card_of_a_known_kind_is_welcome(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", "NVIDIA H200")
    made = contribute([run], tmp_path / "out")
    assert CARD not in made.cards
    assert len(made.cards) > 5
    assert "the variation between cards" in made.welcome
    first = made.runs[0]
    on_a_cpu = replace(first.analysis.run, environment={"cpu": {"name": "a CPU"}})
    of_cpu = replace(first, analysis=replace(first.analysis, run=on_a_cpu))
    assert replace(made, runs=[of_cpu]).welcome.startswith("Runs on a CPU")


def edited(run: Path) -> None:
    (run / "rows.jsonl").write_text((run / "rows.jsonl").read_text().replace('"ok"', '"oK"', 1))


def resealed(run: Path) -> None:
    first, *lines = (run / "rows.jsonl").read_text().splitlines()
    (run / "rows.jsonl").write_text("\n".join([first, *lines[:-1], ""]))
    bundle.seal_files(run, sorted(bundle.REQUIRED))


def emptied(run: Path) -> None:
    (run / "rows.jsonl").write_text((run / "rows.jsonl").read_text().splitlines()[0] + "\n")
    bundle.seal_files(run, sorted(bundle.REQUIRED))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (edited, "expected SHA-256"),
        (resealed, "expected a row as in other replicates, found none"),
        (emptied, "expected a finished run, found finished with 0 rows"),
        (lambda run: (run / "manifest.json").unlink(), "expected manifest.json"),
        (shutil.rmtree, "expected the directory of a run, found none"),
    ],
)
def test_a_damaged_run_is_refused_and_nothing_is_written(damage, words, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", "NVIDIA L40S")
    damage(run)
    with pytest.raises(ResultError, match=words):
        contribute(bundle.runs_of(run), tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_samples_of_another_card_are_not_contributed_as_those_of_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SLOWER", 1.0)
    run = recorded(tmp_path / "run", "NVIDIA L40S")
    with pytest.raises(ResultError, match=r"found those of \S+decode"):
        contribute([run], tmp_path / "out")


def test_a_published_run_is_not_contributed_again(survey: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="found one published as"):
        contribute([RECORDED], tmp_path / "out")
    with pytest.raises(ResultError, match="expected runs of one device"):
        contribute([RECORDED, survey / "decide"], tmp_path / "out")
    with pytest.raises(ResultError, match="expected different runs, found one twice"):
        contribute([survey / "decide", survey / "screen", survey / "decide"], tmp_path / "out")


def test_a_card_whose_name_has_no_letter_of_a_folder_has_one(tmp_path: Path) -> None:
    made = contribute([recorded(tmp_path / "run", "\u5361")], tmp_path / "out")
    assert made.runs[0].place.parent == contribution.HOME / "device"

"""Claims planned, bounded, measured on the simulated GPU and judged, by the command line."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparsebench.errors import SuiteError
from sparsebench.harness.claims import checking, claim_plan
from sparsebench.harness.claims.checking import ClaimEvidence, check, evidence
from sparsebench.harness.run import measure
from sparsebench.harness.run.measure import RunOptions, Unfinished
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.shared_runs import sharing
from sparsebench.harness.shared_runs.sharing import measure_alone
from sparsebench.results.claims.cells import ClaimCell, cells
from sparsebench.results.claims.decision import Word
from sparsebench.results.claims.schema import Claim, ClaimFile, Test
from sparsebench.results.claims.verdict import Verdict
from sparsebench.results.run import store
from sparsebench.results.tables.analysis import Analysis
from tests.results.claim_examples import CLAIM
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.paths import PUBLISHED, ROOT

pytestmark = pytest.mark.usefixtures("in_one_process")

SPEC = "schema: sparsebench/sim@1\nefficiency: {dense/cublas: 0.8, bsr/bsr_triton: %s}\n"


def written(folder: Path, old: str = "", new: str = "", name: str = "mine") -> ClaimFile:
    """Write CLAIM with a change, and read it."""
    assert old in CLAIM
    file = folder / f"{name}.yaml"
    file.write_text(CLAIM.replace(old, new, 1) if old else CLAIM)
    return claim_plan.load(str(file))


def device(folder: Path, efficiency: float) -> str:
    (folder / "spec.yaml").write_text(SPEC % efficiency)
    return f"sim:{folder / 'spec.yaml'}"


def checked(
    claims: list[ClaimFile],
    flags: Flags,
    out: Path,
    runs: Sequence[Path] = (),
    planned: Callable[[ClaimEvidence], None] = lambda result: None,
    **options: Any,
) -> ClaimEvidence:
    """Check claims into a folder, in parts as the command does."""
    engine = partial(measure_alone, as_begun=True)
    return check(claims, flags, runs, out, RunOptions(**options), engine, planned)


def judged(result: ClaimEvidence) -> Verdict:
    """Return the only verdict on the only claim."""
    ((verdict,),) = result.verdicts().values()
    return verdict


@pytest.fixture(scope="module")
def fast(in_one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check a claim whose kernel is 2 and 5 times as fast as dense: 0.5 and 0.2 of the work.

    Dense with unpruned weights takes 1.07 times as long, so the speedups are 2.14 and 5.35.
    """
    folder = tmp_path_factory.mktemp("fast")
    flags = Flags(device(folder, 0.8), replicates=6)
    result = checked([written(folder)], flags, folder / "out")
    assert judged(result).word is Word.HOLDS
    return folder / "out"


@pytest.fixture(scope="module")
def slow(in_one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check a claim whose kernel is slower than dense; its best cell is measured again, too."""
    folder = tmp_path_factory.mktemp("slow")
    flags = Flags(device(folder, 0.1), replicates=6)
    checked([written(folder)], flags, folder / "out")
    assert sorted(path.name for path in folder.glob("out/*/")) == ["mine", "mine-confirmed"]
    return folder / "out"


@pytest.mark.parametrize(
    ("old", "new", "ran", "word"),
    [
        ("", "", "fast", Word.HOLDS),
        ("at_least: 2", "at_least: 9", "fast", Word.OTHER_CONDITIONS),
        ("at_least: 2", "at_least: 5.35", "fast", Word.NOT_SETTLED),
        (
            "fier: exists\n",
            "fier: exists\n    proxy: a kernel\nmissing: it\n",
            "fast",
            Word.OTHER_CONDITIONS,
        ),
        ("", "", "slow", Word.FALLS_SHORT),
        ("gpus: [H200]", "gpus: [B200]", "slow", Word.OTHER_CONDITIONS),
    ],
)
def test_a_claim_is_judged_from_one_file(old, new, ran, word, tmp_path, request) -> None:
    runs = sorted(file.parent for file in request.getfixturevalue(ran).glob("*/run.json"))
    result = judged(evidence([written(tmp_path, old, new)], runs))
    assert result.word == word


def test_an_unreliable_confirming_run_is_repeated(fast, tmp_path, monkeypatch) -> None:
    def doubted(test: Test, problems: set[str], analysis: Analysis) -> list[ClaimCell]:
        reliable = analysis.run.path.name != "mine-confirmed"
        return [replace(c, reliable=reliable) for c in cells(test, problems, analysis)]

    monkeypatch.setattr(checking, "cells", doubted)
    out = tmp_path / "out"
    shutil.copytree(fast, out)
    result = checked([written(tmp_path)], Flags(device(tmp_path, 0.8), replicates=6), out)
    (test,) = judged(result).tests
    assert (test.word, test.deciding[0].run) == (Word.HOLDS, "mine-confirmed-2")


def test_the_claim_of_the_readme_is_judged_by_published_rows(tmp_path: Path) -> None:
    page = (ROOT / "suites/claims/README.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.yaml").write_text(text)
    runs = [PUBLISHED / "nvidia-h200" / "sparsity-4096"]
    assert judged(evidence([claim_plan.load(str(tmp_path / "mine.yaml"))], runs)).word is Word.HOLDS


def test_the_best_cell_is_measured_again_alone(fast: Path) -> None:
    screening, again = (store.read(fast / name) for name in ("mine", "mine-confirmed"))
    assert {row.case.problem["sparsity"] for row in screening.rows} == {0.5, 0.8}
    assert {row.case.problem["sparsity"] for row in again.rows} == {0.8}
    assert [run.state["flags"]["replicates"] for run in (screening, again)] == [1, 6]
    assert again.state["confirms"]["screened"] == 6  # dense on the same zeros is one of three
    expected = json.loads((fast / "verdicts.json").read_text())["claims"]["mine"][0]
    assert (expected["verdict"], expected["basis"]) == ("holds", "as published")
    assert expected["tests"][0]["deciding"][0]["run"] == "mine-confirmed"


def test_a_look_settles_nothing_and_its_cells_are_not_measured_again(tmp_path: Path) -> None:
    flags = Flags(device(tmp_path, 0.8), replicates=2)
    look = checked([written(tmp_path)], flags, tmp_path / "look")
    assert judged(look).word is Word.NOT_SETTLED
    assert not (tmp_path / "look" / "mine-confirmed").exists()
    wider = written(tmp_path, "[0.5, 0.8]", "[0.5, 0.8, 0.9]", name="wider")
    result = checked([wider], flags, tmp_path, [tmp_path / "look" / "mine"])
    fresh = store.read(tmp_path / "wider")
    assert {row.case.problem["sparsity"] for row in fresh.rows} == {0.9}
    assert {cell.run for cell in result.cells["wider"]} == {"mine", "wider"}


def test_a_check_ends_at_its_time_and_the_next_one_measures_the_rest(tmp_path, monkeypatch) -> None:
    """The clock is at 0 until the first contest is done, and then past the limit."""
    first = written(tmp_path, "quantifier: exists", "quantifier: typical", name="first")
    second = written(tmp_path, "[0.5, 0.8]", "[0.9, 0.95]", name="second")
    flags, to = Flags(device(tmp_path, 0.8), replicates=2), tmp_path / "out"
    now = [0.0]
    for module in (measure, sharing):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])

    def late(done: int, total: int, problem: str) -> None:
        now[0] = 2.0 * (done > 0)

    with pytest.raises(Unfinished) as left:
        checked([first, second], flags, to, progress=late, until=1.0)
    assert (left.value.path, left.value.done) == (to / "first", 2)
    assert {path.name for path in to.iterdir()} == {"first.parts"}
    assert not evidence([first, second], store.runs_in(to)).runs
    now[0] = 0.0
    planned: list[ClaimEvidence] = []
    result = checked([first, second], flags, to, planned=planned.append, until=1.0)
    assert {path.name for path in to.iterdir() if path.is_dir()} == {"first", "second"}
    assert [cell.processes for cell in result.cells["first"]] == [2, 2]
    assert planned == [result]


def test_a_check_prints_its_plan(tmp_path: Path) -> None:
    claim = written(tmp_path)
    options = "claims", "check", claim.where, "--replicates", "1"
    done = sparsebench(*options, "--plan")
    lines = ["mine: 2 contests, 4 cases; for mine", "1 run of 1 process"]
    assert done.stderr.splitlines() == lines
    assert not done.stdout
    out = "--device", device(tmp_path, 0.8), "--out", tmp_path / "out", "--budget", "60s"
    done = sparsebench(*options, *out)
    assert done.stderr.splitlines()[:2] == lines
    assert "not settled" in done.stdout


def test_a_check_without_time_says_how_to_go_on_and_judges_what_there_is(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sharing, "monotonic", lambda: float("inf"))
    options = "--replicates", "1", "--device", device(tmp_path, 0.8), "--budget", "60s"
    out = tmp_path / "out"
    done = sparsebench("claims", "check", written(tmp_path).where, *options, "--out", out)
    assert done.returncode == 0
    rest = f"`sparsebench claims check --out {out}` measures the rest"
    assert f"mine: the time ended after 0 of 7 contests; {rest}" in done.stderr
    assert "is measured yet" in done.stdout


def test_energy_without_a_meter_is_not_testable(tmp_path: Path) -> None:
    asks = 'metric: energy_saved\n    at_least: 2\n    unit: "%"'
    file = tmp_path / "mine.yaml"
    text = CLAIM.replace("metric: speedup\n    at_least: 2\n    unit: x", asks)
    file.write_text(text.replace("measure:\n", "measure:\n  energy: true\n"))
    flags = Flags(device(tmp_path, 0.8), replicates=1)
    verdict = judged(checked([claim_plan.load(str(file))], flags, tmp_path / "out"))
    assert verdict.word is Word.NOT_TESTABLE
    assert "expected an NVIDIA GPU" in verdict.why


WRONG = {
    "no such suite": ("measure:\n", "measure: {suite: sparsty}\nxyz:\n", "10: xyz"),
    "no such kernel": ("bsr_triton", "bsr_tritn", "9: measure"),
    "no such field": ("unit: x", "unit: x\n    at: {m: 7}", "24: at.m"),
    "no subject": ("{format: bsr}\n", "{format: csr}\n", "19: subject"),
    "no baseline": ("{format: dense}\n", "{format: csr}\n", "20: baseline"),
    "both sides": ("{format: dense}\n", "{format: bsr}\n", "19: "),
    "no energy": (
        "metric: speedup\n    at_least: 2\n    unit: x",
        'metric: energy_saved\n    at_least: 2\n    unit: "%"',
        "21: metric",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_test_that_does_not_fit_its_suite_is_an_error(what: str, tmp_path: Path) -> None:
    old, new, expected = WRONG[what]
    with pytest.raises(SuiteError) as error:
        claim_plan.plan_tests(written(tmp_path, old, new))
    assert f"mine.yaml:{expected}" in str(error.value)


def test_an_error_in_a_claim_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(CLAIM.replace("    unit: x\n", ""))
    line = refusal("claims", "check", tmp_path / "bad.yaml", "--plan")
    assert f"{tmp_path / 'bad.yaml'}:18: tests.0.unit: expected a value, found none" in line


def test_every_claim_of_the_package_can_be_planned() -> None:
    names = {path.stem for path in (ROOT / "suites" / "claims").glob("*.yaml")}
    assert set(claim_plan.claims()) == names
    result = evidence(claim_plan.read_claims([]))
    for each in result.written:
        planned = [test for test in each.claim.tests if not test.of_file]
        assert [plan.test for plan in result.plans[each.name]] == planned
        assert each.claim.tests or each.claim.bounds or each.claim.missing


def test_a_wrong_or_repeated_claim_name_is_an_error() -> None:
    with pytest.raises(SuiteError, match="see sparsebench claims list"):
        claim_plan.load("zzz")
    with pytest.raises(SuiteError, match="did you mean openai-2017-cublas"):
        claim_plan.load("openai-2017-cubla")
    with pytest.raises(SuiteError, match="expected each claim once"):
        claim_plan.read_claims(["blast-2025", "blast-2025"])


def test_a_test_that_exceeds_the_memory_is_refused_before_it_is_drawn(tmp_path: Path) -> None:
    (plan,) = claim_plan.plan_tests(written(tmp_path))
    assert claim_plan.too_large(plan, 2**30) == ""
    assert "0.0625 GiB" in claim_plan.too_large(plan, 2**20)


def test_an_unsupported_baseline_makes_a_claim_not_testable(tmp_path: Path) -> None:
    claim = written(tmp_path)
    result = checked([claim], Flags("cpu", replicates=1), tmp_path / "out")
    verdict = judged(result)
    assert verdict.word is Word.NOT_TESTABLE
    assert "No baseline is supported here: cublas: " in verdict.why
    assert not (tmp_path / "out" / "mine").exists()


def test_a_claim_that_cannot_run_here_is_judged_by_given_runs(fast: Path, tmp_path: Path) -> None:
    flags = Flags("cpu", replicates=1)
    result = checked(
        [written(tmp_path)], flags, tmp_path / "o", [fast / "mine", fast / "mine-confirmed"]
    )
    assert judged(result).word is Word.HOLDS
    done = sparsebench("claims", "report", "blast-2025", "--from", fast / "mine")
    assert "sparsebench claims report" in done.stdout


def test_suites_with_missing_files_are_named_and_left_out(tmp_path: Path) -> None:
    (claim,) = (claim_plan.load(name) for name in ["cusparse-slower"])
    result = evidence([claim])
    files, *others = result.plans["cusparse-slower"]
    assert not files.contests
    assert all(plan.contests for plan in others)
    (line,) = checking.left_out(result)
    assert line.startswith("dlmc: left out")
    assert "dlmc" not in {run.suite.name for run in checking.missing(result, "sim", 8)}
    assert "--data" in judged(result).why
    judging = evidence([claim], [PUBLISHED / "nvidia-h200" / "dlmc"])
    (verdict,) = judging.verdicts()["cusparse-slower"]
    assert verdict.tests[0].word is not Word.HOLDS
    assert {cell.fields["dtype"] for cell in verdict.tests[0].cells} >= {"fp32"}


def test_published_rows_are_judged_without_a_gpu(tmp_path: Path) -> None:
    names, run = ["openai-2017-cublas", "openai-2017-cusparse"], PUBLISHED / "nvidia-h200"
    others = ["sparsity-4096-elsewhere", "claims-openai-sparsity-confirmed"]
    others += ["claims-openai-sparsity", "earlier/2026-11-24-84a765b/sparsity-64"]
    (tmp_path / "root" / "gpu").mkdir(parents=True)
    assert "found none" in refusal("claims", "report", *names, "--from", tmp_path / "root")
    for name in others:
        (tmp_path / "root" / "gpu" / Path(name).name).symlink_to(run / name)
    given = "--from", tmp_path / "root"
    shown = output("claims", "report", *names, *given, "--out", tmp_path / "site")
    first, second = (line.split() for line in shown.splitlines() if "openai-2017" in line)
    assert first[:3] == [names[0], "H200", "measured"]
    assert second[:3] == [names[1], "H200", "measured"]
    folder = tmp_path / "site" / "claims"
    page = (folder / f"{names[1]}.html").read_text()
    assert "orders of magnitude faster than cuBLAS or cuSPARSE" in page


def test_the_schema_for_editors_is_that_of_the_model() -> None:
    printed = json.loads(sparsebench("claims", "schema").stdout)
    assert printed == Claim.model_json_schema(by_alias=True)


def test_a_claim_name_that_occurs_twice_is_one_error_line(tmp_path, monkeypatch) -> None:
    """Another package has a claim of that name, too."""
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "METADATA").write_text("Name: other\nVersion: 1\n")
    entry = "[sparsebench.claims]\nmine = other_claims\n"
    (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "other_claims").mkdir()
    (tmp_path / "other_claims" / "__init__.py").write_text("")
    (tmp_path / "other_claims" / "blast-2025.yaml").write_text(CLAIM)
    monkeypatch.syspath_prepend(tmp_path)
    assert "blast-2025: expected one claim of this name, found " in refusal("claims", "list")


def test_layers_and_a_report_of_claims_import_no_compiler_and_draw_nothing() -> None:
    code = "import sys, sparsebench.nn; from sparsebench.harness.commands._app import main; "
    code += "sys.argv = ['sparsebench', 'claims', 'report', 'blast-2025']; main(); "
    code += "print(); print(*sys.modules)"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {*done.stdout.splitlines()[-1].split()}
    assert not modules & {"torch._dynamo", "scipy.stats", "matplotlib"}

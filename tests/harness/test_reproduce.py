"""Bundles measured again, on a simulated GPU and on the CPU; changes of made-up rows."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsebench.errors import ResultError
from sparsebench.harness.run.measure import RunOptions, Stopped
from sparsebench.harness.run.repeat import Setup, confirmations, reproduce
from sparsebench.harness.shared_runs.run_paths import pieces_of
from sparsebench.harness.shared_runs.sharing import measure_alone
from sparsebench.reports.comparison import reproduction
from sparsebench.results.comparison.causes import same_code
from sparsebench.results.comparison.changes import changes
from sparsebench.results.comparison.sides import side
from sparsebench.results.record import Case, Problem, Row, Status
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import Choices, choices_of
from sparsebench.results.run.store import StoredRun
from tests.results.made_up import BSR, DENSE, TWIN, stored
from tests.simulated.in_process import stopping
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.suites import BSR as BSR_ENTRY
from tests.tools.suites import BSR_ON_CPU, CSR, linear
from tests.tools.suites import ON_CPU as TORCH

H200 = {"gpu": {"name": "NVIDIA H200", "uuid": "GPU-1"}}
pytestmark = pytest.mark.usefixtures("no_figures")
SUITE = linear("m: 4096, n: 4096, k: 4096, sparsity: [0.5, 0.9]", BSR_ENTRY, CSR)
QUIET = "schema: sparsebench/sim@1\nprocess: 0\nstep: 0\n"  # one process is as good as another
ON_CPU = linear("m: 8, n: 64, k: 64, dtype: fp32, block: 16", BSR_ON_CPU, baselines=(TORCH,))


def made_up(
    speedups: Sequence[float], environment: dict[str, object] = H200, processes: int = 8
) -> StoredRun:
    """Return a run in which BSR, a problem for each, is so much faster; its floor is 0.5 %."""
    rows = [
        Row(
            Case(Problem("linear", {"m": m, "n": 64, "k": 64, "dtype": "bf16"}), contender),
            Status.OK,
            process,
            digest=f"{m}",
            samples_us=(us,),
        )
        for process in range(processes)
        for m, speedup in enumerate(speedups, start=1)
        for contender, us in [(DENSE, 100.0), (TWIN, 100.0), (BSR, 100.0 / speedup)]
    ]
    return stored(rows, "a run", environment)


def again(first: StoredRun, second: StoredRun) -> dict[str, Any]:
    return reproduction(changes(side(first, name="there"), side(second, name="here")))


def test_a_run_is_reproduced_if_no_speedup_has_a_settled_change() -> None:
    first = made_up([2.0] * 20)
    assert again(first, made_up([2.0] * 20))["reproduced"]
    result = again(first, made_up([2.0] * 19 + [1.0]))
    assert (result["reproduced"], result["cells"], result["unchanged"]) == (False, 20, 19)


def test_few_processes_give_a_look() -> None:
    looks = [made_up([2.0, gain], processes=2) for gain in (2.0, 2.0 * 1.06, 2.0 * 1.1)]
    close, apart = (again(looks[0], other) for other in looks[1:])  # the tolerance is 7 %
    assert close["sentence"].startswith("A look, consistent: 2 of 2 speedups have no settled")
    assert apart["sentence"].startswith("A look, not consistent: 1 of 2 speedups have no settled")
    assert (apart["looks"], apart["choices"]) == (2, "first process")


@pytest.mark.parametrize(
    ("gpu", "place", "reproduced"),
    [
        ({"name": "NVIDIA H200", "uuid": "GPU-1"}, "the same machine", False),
        ({"name": "NVIDIA H200", "uuid": "GPU-2"}, "the same kind of device", False),
        ({"name": "NVIDIA A100", "uuid": "GPU-3"}, "another device", True),  # still faster
    ],
)
def test_the_place_says_what_a_reproduction_shows(gpu, place, reproduced) -> None:
    first, second = (
        replace(run, rows=[replace(row, device=run.environment["gpu"]["uuid"]) for row in run.rows])
        for run in (made_up([2.0]), made_up([3.0], {"gpu": gpu}))
    )
    result = again(first, second)
    assert (result["place"], result["reproduced"]) == (place, reproduced)
    assert f" on {place}. " in result["sentence"]
    slower = replace(second, rows=[replace(row, device=gpu["uuid"]) for row in made_up([0.5]).rows])
    assert not again(first, slower)["reproduced"]


@pytest.mark.parametrize(
    ("status", "cells", "reproduced"),
    [(Status.UNSUPPORTED, 1, True), (Status.FAILED, 2, False), (Status.WRONG, 2, False)],
)
def test_a_cell_without_a_time_is_repeated_only_if_it_is_unsupported(
    status, cells, reproduced
) -> None:
    second = made_up([2.0, 2.0])
    lost = [r.case.problem["m"] == 2 and r.case.contender == BSR for r in second.rows]
    gone = {"status": status, "samples_us": ()}
    rows = [replace(r, **gone) if g else r for r, g in zip(second.rows, lost, strict=True)]
    result = again(made_up([2.0, 2.0]), replace(second, rows=rows))
    assert (result["cells"], result["reproduced"]) == (cells, reproduced)
    if status is Status.UNSUPPORTED:
        alone = replace(second, rows=[r for r in rows if r.digest == "2"])
        with pytest.raises(ResultError, match="expected a case with a speedup"):
            again(made_up([2.0, 2.0]), alone)


def test_digests_of_machine_code_are_comparable_if_they_cover_the_same() -> None:
    assert same_code(["a"], ["a"])
    assert same_code(["a"], ["b"]) is False
    assert same_code(["a"], ["sass:a"]) is same_code(["a"], []) is None


@pytest.mark.parametrize(
    ("speedup", "status", "message"),
    [
        (
            2.0,
            Status.OK,
            "Confirmed: bsr/bsr_triton is 2.0",
        ),
        (1.001, Status.OK, "Not confirmed (equal): bsr/bsr_triton is 1.0"),
        (2.0, Status.FAILED, "Not confirmed (failed): bsr/bsr_triton has no time: it fell over"),
    ],
)
def test_a_headline_states_the_result_of_the_confirming_run(speedup, status, message) -> None:
    run = made_up([speedup])
    if status is not Status.OK:
        ended = {"status": status, "samples_us": (), "detail": "it fell over"}
        rows = [replace(r, **ended) if r.case.contender == BSR else r for r in run.rows]
        run = replace(run, rows=rows)
    cell = {"case_id": Case(run.rows[0].case.problem, BSR).id, "scope": "kernel", "cache": "cold"}
    (result,) = confirmations(replace(run, state={"confirms": {"cells": [cell]}}))
    assert result.sentence.startswith(message)
    assert result.sentence.endswith(": linear, bf16, m 1, 64 × 64, NVIDIA H200.")
    assert result.confirmed == message.startswith("Confirmed")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A screening on a simulated GPU: two problems in one process."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "mine.yaml").write_text(SUITE)
    (folder / "first.yaml").write_text(QUIET + "seed: 0\n")
    (folder / "second.yaml").write_text(QUIET + "seed: 7\n")
    out, device = folder / "run", f"sim:{folder / 'first.yaml'}"
    output("run", folder / "mine.yaml", "--device", device, "--replicates", 1, "--out", out)
    return out


def test_a_run_is_reproduced_on_another_device_of_its_kind(simulated: Path, tmp_path: Path) -> None:
    device = f"sim:{simulated.parent / 'second.yaml'}"
    out = tmp_path / "again"
    result = json.loads(output("reproduce", simulated, "--device", device, "--out", out, "--json"))
    assert (result["place"], result["reproduced"]) == ("the same kind of device", True)
    assert (result["cells"], result["unchanged"]) == (6, 6)
    fresh = store.read(out)
    assert fresh.state["reproduces"] == {"manifest_sha256": bundle.identity(simulated)}
    assert fresh.state["suite"] == "mine"
    assert fresh.state["flags"]["replicates"] == 1
    assert fresh.suite_text == SUITE
    assert {row.device for row in fresh.rows} == {"sim-7"}
    assert (out / "report.html").exists()
    assert "plan: 12 rows" in output("validate", out)


@pytest.mark.exhaustive
def test_a_stopped_reproduction_can_be_resumed(simulated: Path, tmp_path: Path) -> None:
    out, device = tmp_path / "again", f"sim:{simulated.parent / 'first.yaml'}"
    options = RunOptions(progress=stopping(3))
    with pytest.raises(Stopped, match=str(out)):
        reproduce(simulated, Setup(device, None, out, options, measure_alone))
    (piece,) = pieces_of(out)
    begun = {row.samples_us for row in store.rows(piece)}
    assert begun
    command = "reproduce", simulated, "--device", device, "--out", out
    done = sparsebench(*command)
    assert "A look, consistent: 6 of 6 speedups have no settled change" in done.stdout
    assert begun <= {row.samples_us for row in store.rows(out)}
    assert store.read(out).state["reproduces"]
    assert "expected a new directory" in sparsebench(*command[:-1], simulated).stderr


@pytest.mark.exhaustive
def test_a_settled_change_exits_with_1(simulated: Path, tmp_path: Path) -> None:
    spec = tmp_path / "slow.yaml"
    spec.write_text(QUIET + "seed: 8\nefficiency: {bsr/bsr_triton: 0.1}\n")
    out = tmp_path / "again"
    done = sparsebench("reproduce", simulated, "--device", f"sim:{spec}", "--out", out)
    assert done.returncode == 1, done.stderr
    assert "A look, not consistent: 4 of 6 speedups have no settled change" in done.stdout


def test_a_damaged_bundle_is_not_measured_again(simulated: Path, tmp_path: Path) -> None:
    broken, out = shutil.copytree(simulated, tmp_path / "broken"), tmp_path / "again"
    (broken / "run.json").write_text((broken / "run.json").read_text().replace("sim", "cpu"))
    for command in ("validate", "reproduce", "confirm"):
        to = [] if command == "validate" else ["--device", "sim", "--out", out]
        assert "run.json: expected SHA-256" in refusal(command, broken, *to)
    bundle.unseal(broken)
    assert "expected manifest.json" in sparsebench("validate", broken).stderr
    assert not out.exists()


@pytest.mark.exhaustive
def test_a_headline_comes_from_the_confirming_run_alone(simulated: Path, tmp_path: Path) -> None:
    out, device = tmp_path / "confirmed", f"sim:{simulated.parent / 'second.yaml'}"
    flags = "--device", device, "--replicates", 6, "--out", out
    shown = output("confirm", simulated, *flags)
    fresh = store.read(out)
    raced = [row for row in fresh.rows if not row.case.contender.twin]
    assert len(raced) == 6 * 3  # dense has unpruned weights, and zeros
    assert {row.case.problem["sparsity"] for row in raced} == {0.9}
    assert fresh.state["confirms"]["manifest_sha256"] == bundle.identity(simulated)
    assert fresh.state["confirms"]["screened"] == 6
    speedup = np.median(raced[0].samples_us) / np.median(raced[2].samples_us)
    assert float(shown.partition(" is ")[2].partition("×")[0]) == pytest.approx(speedup, rel=0.02)
    assert "95 % interval over 6 processes" in shown
    assert ", simulated H200." in shown
    assert "over 6 cells" in shown
    assert choices_of(fresh.state) is Choices.AMONG
    assert "bf16, m 4096, 4096 × 4096, 90 %, 64 × 64 blocks" in shown


def test_a_headline_takes_six_processes(simulated: Path) -> None:
    assert "6" in refusal("confirm", simulated, "--replicates", 5)


@pytest.mark.exhaustive
def test_the_cpu_draws_the_same_bits_again(tmp_path: Path) -> None:
    suite, first, again = tmp_path / "small.yaml", tmp_path / "first", tmp_path / "again"
    suite.write_text(ON_CPU)
    flags = "--device", "cpu", "--replicates", 1
    assert sparsebench("run", suite, *flags, "--out", first).returncode == 0
    done = sparsebench("reproduce", first, "--device", "cpu", "--out", again, "--json")
    assert done.returncode in (0, 1), done.stderr  # a shared CPU repeats no time
    assert json.loads(done.stdout)["place"] == "the same kind of device"
    digests = [{r.case.problem.id: r.digest for r in store.read(p).rows} for p in (first, again)]
    assert digests[0] == digests[1]

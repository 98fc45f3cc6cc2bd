"""The simulated GPU: the whole pipeline, by the command line, in seconds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from sparsebench.errors import ResultError
from sparsebench.harness.machine import stand_in
from sparsebench.harness.plan.suite import read as read_suite
from sparsebench.harness.run.measure import measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.results.record import Row, Status
from sparsebench.results.run import store
from tests.simulated.in_process import in_this_process
from tests.tools.command_line import output, refusal
from tests.tools.suites import BSR as BSR_ENTRY
from tests.tools.suites import CSR, linear

pytestmark = pytest.mark.usefixtures("no_figures")
SUITE = linear("n: 4096, k: 4096, m: [16, 64], sparsity: [0.5, 0.9]", BSR_ENTRY, CSR)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sim") / "simulated.yaml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def whole(suite: Path) -> Path:
    """A run of three processes, by the command line."""
    out = suite.parent / "whole"
    output("run", suite, "--device", "sim", "--replicates", 3, "--out", out)
    return out


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the simulated worker run in this process."""
    in_this_process(monkeypatch)


def spec(folder: Path, text: str) -> str:
    """Write a spec and return the device's name."""
    file = folder / "spec.yaml"
    file.write_text(text)
    return f"sim:{file}"


def test_the_whole_pipeline_runs_and_names_its_device(whole: Path) -> None:
    run = store.read(whole)
    assert (whole / "report.html").stat().st_size > 10_000
    assert "simulated H200" in (whole / "report.html").read_text()
    assert run.state["status"] == "finished"
    assert run.environment["gpu"]["name"] == "simulated H200"
    rows = store.rows(whole)
    assert {row.status for row in rows} == {Status.OK}
    assert {row.clock for row in rows} == {"sim"}
    assert {row.device for row in rows} == {"sim-0", run.environment["gpu"]["uuid"]}
    assert {row.replicate for row in rows} == {0, 1, 2}
    assert len([row for row in rows if not row.reference]) == 3 * (4 * 3 + 3)  # twins in one


@pytest.mark.usefixtures("here")
def test_a_killed_run_has_recorded_the_time_of_every_contest(suite, tmp_path, monkeypatch) -> None:
    states, append = [], store.append

    def append_and_look(path: Path, rows: list[Row]) -> None:
        append(path, rows)
        states.append(store.read(path).state)

    monkeypatch.setattr(store, "append", append_and_look)
    measure(read_suite(str(suite)), Flags("sim", replicates=1), tmp_path / "run", None)
    assert [state["contests"]["done"] for state in states[1:]] == [*range(1, len(states))]
    seconds = [state["seconds"] for state in states]
    assert seconds == sorted(seconds)
    assert all(state["status"] == "running" for state in states)


@pytest.mark.usefixtures("here")
def test_a_time_below_the_bound_is_rejected(suite: Path, tmp_path: Path) -> None:
    flags = Flags(
        spec(tmp_path, "launch_us: 0.1\nefficiency: {csr/cusparse_csr: 2.0}"), replicates=1
    )
    rows = store.rows(measure(read_suite(str(suite)), flags, tmp_path / "run", None))
    fast = [row for row in rows if row.status is Status.FASTER_THAN_LIGHT]
    assert {row.case.contender.kernel for row in fast} == {"cusparse_csr"}
    assert "memory allows" in fast[0].detail


@pytest.mark.usefixtures("here")
def test_each_scope_and_cache_state_is_a_row(suite: Path, tmp_path: Path) -> None:
    path = tmp_path / "four.yaml"
    path.write_text(SUITE + "scopes: [kernel, op]\ncaches: [cold, hot]\n")
    rows = store.rows(
        measure(read_suite(str(path)), Flags("sim", replicates=1), tmp_path / "r", None)
    )
    medians: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        measure_of = row.scope, row.cache
        medians.setdefault(row.case.id, {})[measure_of] = float(np.median(row.samples_us))
    for taken in medians.values():
        assert taken.keys() == {
            ("kernel", "cold"),
            ("kernel", "hot"),
            ("op", "cold"),
            ("op", "hot"),
        }
        assert taken["kernel", "hot"] < 1.1 * taken["kernel", "cold"]
        assert taken["kernel", "cold"] < 1.1 * taken["op", "cold"]


MASK = {"m": 40, "context": 56, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
MASK |= {"block": 8, "pattern": "top_k_blocks", "sparsity": 0.3}


def test_a_simulated_run_of_an_earlier_version_is_not_read(whole: Path, tmp_path: Path) -> None:
    earlier = shutil.copytree(whole, tmp_path / "run")
    facts = json.loads((earlier / "environment.json").read_text())
    (earlier / "environment.json").write_text(json.dumps(facts | {"sim": {"seed": 0}}))
    with pytest.raises(ResultError, match="found those of a simulated GPU"):
        store.read(earlier)


def test_users_cannot_name_a_simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stand_in.VARIABLE)
    for device in ("sim", "sim:l4"):
        assert "the simulated GPU is gone" in refusal("run", "quick", "--device", device)

"""The suite `power` on the simulated GPU: gains under three loads, on its page and in its table."""

from pathlib import Path

import pytest

from sparsebench.harness.bench import energy
from sparsebench.harness.plan.suite import read as read_suite
from sparsebench.harness.run.measure import measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.reports.figures import power
from sparsebench.reports.findings import headline_text, headlines
from sparsebench.results.run import store
from sparsebench.results.tables.analysis import Analysis, analyse
from sparsebench.results.tables.frame import records
from tests.simulated.gpu_model import UNPRUNED
from tests.simulated.in_process import in_this_process

ONLY = "m=4096 sparsity=0.9"


def measured(folder: Path, with_energy: bool) -> Analysis:
    flags = Flags("sim", replicates=3, only=ONLY, energy=with_energy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "require_meter", lambda identity: None)
        in_this_process(patch)
        return analyse(store.read(measure(read_suite("power"), flags, folder / "run", None)))


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return measured(tmp_path_factory.mktemp("power"), with_energy=True)


def test_a_gain_grows_under_load_because_unpruned_weights_take_longer(analysis: Analysis) -> None:
    lines = {line["label"]: line for line in records(analysis.timed)}
    assert [*lines] == ["dense/cublas, unpruned weights", "dense/cublas", "bsr/default"]
    for line in (lines["dense/cublas"], lines["bsr/default"]):
        for load in ("half", "full"):
            grows = line[f"{load}_speedup"] / line["speedup"]
            assert grows == pytest.approx(UNPRUNED[load] / UNPRUNED[""], rel=0.02)
    assert lines["dense/cublas"]["full_mhz"] > lines["dense/cublas, unpruned weights"]["full_mhz"]


def test_the_headline_says_what_loads_change(analysis: Analysis) -> None:
    (finding,) = headlines(analysis)
    half, full = (finding.best[f"{load}_speedup"] for load in ("half", "full"))
    expected = f"{half:.3g}× half loaded and {full:.3g}× back to back"
    assert expected in headline_text(finding)[1]


def test_the_page_has_a_line_for_each_case(analysis: Analysis) -> None:
    page = str(power.draw(analysis))
    for label in ("dense/cublas, unpruned weights", "dense/cublas", "bsr/default"):
        assert label in page
    assert "m 4096, 4096 × 4096, 90 %" in page
    assert page.count("<tr") == 1 + 3


def test_a_run_without_energy_has_no_such_section(tmp_path: Path) -> None:
    assert power.draw(measured(tmp_path, with_energy=False)) == ""

"""Who searches, in a run of several processes: the simulated GPU, its workers in this process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparsebench.harness.plan.suite import read
from sparsebench.harness.run import repeat
from sparsebench.harness.run.measure import RunOptions, Stopped, measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.shared_runs.sharing import measure_alone
from sparsebench.kernels._common.search import MOST_LINES, finalists
from sparsebench.results.run import store
from sparsebench.results.run.provenance import Choices, choices_of
from sparsebench.results.run.store import StoredRun
from sparsebench.results.statistics.outcome import DIFFERENT, Outcome
from sparsebench.results.tables.analysis import analyse
from tests.simulated.gpu_model import WAYS
from tests.tools.marks import exhaustive
from tests.tools.suites import BSR, CSR, linear

pytestmark = pytest.mark.usefixtures("in_one_process")

SUITE = linear("m: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], n: 64, k: 64, block: 16", BSR, CSR)
# All is launching, 200 µs of it: bsr_triton is as fast as cublas, and cusparse_csr 1 % faster.
SPEC = """
schema: sparsebench/sim@1
launch_us: 100
efficiency: {dense/cublas: 0.5, bsr/bsr_triton: 0.5, csr/cusparse_csr: 0.505}
"""


@pytest.fixture(scope="module")
def verdict(in_one_process: None, tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """Return a run of eight processes whose searches have a regret."""
    folder = tmp_path_factory.mktemp("verdict")
    return measured(folder, "regret: 0.01", replicates=8, only="m=1|2|3|4")


def measured(folder: Path, spec: str, replicates: int, only: str = "") -> StoredRun:
    (folder / "mine.yaml").write_text(SUITE)
    (folder / "spec.yaml").write_text(SPEC + spec)
    flags = Flags(f"sim:{folder / 'spec.yaml'}", replicates=replicates, only=only)
    return store.read(measure(read(str(folder / "mine.yaml")), flags, folder / "run", None))


def choices_by_case(run: StoredRun) -> dict[str, list[Any]]:
    """Return what each case settled on, process by process."""
    result: dict[str, list[Any]] = {}
    for row in sorted([*run.rows, *run.reference], key=lambda row: row.replicate):
        result.setdefault(row.case.id, []).append(row.choice)
    return result


def as_original(run: StoredRun) -> bool:
    """Say whether every twin did in each process what its original did."""
    lines = analyse(run).rows
    same = lines.groupby(["problem_id", "format", "kernel", "replicate"]).choice.nunique()
    return bool(lines.twin.any() and (same == 1).all())


def held(cases: pd.DataFrame) -> pd.DataFrame:
    return cases[~cases.twin.astype(bool) & ~cases.baseline.astype(bool)]


def test_each_process_of_a_verdict_searches(verdict: StoredRun) -> None:
    assert choices_of(verdict.state) is Choices.AMONG
    result = choices_by_case(verdict).values()
    assert np.median([len({choice["way"] for choice in choices}) for choices in result]) >= 4
    assert as_original(verdict)


def test_later_processes_search_among_the_finalists_of_the_first(verdict: StoredRun) -> None:
    rows = [row for row in (*verdict.rows, *verdict.reference) if not row.case.contender.twin]
    first = {row.case.id: row for row in rows if row.replicate == 0}
    for row in rows:
        ways = [line["choice"]["way"] for line in row.candidates if "choice" in line]
        earlier = {choice["way"] for choice in finalists(first[row.case.id].candidates)}
        assert row.choice["way"] in ways
        assert len(ways) == MOST_LINES if row.replicate == 0 else {*ways} == earlier
        assert len(earlier) < WAYS


def test_a_resumed_run_takes_the_finalists_from_its_rows(
    verdict: StoredRun, tmp_path: Path
) -> None:
    suite, flags = read(str(verdict.path.parent / "mine.yaml")), Flags(**verdict.state["flags"])
    flags = replace(flags, device=f"sim:{verdict.path.parent / 'spec.yaml'}")

    def stop(done: int, total: int, problem: str) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        measure(suite, flags, tmp_path / "run", None, RunOptions(progress=stop))
    again = store.read(measure(suite, flags, None, tmp_path / "run"))
    assert choices_by_case(again) == choices_by_case(verdict)


def test_in_a_look_the_first_process_searches_for_all(tmp_path: Path) -> None:
    run = measured(tmp_path, "regret: 0.01", replicates=5, only="m=1|2")
    assert choices_of(run.state) is Choices.FIRST
    assert all(result == [result[0]] * 5 for result in choices_by_case(run).values())
    assert as_original(run)


@pytest.mark.parametrize("command", ["reproduce", exhaustive("confirm")])
def test_a_repeated_run_searches_again(command: str, verdict: StoredRun, tmp_path: Path) -> None:
    device = f"sim:{verdict.path.parent / 'spec.yaml'}"
    setup = repeat.Setup(device, None, tmp_path / "again", RunOptions(), measure_alone)
    cells = {"cases": 1, "replicates": 6} if command == "confirm" else {}
    again = store.read(getattr(repeat, command)(verdict.path, setup, **cells))
    assert choices_of(again.state) is Choices.AMONG
    assert any(row.candidates for row in again.rows if row.case.contender.baseline)


def test_verdicts_on_the_simulated_gpu_are_right(tmp_path: Path) -> None:
    """Without regret: ten equal cases, ten that are 1 % faster, at a process sd of 0.3 %."""
    cases = held(analyse(measured(tmp_path, "process: 0.003", replicates=8)).cases)
    equal, faster = (cases[cases.kernel == name] for name in ("bsr_triton", "cusparse_csr"))
    assert not equal.outcome.isin(DIFFERENT).any()
    assert (faster.outcome == Outcome.FASTER).sum() >= 9
    assert not (faster.outcome == Outcome.EQUAL).any()


def test_with_regret_intervals_on_the_simulated_gpu_hold_the_truth(verdict: StoredRun) -> None:
    cases = held(analyse(verdict).cases)
    truth = np.where(cases.kernel == "bsr_triton", 1.0, 1.01)
    assert np.mean((cases.speedup_low <= truth) & (truth <= cases.speedup_high)) >= 0.9

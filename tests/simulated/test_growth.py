"""How sharing a plan grows: the program behind harness/CLUSTER.md, and its table."""

import re
from pathlib import Path

import pytest

from sparsebench.harness.plan.selection import planned
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.results import store
from tests.simulated import growth
from tests.tools.paths import ROOT


def test_sixteen_gpus_share_a_plan_evenly_and_a_late_one_costs_no_other_a_wait() -> None:
    asked, took = growth.suite(1), [2.0, 3.0, 4.0]
    alone, shared, late = (
        growth.grown_here(asked, gpus, took, late_s) for gpus, late_s in ((1, 0), (16, 0), (16, 60))
    )
    contests = growth.REPLICATES * len(planned(asked, "sim"))
    assert (alone.least, alone.most) == (contests, contests)
    assert shared.wall_s * 16 < 1.5 * alone.wall_s  # what each part pays itself is a third here
    assert late.wall_s < 60 + shared.wall_s
    assert late.gpu_s < 1.2 * shared.gpu_s


def test_the_runs_of_eight_simulated_gpus_are_merged(tmp_path: Path) -> None:
    asked = growth.suite(1)
    runs = growth.written(asked, 8, tmp_path / "run.shards")
    run = store.read(merge(runs, tmp_path / "run"))
    found = {row.case.problem.id for row in [*run.rows, *run.reference]}
    assert found == {contest.problem.id for contest in planned(asked, "sim")}
    assert len(run.environment["devices"]) == 8


@pytest.mark.exhaustive
def test_the_table_of_the_page_is_what_the_program_prints() -> None:
    page = (ROOT / "harness/CLUSTER.md").read_text()
    (table,) = re.findall(r"<!-- growth -->(.*?)<!-- end -->", page, re.DOTALL)
    took, whole = growth.contest_seconds(), growth.suite()
    alone, shared = (growth.grown_here(whole, gpus, took) for gpus in (1, 64))
    assert growth.line(shared, alone.wall_s, 0.0) in table.splitlines()

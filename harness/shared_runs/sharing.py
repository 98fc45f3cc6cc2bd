"""A suite shared out over several GPUs, and resumed: the entrance to this folder.

    suite, Plan ─> RUN.shards ─> threads for the GPUs of this host   (local_gpus.py)   ┐
                              ─> jobs of a cluster, one GPU each     (cluster_jobs.py) ┴─> RUN

A run that was stopped, or whose process ended, is resumed from RUN.shards alone.
"""

import shutil
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

from sparsebench.errors import SuiteError
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import RunOptions, require_new
from sparsebench.harness.shared_runs import cluster_jobs, local_gpus, shared_folder
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.part_work import seal_all
from sparsebench.harness.shared_runs.shared_folder import Plan


def share(
    suite: Suite,
    plan: Plan,
    out: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> Path:
    """Measure a suite as planned and return the merged run at `out`, or resume it.

    Raises SuiteError for a plan that cannot be shared out so, and as `measure` and `merge` do.
    """
    plan = replace(plan, origin=dict(options.origin or {}))
    _require_new(suite, plan, out)
    folder = shared_folder.beside(out)
    if (folder / "plan.json").exists():
        shared_folder.require_same(folder, plan, suite.text)
    else:
        shared_folder.create(folder, plan, suite.text, options.pinned)
        try:
            if plan.by != "devices":
                cluster_jobs.send(folder, plan, plan.numbers)
        except SuiteError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return resume(folder, options)


def resume(run: Path, options: RunOptions = RunOptions()) -> Path:  # noqa: B008 (frozen)
    """Measure the rest of a run that is shared out, and return the merged run."""
    folder = shared_folder.beside(run)
    plan, suite = shared_folder.read(folder)
    module = local_gpus if plan.by == "devices" else cluster_jobs
    module.measure_parts(folder, suite, plan, options)
    runs, out = seal_all(folder, plan, suite), shared_folder.merged_at(folder)
    return merge(runs, out, plan.flags.data, plugins=True, whole=options.until == inf)


def _require_new(suite: Suite, plan: Plan, out: Path) -> None:
    twice = [name for name, count in Counter(plan.devices).items() if count > 1]
    if plan.by == "devices" and twice:
        raise SuiteError(f"--devices: expected each device once, found {twice[0]} twice")
    require_new(out)
    count, parts = len(plan.contests(suite)), len(plan.devices)
    if parts > count:
        expected = f"at most {count} parts, one for each problem"
        raise SuiteError(f"{suite.name}: expected {expected}; found {parts}")

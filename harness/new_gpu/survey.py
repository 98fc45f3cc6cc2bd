"""A survey: what a device is worth for sparse formats, measured within a time budget.

    doctor   fitness.json        whether the machine is fit to measure
             kernels.json        which kernels run here, and why the others do not (choices.py)
    tune     the user's cache    configurations for this GPU (run/tuning.py)
    screen   screen/             the core suite in one process, coarse problems first
    decide   decide/             the deciding problems (choices.py) in FEWEST processes, which
                                 search among the finalists of the screening
    page     report.html         the answer, and the same cases on other GPUs

Every step has a share of the time that is left when it starts, and stops by itself. The first
process of `decide` has an equal share of its time, in which it takes problems in order, and the
later ones repeat what it reached, so nothing is estimated. survey.json lists what a step did not
reach. Nothing here knows the name of a GPU. The doctor runs in a separate process, so that it
leaves no memory allocated on the device.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.doctor.findings import warning
from sparsebench.harness.machine.stand_in import stand_in
from sparsebench.harness.new_gpu.choices import coarse, deciding, probe
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import Progress, RunOptions, measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.tuning import tune
from sparsebench.kernels._common import choices, front_extension
from sparsebench.results.formatting import amount
from sparsebench.results.record import Problem
from sparsebench.results.run import bundle, store
from sparsebench.results.run.store import StoredRun, without_paths
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import analyse

SCHEMA = "sparsebench/survey@1"
SUITES = {"cpu": "quick"}  # the core suite would take hours on 2 cores
SUITE = "core"
# Shares of the time left; deciding has the rest, less PAGE_S
TUNE, SCREEN = 0.2, 0.45
DOCTOR = (sys.executable, "-P", "-m", "sparsebench", "doctor", "--json", "--device")
DOCTOR_S = 60.0  # the doctor takes 10 s, and its process has to start
COMPILE = f"from {front_extension.__name__} import front_type; front_type()"
FRONT = sys.executable, "-P", "-c", COMPILE  # 20 s without a cache
PAGE_S = 25.0  # the reports, the published runs and the page take 15 s on two idle cores
SILENT_S = 60.0  # without an answer for so long a contender has hung


@dataclass
class Survey:
    """A survey on disk.

    seconds  of each finished step
    left     why a step did not finish
    notes    what a reader should know about a step
    """

    path: Path
    device: str
    budget_s: float
    suite: str
    seconds: dict[str, float] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def write(self) -> None:
        data = {"schema": SCHEMA, **asdict(self)}
        del data["path"]
        store.write_json(self.path / "survey.json", data)


def survey(device: str, budget_s: float, path: Path, progress: Callable[[str], Progress]) -> Survey:
    """Survey a device into a new directory."""
    if path.exists():
        raise SuiteError(f"--out {path}: expected a new directory, found one")
    path.mkdir(parents=True)
    suite = SUITES.get(device.partition(":")[0], SUITE)
    survey = Survey(path, device, budget_s, suite)
    end = monotonic() + survey.budget_s - PAGE_S
    survey.write()
    for name, step in STEPS.items():
        began = monotonic()
        if reason := step(survey, end, progress(name)):
            survey.left[name] = reason
        else:
            survey.seconds[name] = round(monotonic() - began, 1)
        survey.write()
    return survey


Step = Callable[[Survey, float, Progress], str]
"""Takes the survey, its end as a time.monotonic(), and the progress; returns why it stopped early,
or an empty text."""


def _doctor(survey: Survey, end: float, progress: Progress) -> str:
    """Examine the machine; meanwhile compile front.cpp, and look which kernels run here."""
    with ThreadPoolExecutor(2) as pool:
        if survey.on_gpu:
            pool.submit(subprocess.run, FRONT, capture_output=True, check=False)
        examined = pool.submit(_doctor_findings, survey.device)
        store.write_json(survey.path / "kernels.json", [asdict(k) for k in probe(survey.device)])
        store.write_json(survey.path / "fitness.json", examined.result())
    return ""


def _doctor_findings(device: str) -> list[dict[str, Any]]:
    """Return the doctor's findings, or one that says why it gave none."""
    if stand_in(device):
        return []
    try:
        reply = subprocess.run(
            [*DOCTOR, device], capture_output=True, timeout=DOCTOR_S, check=False
        )
        findings: list[dict[str, Any]] = json.loads(reply.stdout)["findings"]
        return findings
    except subprocess.TimeoutExpired:
        reason = f"no answer in {DOCTOR_S:g} s"
    except (ValueError, KeyError):
        last = reply.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        reason = without_paths("".join(last)) or f"it ended with {reply.returncode}"
    return [
        asdict(warning("doctor", reason, "It is unknown whether the machine is fit to measure."))
    ]


def _tune(survey: Survey, end: float, progress: Progress) -> str:
    if not survey.on_gpu:
        return ""
    if stored := choices.package_summary(torch.device(survey.device)):
        count = amount(stored["choices"], "choice")
        here = f"sparsebench has {count} for such a GPU ({stored['file']})"
        survey.notes["tune"] = f"skipped, because {here}"
        return ""
    minutes = TUNE * (end - monotonic()) / 60
    if minutes <= 0:
        return "no time left"
    tuned = tune(read(survey.suite), survey.device, minutes, progress=progress)
    return f"{amount(tuned.left, 'problem')} not tuned" if tuned.left else ""


def _screen(survey: Survey, end: float, progress: Progress) -> str:
    until = monotonic() + SCREEN * (end - monotonic())
    return _measure(survey, "screen", 1, "", until, progress, coarse(_problems(survey)))


def _decide(survey: Survey, end: float, progress: Progress) -> str:
    """Measure the deciding problems."""
    screened = store.read(survey.path / "screen")
    if not screened.rows:
        expected = "expected time for one problem, found less"
        raise SuiteError(f"--budget {survey.budget_s:g}s: {expected}")
    left = deciding(analyse(screened).cases, _problems(survey))
    if not left:
        return "expected a case with a time in screen/, found none"
    ranks = {problem: rank for rank, problem in enumerate(left)}
    only = f"case={'|'.join(left.values())}"
    return _measure(survey, "decide", FEWEST, only, end, progress, ranks, screened)


def _problems(survey: Survey) -> list[Problem]:
    return [contest.problem for contest in read(survey.suite).contests]


def _measure(
    survey: Survey,
    name: str,
    replicates: int,
    only: str,
    until: float,
    progress: Progress,
    ranks: Mapping[str, int],
    searched: StoredRun | None = None,
) -> str:
    """Measure the suite into a folder of the survey; return what is left.

    ranks  of problems, the first ones are measured first; references have none, and precede them
    """
    flags, suite = Flags(survey.device, None, SILENT_S, replicates, only), read(survey.suite)
    options = RunOptions(
        progress=progress,
        searched=[*searched.rows, *searched.reference] if searched else (),
        until=until,
        even=True,
        rank=lambda contest: ranks.get(contest.problem.id, -1),
    )
    path = measure(suite, flags, survey.path / name, None, options)
    contests = store.read(path).state["contests"]
    left = contests["of"] - contests["done"]
    if left:
        keep_equal_processes(path)
    return f"{left} of {amount(contests['of'], 'contest')} not reached" if left else ""


def keep_equal_processes(path: Path) -> None:
    """Drop the contests that not every process of an ended run reached, and seal it again.

    What is left has one set of cases in every process, as `validate` requires of a run. Nothing
    changes if no contest is left.
    """
    every = store.rows(path)
    reached: dict[str, set[int]] = {}
    for row in every:
        reached.setdefault(row.case.problem.id, set()).add(row.replicate)
    processes = {row.replicate for row in every if not row.reference}
    whole = {problem for problem, numbers in reached.items() if processes <= numbers}
    complete = [r for r in every if r.case.problem.id in whole and r.replicate in processes]
    if all(row.reference for row in complete):
        return
    state = store.facts(path)[1]
    state["flags"]["replicates"] = len(processes)
    state["contests"]["done"] = len({(row.replicate, row.case.problem.id) for row in complete})
    bundle.unseal(path)
    store.replace_rows(path, complete)
    store.set_state(path, state)
    bundle.seal(path)


STEPS: dict[str, Step] = {"doctor": _doctor, "tune": _tune, "screen": _screen, "decide": _decide}

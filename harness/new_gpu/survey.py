"""A survey: what a device is worth for sparse formats, measured within a time budget.

    doctor   fitness.json        whether the machine is fit to measure
    probe    kernels.json        which kernels run here, and why the others do not
    tune     the user's table    configurations for this GPU (run/tuning.py)
    screen   screen/             the core suite in one process, coarse problems first
    decide   decide/             the deciding problems (problem_choice.py) in PROCESSES processes:
                                 as many as fit, estimated from the screening (costs/estimates.py)
    page     report.html         the answer, and the same cases on other GPUs

Each step gets a share of the time that is left when it starts, and stops by itself. survey.json
lists what a step did not reach, and `--resume` finishes it, also after Ctrl-C. Nothing here knows
the name of a GPU. The doctor runs in a process of its own, so that it leaves no memory allocated on
the device.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.costs.estimates import affordable
from sparsebench.harness.costs.measured_times import times
from sparsebench.harness.doctor.findings import Finding, Level
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.new_gpu.probe import probe
from sparsebench.harness.new_gpu.problem_choice import DECIDED, coarse, deciding
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import Progress, RunOptions, Stopped, measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.tuning import tune
from sparsebench.harness.shared_runs import shared_folder
from sparsebench.harness.shared_runs.shared_folder import Plan
from sparsebench.harness.shared_runs.sharing import share
from sparsebench.kernels._common import tuned_table
from sparsebench.results import store
from sparsebench.results.analysis import analyse
from sparsebench.results.formatting import amount
from sparsebench.results.store import without_paths

SCHEMA = "sparsebench/survey@1"
SUITES = {"cpu": "quick"}  # the core suite would take hours on 2 cores
SUITE = "core"
TUNE, SCREEN = 0.2, 0.5  # shares of the time left; deciding has the rest, less PAGE_S
SAFE = 0.75  # share that is planned: on an H200 a process took 1.25 times its estimate
DOCTOR = (sys.executable, "-P", "-m", "sparsebench", "doctor", "--json", "--device")
DOCTOR_S = 60.0  # the doctor takes 10 s, and its process has to start
PAGE_S = 20.0  # both reports and the page take 12 s on two idle cores
PROCESSES = 8
SILENT_S = 60.0  # without an answer for so long a contender has hung


@dataclass
class Survey:
    """A survey on disk.

    seconds  of each finished step
    left     why a step did not finish
    notes    what a reader should know about a step
    devices  those that share the runs, `device` first; empty for one
    """

    path: Path
    device: str
    budget_s: float
    suite: str
    seconds: dict[str, float] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Write survey.json."""
        data = {"schema": SCHEMA, **asdict(self)}
        del data["path"]
        store.write_json(self.path / "survey.json", data)


def survey(
    device: str,
    budget_s: float,
    path: Path,
    progress: Callable[[str], Progress],
    devices: Sequence[str] = (),
) -> Survey:
    """Survey a device into a new directory.

    Several `devices` of one kind share both runs; the other steps use the first one.
    """
    if path.exists():
        raise SuiteError(f"--out {path}: expected a new directory, found one; --resume finishes it")
    kind = "sim" if simulated(device) else torch.device(device).type
    path.mkdir(parents=True)
    survey = Survey(path, device, budget_s, SUITES.get(kind, SUITE), devices=list(devices))
    return _run(survey, budget_s, progress)


def resume(path: Path, budget_s: float | None, progress: Callable[[str], Progress]) -> Survey:
    """Finish the steps of an earlier survey, within its budget or another."""
    survey = read_survey(path)
    return _run(survey, budget_s or survey.budget_s, progress)


def read_survey(path: Path) -> Survey:
    """Read a survey. Raises ResultError if the folder holds none."""
    file = path / "survey.json"
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{file}: expected a survey, found {error}") from error
    if data.pop("schema", None) != SCHEMA:
        raise ResultError(f"{file}: expected schema {SCHEMA}, found another")
    return Survey(path, **data)


def _run(survey: Survey, budget_s: float, progress: Callable[[str], Progress]) -> Survey:
    """Run the remaining steps. Raises Stopped, with the survey's path, if interrupted."""
    end = monotonic() + budget_s - PAGE_S
    survey.write()
    for name, step in STEPS.items():
        if name in survey.seconds:
            continue
        began = monotonic()
        survey.left.pop(name, None)
        try:
            reason = step(survey, end, progress(name))
        except KeyboardInterrupt as stop:
            raise Stopped(survey.path) from stop
        if reason:
            survey.left[name] = reason
        else:
            survey.seconds[name] = round(monotonic() - began, 1)
        survey.write()
    return survey


def _doctor(survey: Survey, end: float, progress: Progress) -> str:
    findings = [] if simulated(survey.device) else _examined(survey.device)
    store.write_json(survey.path / "fitness.json", findings)
    return ""


def _examined(device: str) -> list[dict[str, Any]]:
    """Return the doctor's findings, or one that says why it gave none."""
    try:
        reply = subprocess.run(
            [*DOCTOR, device],
            capture_output=True,
            timeout=DOCTOR_S,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
        findings: list[dict[str, Any]] = json.loads(reply.stdout)["findings"]
    except subprocess.TimeoutExpired:
        reason = f"no answer in {DOCTOR_S:g} s"
    except (ValueError, KeyError):
        last = reply.stderr.strip().splitlines()[-1:]
        reason = without_paths("".join(last)) or f"it ended with {reply.returncode}"
    else:
        return findings
    means = "It is unknown whether the machine is fit to measure."
    return [asdict(Finding(Level.WARNING, "doctor", reason, means))]


def _probe(survey: Survey, end: float, progress: Progress) -> str:
    kernels = [] if simulated(survey.device) else probe(torch.device(survey.device))
    store.write_json(survey.path / "kernels.json", [asdict(kernel) for kernel in kernels])
    return ""


def _tune(survey: Survey, end: float, progress: Progress) -> str:
    if simulated(survey.device) or torch.device(survey.device).type != "cuda":
        return ""
    if table := _packaged(torch.device(survey.device)):
        survey.notes["tune"] = f"{table}: nothing was tuned"
        return ""
    minutes = TUNE * (end - monotonic()) / 60
    if minutes <= 0:
        return "no time left"
    tuned = tune(read(survey.suite), survey.device, minutes, progress=progress)
    return f"{amount(tuned.left, 'problem')} not tuned" if tuned.left else ""


def _packaged(device: torch.device) -> str:
    """Describe the package's table that kernels use on this device; "" if there is none."""
    for table in tuned_table.in_force(device) or []:
        if table["of"] == "package" and table["current"]:
            file = tuned_table.file_in(tuned_table.folders()["package"], device)
            gpu, count = tuned_table.read(file).gpu, table["current"]
            return f"the package's table {file.name} has {amount(count, 'entry')}, tuned on {gpu}"
    return ""


def _screen(survey: Survey, end: float, progress: Progress) -> str:
    until = monotonic() + SCREEN * (end - monotonic())
    return _measured(survey, "screen", 1, "", until, progress)


def _decide(survey: Survey, end: float, progress: Progress) -> str:
    """Measure as many deciding problems as fit into the time left, in PROCESSES processes."""
    target = survey.path / "decide"
    if only := _chosen(target):
        return _measured(survey, "decide", PROCESSES, only, end, progress)
    screened = store.read(survey.path / "screen")
    candidates = deciding(analyse(screened).cases)
    if not candidates:
        return "expected a case with a time in screen/, found none"
    left_s = SAFE * (end - monotonic()) * max(1, len(survey.devices))
    kind = survey.device.partition(":")[0]
    chosen = affordable(
        read(survey.suite), times([screened]), candidates, left_s, PROCESSES,
        device=kind if kind == "cpu" else "cuda",
    )  # fmt: skip
    if not chosen:
        if "screen" in survey.left:
            survey.left["screen"] = _measured(survey, "screen", 1, "", end, progress)
            survey.left = {step: reason for step, reason in survey.left.items() if reason}
        return f"{amount(len(candidates), 'problem')} would decide, no time left for a verdict"
    only = f"case={'|'.join(dict.fromkeys(case for cases in chosen.values() for case in cases))}"
    if len(chosen) < len(candidates):
        survey.notes["decide"] = (
            f"{len(candidates) - len(chosen)} of {len(candidates)} problems that decide have only a"
            " look; a longer --budget gives more of them a verdict"
        )
    return _measured(survey, "decide", PROCESSES, only, end, progress)


def _chosen(target: Path) -> str:
    """Return the cases that an earlier survey chose to decide, as a condition; "" if none."""
    if (target / "run.json").exists():
        return str(store.read(target).state["flags"]["only"])
    shared = shared_folder.beside(target)
    return shared_folder.read(shared)[0].flags.only if (shared / "plan.json").exists() else ""


def _measured(
    survey: Survey, name: str, replicates: int, only: str, until: float, progress: Progress
) -> str:
    """Measure the suite into a folder of the survey, or resume it; return what is left."""
    target = survey.path / name
    stopped = target if (target / "run.json").exists() else None
    flags, suite = Flags(survey.device, None, SILENT_S, replicates, only), read(survey.suite)
    problems = [contest.problem for contest in suite.contests]
    ranks = coarse(problems, DECIDED) if name == "screen" else {}  # references come first
    options = RunOptions(
        progress=progress, until=until, rank=lambda contest: ranks.get(contest.problem.id, -1)
    )
    if len(survey.devices) > 1:
        shutil.rmtree(target, ignore_errors=True)  # merged again from the parts beside it
        path = share(suite, Plan(suite.name, flags, tuple(survey.devices)), target, options)
    else:
        path = measure(suite, flags, None if stopped else target, stopped, options)
    state = store.read(path).state
    contests = state["contests"]
    if contests["done"] < contests["of"]:
        left = contests["of"] - contests["done"]
        return f"{left} of {amount(contests['of'], 'contest')} not reached"
    return ""


STEPS: dict[str, Callable[[Survey, float, Progress], str]] = {
    "doctor": _doctor,
    "probe": _probe,
    "tune": _tune,
    "screen": _screen,
    "decide": _decide,
}

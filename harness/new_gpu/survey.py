"""A survey: what a device is worth for sparse formats, inside a budget of time.

    doctor   fitness.json        is the machine fit to measure
    probe    kernels.json        which kernels run here, and why others do not
    tune     the user's table    configurations for this GPU (harness/run/tuning.py)
    screen   screen/             the core suite in one process, coarse problems first (costs.py)
    decide   decide/             the problems that decide (deciding.py), in PROCESSES processes:
                                 as many as there is time for, by what the screening took
    page     report.html         the answer, and the same cases on other GPUs

A step gets a share of what is left when it starts, and stops by itself. What it did not reach is
in survey.json, and `--resume` goes on with it, after Ctrl-C too. Nothing here knows the name of a
GPU. The doctor runs in a process of its own, which leaves no memory taken on the device.
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
from sparsebench.harness.shared_runs import shared_folder as folders
from sparsebench.harness.shared_runs.local_gpus import share
from sparsebench.kernels._common import tuned_table
from sparsebench.results import store
from sparsebench.results.analysis import analyse
from sparsebench.results.formatting import amount
from sparsebench.results.store import without_paths

SCHEMA = "sparsebench/survey@1"
SUITES = {"cpu": "quick"}  # of 2 cores the core suite would take hours
SUITE = "core"
TUNE, SCREEN = 0.2, 0.5  # shares of what is left; deciding has the rest, less PAGE_S
SAFE = 0.75  # of that is planned for: on an H200 a process took 1.25 times what its cases had cost
DOCTOR = (sys.executable, "-P", "-m", "sparsebench", "doctor", "--json", "--device")
DOCTOR_S = 60.0  # it takes ten, and the start of a process
PAGE_S = 20.0  # the reports of both runs and the page: 12 s of two quiet cores
PROCESSES = 8
SILENT_S = 60.0  # a contender that says nothing for so long has hung


@dataclass
class Survey:
    """A survey on disk: what was asked for, the seconds of each finished step, and what is left.

    `notes` say of a step what a reader should know of it; `left` why it did not finish.
    """

    path: Path
    device: str
    budget_s: float
    suite: str
    seconds: dict[str, float] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)  # where several share the runs, `device` first

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
    """Survey a device into a new directory, and return what is in it.

    Several `devices` of one kind share both runs; the other steps are of the first one.
    """
    if path.exists():
        raise SuiteError(f"--out {path}: expected a new directory, found one; --resume goes on")
    kind = "sim" if simulated(device) else torch.device(device).type
    path.mkdir(parents=True)
    asked = Survey(path, device, budget_s, SUITES.get(kind, SUITE), devices=list(devices))
    return _go(asked, budget_s, progress)


def resume(path: Path, budget_s: float | None, progress: Callable[[str], Progress]) -> Survey:
    """Go on with the steps that an earlier survey did not finish, for its budget or another."""
    found = opened(path)
    return _go(found, budget_s or found.budget_s, progress)


def opened(path: Path) -> Survey:
    """Read a survey; ResultError where it is none."""
    file = path / "survey.json"
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ResultError(f"{file}: expected a survey, found {error}") from error
    if data.pop("schema", None) != SCHEMA:
        raise ResultError(f"{file}: expected schema {SCHEMA}, found another")
    return Survey(path, **data)


def _go(asked: Survey, budget_s: float, progress: Callable[[str], Progress]) -> Survey:
    """Run the steps that are left, each until its moment; Stopped has the survey's path."""
    end = monotonic() + budget_s - PAGE_S
    asked.write()
    for name, step in STEPS.items():
        if name in asked.seconds:
            continue
        began = monotonic()
        asked.left.pop(name, None)
        try:
            why = step(asked, end, progress(name))
        except KeyboardInterrupt as stop:
            raise Stopped(asked.path) from stop
        if why:
            asked.left[name] = why
        else:
            asked.seconds[name] = round(monotonic() - began, 1)
        asked.write()
    return asked


def _doctor(asked: Survey, end: float, progress: Progress) -> str:
    found = [] if simulated(asked.device) else _examined(asked.device)
    store.write_json(asked.path / "fitness.json", found)
    return ""


def _examined(device: str) -> list[dict[str, Any]]:
    """Return the doctor's findings; that it has none is a finding."""
    try:
        told = subprocess.run(
            [*DOCTOR, device], capture_output=True, text=True, timeout=DOCTOR_S, check=False
        )
        found: list[dict[str, Any]] = json.loads(told.stdout)["findings"]
    except subprocess.TimeoutExpired:
        why = f"no answer in {DOCTOR_S:g} s"
    except (ValueError, KeyError):
        last = told.stderr.strip().splitlines()[-1:]
        why = without_paths("".join(last)) or f"it ended with {told.returncode}"
    else:
        return found
    means = "Whether the machine is fit to measure is not known."
    return [asdict(Finding(Level.WARNING, "doctor", why, means))]


def _probe(asked: Survey, end: float, progress: Progress) -> str:
    known = [] if simulated(asked.device) else probe(torch.device(asked.device))
    store.write_json(asked.path / "kernels.json", [asdict(kernel) for kernel in known])
    return ""


def _tune(asked: Survey, end: float, progress: Progress) -> str:
    if simulated(asked.device) or torch.device(asked.device).type != "cuda":
        return ""
    if known := _packaged(torch.device(asked.device)):
        asked.notes["tune"] = f"{known}: nothing was tuned"
        return ""
    minutes = TUNE * (end - monotonic()) / 60
    if minutes <= 0:
        return "no time left"
    found = tune(read(asked.suite), asked.device, minutes, progress=progress)
    return f"{amount(found.left, 'problem')} not tuned" if found.left else ""


def _packaged(device: torch.device) -> str:
    """Say which of the package's tables has entries that kernels take on this device, if any."""
    for table in tuned_table.in_force(device) or []:
        if table["of"] == "package" and table["current"]:
            file = tuned_table.file_in(tuned_table.folders()["package"], device)
            gpu, count = tuned_table.read(file).gpu, table["current"]
            return f"the package's table {file.name} has {amount(count, 'entry')}, tuned on {gpu}"
    return ""


def _screen(asked: Survey, end: float, progress: Progress) -> str:
    until = monotonic() + SCREEN * (end - monotonic())
    return _measured(asked, "screen", 1, "", until, progress)


def _decide(asked: Survey, end: float, progress: Progress) -> str:
    """Measure as many deciding problems as there is time for, in PROCESSES processes."""
    target = asked.path / "decide"
    if only := _chosen(target):
        return _measured(asked, "decide", PROCESSES, only, end, progress)
    screened = store.read(asked.path / "screen")
    found = deciding(analyse(screened).cases)
    if not found:
        return "expected a case with a time in screen/, found none"
    left_s = SAFE * (end - monotonic()) * max(1, len(asked.devices))
    kind = asked.device.partition(":")[0]
    chosen = affordable(
        read(asked.suite), times([screened]), found, left_s, PROCESSES,
        device=kind if kind == "cpu" else "cuda",
    )  # fmt: skip
    if not chosen:
        if "screen" in asked.left:
            asked.left["screen"] = _measured(asked, "screen", 1, "", end, progress)
            asked.left = {step: why for step, why in asked.left.items() if why}
        return f"{amount(len(found), 'problem')} would decide, no time left for a verdict"
    only = f"case={'|'.join(dict.fromkeys(case for cases in chosen.values() for case in cases))}"
    if len(chosen) < len(found):
        asked.notes["decide"] = (
            f"{len(found) - len(chosen)} of {len(found)} problems that decide have a look and no"
            " verdict; a longer --budget measures more of them"
        )
    return _measured(asked, "decide", PROCESSES, only, end, progress)


def _chosen(target: Path) -> str:
    """Return what an earlier survey chose to decide; "" where none got so far."""
    if (target / "run.json").exists():
        return str(store.read(target).state["flags"]["only"])
    shared = folders.beside(target)
    return folders.read(shared).flags.only if (shared / "plan.json").exists() else ""


def _measured(
    asked: Survey, name: str, replicates: int, only: str, until: float, progress: Progress
) -> str:
    """Measure the suite into a folder of the survey, or go on with it; say what is left."""
    target = asked.path / name
    stopped = target if (target / "run.json").exists() else None
    flags, suite = Flags(asked.device, None, SILENT_S, replicates, only), read(asked.suite)
    problems = [contest.problem for contest in suite.contests]
    ranks = coarse(problems, DECIDED) if name == "screen" else {}  # references come first
    options = RunOptions(
        progress=progress, until=until, rank=lambda contest: ranks.get(contest.problem.id, -1)
    )
    if len(asked.devices) > 1:
        shutil.rmtree(target, ignore_errors=True)  # merged anew: its parts are beside it
        path = share(suite, flags, asked.devices, target, options)
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

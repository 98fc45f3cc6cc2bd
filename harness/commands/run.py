"""`sparsebench run`: measure a suite here, shared out over GPUs, or for a profiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebench.harness.commands import _options as opt
from sparsebench.harness.commands._console import (
    SOME_FAILED,
    measuring,
    message_printer,
    print_json,
    stdout,
    wide,
)
from sparsebench.harness.commands._sharing import Devices, Shards, Sharing, Slurm

if TYPE_CHECKING:
    from sparsebench.harness.plan.suite import Suite
    from sparsebench.harness.run.run_json import Flags

# Options that --resume takes from the run, and those that it takes from a shared plan as well.
FIXED_BY_RUN = "out", "only", "replicates", "energy", "devices", "slurm", "shards"
FIXED_BY_PLAN = "device", "data", "timeout"


def run(
    context: typer.Context,
    suite: opt.AnySuite = None,
    device: opt.Device = None,
    data: opt.Data = None,
    out: opt.Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Finish the interrupted run in this directory.")
    ] = None,
    only: opt.Only = "",
    timeout: opt.Timeout = 120.0,
    replicates: opt.Replicates = 3,
    energy: opt.Energy = False,
    peers: opt.Peers = None,
    repeat: opt.Repeat = 0,
    devices: Devices = "",
    slurm: Slurm = "",
    shards: Shards = 0,
    as_json: opt.Json = False,
    markdown: opt.Markdown = False,
) -> None:
    """Measure a suite, write its report, and print the answer."""
    opt.require_one_output(as_json, markdown)
    sharing = Sharing(devices, slurm, shards)
    if (suite is None) == (resume is None):
        raise typer.BadParameter("expected a suite, or --resume RUN alone")
    if resume:
        if repeat:
            raise typer.BadParameter("expected a suite with --repeat, found --resume")
        opt.refuse_beside_resume(context, FIXED_BY_RUN)
        from sparsebench.harness.shared_runs.run_paths import is_shared

        if shared_out := is_shared(resume):
            opt.refuse_beside_resume(context, FIXED_BY_PLAN)
        elif not resume.exists():
            from sparsebench.errors import ResultError

            never = (
                "a run has one from its first contest on; the command that began it begins again"
            )
            raise ResultError(
                f"--resume {resume}: expected the directory of a run, found none; {never}"
            )
        else:
            opt.require_run(resume)
        if shared_out:
            from sparsebench.harness.run.measure import RunOptions
            from sparsebench.harness.shared_runs import sharing as shared

            with measuring() as show:
                options = RunOptions(progress=show, on_message=message_printer())
                path = shared.resume(resume, options)
        else:
            path = _resume(resume, device, data, timeout)
    elif repeat:
        raise typer.Exit(_call_each(str(suite), device, data, only, repeat))
    else:
        from sparsebench.errors import SuiteError
        from sparsebench.harness.plan.selection import has_only_baselines
        from sparsebench.harness.plan.suite import read
        from sparsebench.harness.run.run_json import Flags

        first, requested = sharing.first(device), read(str(suite), data)
        if not slurm and has_only_baselines(requested, first, only):
            expected, hint = f"a contender that runs on {first}", f"`sparsebench check {suite}`"
            raise SuiteError(
                f"{suite}: expected {expected}, found only baselines; {hint} lists the reasons"
            )
        flags = Flags(first, data, timeout, replicates, only, energy)
        path = _measure(requested, flags, out=out, sharing=sharing)
    _report(path, as_json, markdown)


def _resume(run: Path, device: str | None, data: Path | None, timeout_s: float) -> Path:
    from sparsebench.errors import SuiteError
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.run.recorded_plan import suite_of_run
    from sparsebench.harness.run.run_json import Flags
    from sparsebench.results.run import store

    stopped = store.read(run)
    if stopped.state.get("shards"):
        raise SuiteError(f"--resume {run}: expected a run that was stopped, found a merged one")
    before = stopped.state["flags"]
    data = data or (Path(before["data"]) if before.get("data") else None)
    device = full_name(device or before["device"])
    flags = Flags.from_state(stopped.state, device=device, data=data, timeout_s=timeout_s)
    return _measure(suite_of_run(stopped, data), flags, resume=run)


def _measure(
    suite: "Suite",
    flags: "Flags",
    *,
    out: Path | None = None,
    resume: Path | None = None,
    sharing: Sharing | None = None,
) -> Path:
    """Measure on this device, or share the plan out, and return the run."""
    from sparsebench.harness.run.measure import RunOptions, measure

    with measuring() as show:
        options = RunOptions(progress=show, on_message=message_printer())
        if sharing:
            return sharing.measure(suite, flags, out, options)
        return measure(suite, flags, out, resume, options)


def _call_each(suite: str, device: str | None, data: Path | None, only: str, repeat: int) -> int:
    """Call each case of a suite for a profiler, without timing, and return the exit code."""
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.plan.selection import only as selected
    from sparsebench.harness.plan.suite import read
    from sparsebench.harness.run.profiling import call_each
    from sparsebench.results.record import Status

    picked, contests = pick(device), selected(read(suite, data).contests, only)
    code = 0
    for case in call_each(contests, picked, data, repeat):
        stdout.say(case.text)
        code = code if case.status in (Status.OK, Status.UNSUPPORTED) else SOME_FAILED
    return code


def _report(path: Path, as_json: bool, markdown: bool) -> None:
    """Print a run's answer and write its report; exit with SOME_FAILED if cases failed."""
    from sparsebench.reports.build import build
    from sparsebench.reports.published_answer import PublishedAnswer
    from sparsebench.reports.published_runs import published_runs
    from sparsebench.reports.terminal import RunAnswer, answer_json, answer_markdown, count_statuses
    from sparsebench.results.run import store
    from sparsebench.results.run.provenance import on_gpu
    from sparsebench.results.tables.analysis import analyse

    measured = store.read(path)
    page = path / "report.html"
    analysis = analyse(measured)
    counts = count_statuses(analysis)
    if as_json:
        head = {"run": str(path), "report": str(page), "cases": counts}
        print_json({**head, **answer_json(analysis)})
    elif markdown:
        stdout.write(answer_markdown(analysis))
    else:
        wide().print(RunAnswer(analysis))
        stdout.print("cases: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
        if not on_gpu(measured.environment):
            wide().print(PublishedAnswer(measured, published_runs()))
    build(analysis, page)  # after the answer, which need not wait for the page
    if not as_json and not markdown:
        stdout.say(f"report: {page}")
    if counts.keys() - {"ok", "unsupported"}:
        raise typer.Exit(SOME_FAILED)

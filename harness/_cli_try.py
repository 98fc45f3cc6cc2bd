"""The command for one kernel, try; and cases under a profiler, of try and of run."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness._cli import (
    SOME_FAILED,
    Data,
    Debug,
    Device,
    Peers,
    Profile,
    Repeat,
    err,
    out,
    wide,
)


def try_(
    kernel: Annotated[str, typer.Argument(help="A kernel's name.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="m=64 block=32 sparsity=0.9 ...")
    ] = None,
    device: Device = None,
    data: Data = None,
    peers: Peers = None,
    repeat: Repeat = 0,
    profile: Profile = "",
    debug: Debug = False,
) -> None:
    """Check one kernel against fp64 and time it beside its baseline."""
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.run import profiling as profiler
    from sparsebench.harness.run import try_kernel as tried

    given, on = words or [], pick(device)
    if profile:
        tried.plan(kernel, given, on, data)
        raise typer.Exit(profiler.under(profile, ["try", kernel, *given], str(on), data))
    if repeat:
        tried.repeat(kernel, given, on, repeat, data)
        return
    explain = {"explain": _told} if debug else {}
    found = tried.try_kernel(kernel, given, on, data, **explain)
    wide().print(tried.report(found), soft_wrap=True, highlight=False)
    if not found.right:
        raise typer.Exit(SOME_FAILED)


def profiled(
    suite: str, device: str | None, data: Path | None, only: str, repeat: int, profile: str
) -> int:
    """Call the cases of a suite for a profiler, and return its exit code. No time is taken."""
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.plan.selection import only as chosen
    from sparsebench.harness.plan.suite import read
    from sparsebench.harness.run import profiling as profiler

    on, contests = pick(device), chosen(read(suite, data).contests, only)
    if profile:
        command = ["run", suite, *(["--only", only] if only else [])]
        return profiler.under(profile, command, str(on), data)
    code = 0
    for case in profiler.call_each(contests, on, data, repeat):
        out.print(case.said, soft_wrap=True, highlight=False, markup=False)
        code = code if case.fine else SOME_FAILED
    return code


def _told(case: str, reason: str, traceback: str) -> None:
    err.print(f"{reason}\n{traceback}", soft_wrap=True, highlight=False, markup=False)

"""`sparsebench try`: one kernel on one problem, beside its baseline."""

from typing import Annotated

import typer

from sparsebench._completion import complete
from sparsebench.harness.commands._console import SOME_FAILED, stderr, warn, wide
from sparsebench.harness.commands._options import Data, Debug, Device, Peers, Repeat


def try_(
    kernel: Annotated[
        str, typer.Argument(help="A kernel's name.", autocompletion=complete("kernel"))
    ],
    words: Annotated[list[str] | None, typer.Argument(help="m=64 block=32 sparsity=0.9 …")] = None,
    device: Device = None,
    data: Data = None,
    peers: Peers = None,
    repeat: Repeat = 0,
    debug: Debug = False,
) -> None:
    """Check one kernel against fp64 and time it beside its baseline."""
    from sparsebench.harness.doctor import other_work
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.run import try_kernel as trial

    picked = pick(device)
    if repeat:
        trial.repeat(kernel, words or [], picked, repeat, data)
        return

    def on_failure(case: str, reason: str, traceback: str) -> None:
        if debug:
            stderr.say(f"{reason}\n{traceback}")

    began = other_work.read_spent()
    tried = trial.try_kernel(kernel, words or [], picked, data, on_failure)
    warn(other_work.host(began, other_work.read_spent(), picked.type))
    wide().print(trial.report(tried), soft_wrap=True, highlight=False)
    if not tried.right:
        raise typer.Exit(SOME_FAILED)

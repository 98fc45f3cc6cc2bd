"""The app: finds commands in this folder, runs one, and reports errors.

    sparsebench NAME ─> import commands/NAME.py alone ─> its function, or its app with subcommands

Exit codes are documented in harness/README.md. Every error becomes one line on stderr; for an
error inside sparsebench, SPARSEBENCH_TRACEBACK=1 also prints the traceback.
"""

import os
import select
import sys
import traceback
import warnings
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any

import typer

from sparsebench.harness.commands._console import (
    BAD_INPUT,
    DEFECT,
    INTERRUPTED,
    UNFIT,
    show_warning,
    stderr,
    stdout,
)

PACE = "the time left is shown while contests run"
PROFILER = "run `ncu` or `nsys profile` on the same command with --repeat 1"
REMOVED = {  # what older versions took on the command line, and what replaces it
    "--to": "use --out",
    "run --submit": "use --devices for GPUs of this host, --slurm for jobs",
    "--open": "the command prints the path of its page",
    "run --debug": "failures.log in the run has every traceback",
    "run --profile": PROFILER,
    "try --profile": PROFILER,
    "prune --tensors": "`prune` takes a model; `sparsify_` replaces layers of your own",
    "prune --activation": "`prune` takes a model, which has its activation",
    "prune --split": "`prune` takes a model, whose MLPs it prunes",
    "reproduce --inherit": "every contender searches again",
    "confirm --inherit": "every contender searches again",
    "run --shard": "--devices, --slurm and `campaign run` share a plan out",
    "merge": "a run in parts becomes whole by itself; `run --resume RUN` measures what it lacks",
    "new-gpu --resume": "a survey is made at once; a longer --budget reaches more",
    "new-gpu --devices": "a survey needs one GPU; `run core --devices` shares a suite out",
    "check --gpu": PACE,
    "check --replicates": PACE,
    "claims check --gpu": PACE,
    "campaign plan": "`campaign status` lists the entries",
    "campaign status --device": "`check SUITE --device` lists what a suite lacks there",
    "claims bound": "the page of a claim shows what the device allows in each cell",
    "claims lint": "`claims check FILE --plan` checks every field and counts the cells",
    "claims sentences": "suites/claims/README.md lists them; `claims report` has the verdicts",
    "claims report --tables": "the caveats of a claim name the authors' files",
    "report --errors": "the page “Should I prune?” shows losses beside speedups",
    "report --parquet": "use --csv; `sparsebench.load(RUN).frame()` is a table of pandas",
    "train-lm": "it is a script of the repository: experiments/train_lm.py",
    "whole": "it is a script of the repository: experiments/whole_model.py",
}


class Commands(typer.core.TyperGroup):
    """The commands of this folder, each imported when it is needed."""

    @cached_property
    def modules(self) -> dict[str, str]:
        names = sorted(module.name for module in iter_modules([str(Path(__file__).parent)]))
        return {name.rstrip("_").replace("_", "-"): name for name in names if name[0] != "_"}

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.modules]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None for an option. Raises a usage error for a name that is not one."""
        if (name := self.modules.get(cmd_name)) is None:
            from sparsebench._discovery import did_you_mean

            if cmd_name.startswith("-"):
                return None
            hint = did_you_mean(cmd_name, self.modules)
            return ctx.fail(f"expected a command, found {cmd_name!r}{hint}")
        target = getattr(import_module(f"sparsebench.harness.commands.{name}"), name)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(rich_markup_mode=None, add_completion=False)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # usage errors are a plain line, not a box
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": stdout.width,  # keeps the first line of each command's help whole
    },
)


def _print_version(requested: bool) -> None:
    if requested:
        stdout.write(f"sparsebench {version('sparsebench')}\n")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Measure whether sparse layers beat dense ones on a GPU, and in which format.

    \b
    Should I prune this model?        sparsebench advise Llama-3-8B --gpu H200 --batch 16
    Which format is fastest here?     sparsebench run quick
    Which one for my own shapes?      sparsebench run my.yaml
    Which one on a new GPU?           sparsebench new-gpu --budget 10m
    """


def main() -> int:
    """Run a command and return its exit code; print any error as one line on stderr."""
    from sparsebench.errors import LeftOut, SuiteError

    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal shows ? and loses no result
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.showwarning = show_warning
    warnings.simplefilter("always", LeftOut)
    try:
        for removed, instead in REMOVED.items():
            *command, last = removed.split()
            words, kind = sys.argv[1:], "option" if last.startswith("-") else "command"
            rest = [word.partition("=")[0] for word in words[len(command) :]]
            at = rest if kind == "option" else rest[:1]
            if words[: len(command)] == command and last in at:
                raise SuiteError(f"no such {kind}: {removed}; {instead}")
        app(prog_name="sparsebench")
    except BaseException as error:
        code, message = outcome(error)
        if message and os.environ.get("SPARSEBENCH_TRACEBACK"):
            traceback.print_exc()
        with suppress(OSError):  # the terminal may have been closed
            if message:
                line = " ".join(message.encode(errors="backslashreplace").decode().split())
                stderr.flag("error", "red", line)
        return code
    return 0


def outcome(error: BaseException) -> tuple[int, str]:
    """Return the exit code for an exception that ended a command, and the line to print."""
    from sparsebench.errors import SparsebenchError, WorkerError

    match error:
        # Typer turns every broken pipe into a silent exit with 1, also one to a process of ours.
        case SystemExit(__context__=BrokenPipeError() as broken):
            return outcome(broken)
        # Only typer's help and usage errors get here: our consoles ignore a closed pipe.
        case BrokenPipeError(__context__=context) if _output_is_closed():
            return getattr(context, "exit_code", 0), ""
        case SystemExit():
            return int(error.code or 0), ""
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case SparsebenchError():
            return BAD_INPUT, str(error)
        case WorkerError():
            return UNFIT, str(error)
        case OSError() if not isinstance(error, BrokenPipeError):
            return BAD_INPUT, f"{error.filename or 'the output'}: {error.strerror or error}"
        case MemoryError():
            return BAD_INPUT, "expected enough memory, found none left"
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    hint = "SPARSEBENCH_TRACEBACK=1 shows where"
    message = f"{type(error).__name__}: {error} ({place}; {hint})"
    if plugin := _plugin(error):
        return BAD_INPUT, f"an error in the plug-in {plugin}: {message}"
    return DEFECT, f"an error in sparsebench: {message}"


def _output_is_closed() -> bool:
    """Return whether stdout or stderr is a pipe whose reader has ended."""
    poll = select.poll()
    for file in (1, 2):
        poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _plugin(error: BaseException) -> str | None:
    """Return the plug-in package that raised an error, possibly through a library that it called.

    Returns None if the innermost frame of sparsebench or a plug-in belongs to sparsebench.
    """
    from sparsebench._discovery import others

    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    named = [name for name in packages if name in {"sparsebench", *others}]
    return named[-1] if named and named[-1] != "sparsebench" else None

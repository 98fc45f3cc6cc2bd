"""The command line: each command is a few lines over the library.

Exit codes are documented in harness/README.md. Whatever is wrong is one line on stderr; where it is
an error of sparsebench itself, SPARSEBENCH_TRACEBACK=1 shows where.
"""

import os
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sparsebench.harness._cli import (
    OF_A_PLAN,
    OF_A_RUN,
    SOME_FAILED,
    Data,
    Debug,
    Device,
    Energy,
    Json,
    Markdown,
    Only,
    Open,
    Out,
    Peers,
    Profile,
    Repeat,
    Replicates,
    RunPath,
    Timeout,
    app,
    ended,
    err,
    measuring,
    out,
    print_json,
    require_own,
    show_page,
    telling,
    warn,
    wide,
)
from sparsebench.harness._cli_bundle import confirm, reproduce, validate
from sparsebench.harness._cli_campaign import campaign
from sparsebench.harness._cli_claims import claims
from sparsebench.harness._cli_cluster import (
    Devices,
    Shard,
    Shards,
    Slurm,
    Submit,
    Ways,
    go_on,
    is_shared,
    merge,
    not_merged,
    status,
)
from sparsebench.harness._cli_compare import compare
from sparsebench.harness._cli_make import prune, train_lm, whole
from sparsebench.harness._cli_publish import publish
from sparsebench.harness._cli_survey import doctor, new_gpu
from sparsebench.harness._cli_try import profiled, try_
from sparsebench.harness.run import ahead

if TYPE_CHECKING:
    from sparsebench.harness.plan.suite import Suite
    from sparsebench.harness.run.state import Flags

# What a report needs, 3 s together on a cold disk.
REPORTING = "sparsebench.reports.build", "sparsebench.reports.terminal", "scipy.stats"


def main() -> int:
    """Run a command and return its exit code; what is wrong is one line on stderr."""
    try:
        app()
    except BaseException as error:
        code, said = ended(error)
        if said and os.environ.get("SPARSEBENCH_TRACEBACK"):
            traceback.print_exc()
        with suppress(OSError):  # the terminal may be gone
            if said:
                line = " ".join(said.encode(errors="backslashreplace").decode().split())
                err.print(f"[red]error:[/] {escape(line)}", soft_wrap=True, highlight=False)
        return code
    finally:
        ahead.end()
    return 0


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Name ops, patterns, formats, kernels, figures and suites."""
    from sparsebench.harness.catalog import listing

    found = listing()
    if as_json:
        print_json(found)
        return
    for title, entries in found.items():
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None
        )
        for name, line in entries.items():
            table.add_row(name, escape(line))
        out.print(table)


@app.command()
def check(
    suite: Annotated[str, typer.Argument(help="A suite's name, or a file.yaml.")],
    device: Device = None,
    data: Data = None,
    only: Only = "",
    replicates: Replicates = 3,
    gpu: Annotated[
        Path | None,
        typer.Option(help="Plan for the GPU of these runs: results/published/nvidia-h200."),
    ] = None,
    peers: Peers = None,
    as_json: Json = False,
) -> None:
    """Say what a suite will cost, and what is unsupported here; run nothing."""
    from sparsebench.harness.machine.device import named
    from sparsebench.harness.plan.elsewhere import costs, plan_there
    from sparsebench.harness.plan.plan import plan, uncontested
    from sparsebench.harness.plan.suite import read
    from sparsebench.results.formatting import amount

    if gpu and device:
        raise typer.BadParameter("expected --device or --gpu, found both")
    asked = read(suite, data)
    if gpu:
        planned = plan_there(asked, costs(gpu), only, replicates)
    else:
        planned = plan(asked, named(device), only, replicates)
    if as_json:
        print_json(planned)
        return
    out.print(escape(planned["title"]), style="bold")
    counts = f"{amount(planned['problems'], 'problem')}, {amount(planned['cases'], 'case')}"
    estimate = timedelta(seconds=planned["estimate_s"])
    out.print(f"{counts}, {planned['supported']} of them supported on {planned['device']}")
    if not gpu and uncontested(asked, planned["device"], only):
        out.print("nothing but baselines is supported, so nothing will be compared")
    out.print(f"about {estimate} (h:mm:ss) for {amount(replicates, 'replicate')}")
    if gpu:
        gib = [planned[name] / 2**30 for name in ("largest_bytes", "memory_bytes")]
        out.print(f"a dense kernel holds up to {gib[0]:.1f} GiB of operands; the GPU {gib[1]:.0f}")
        if planned["unknown"]:
            names = ", ".join(planned["unknown"])
            out.print(f"never measured there, and taken as typical: {names}", soft_wrap=True)
    for entry in planned["unsupported"]:
        line = f"{entry['cases']:>5}  {entry['contender']}: {entry['reason']}"
        out.print(escape(line), soft_wrap=True, highlight=False)


@app.command()
def run(
    given: typer.Context,
    suite: Annotated[str | None, typer.Argument(help="A suite's name, or a file.yaml.")] = None,
    device: Device = None,
    data: Data = None,
    to: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run that was stopped.")] = None,
    only: Only = "",
    timeout: Timeout = 120.0,
    replicates: Replicates = 3,
    energy: Energy = False,
    peers: Peers = None,
    repeat: Repeat = 0,
    profile: Profile = "",
    devices: Devices = "",
    slurm: Slurm = "",
    submit: Submit = "",
    shards: Shards = 0,
    shard: Shard = "",
    debug: Debug = False,
    as_json: Json = False,
    markdown: Markdown = False,
    browse: Open = False,
) -> None:
    """Measure a suite, write its report, and print the answer."""
    ways = Ways(devices, slurm, submit, shards)
    if (suite is None) == (resume is None):
        raise typer.BadParameter("expected a suite, or --resume RUN alone")
    if resume:
        if repeat or profile:
            raise typer.BadParameter("expected a suite with --repeat or --profile, found --resume")
        require_own(given, OF_A_RUN)
        ahead.early(device, 1, 1)
        if is_shared(resume):
            require_own(given, OF_A_PLAN)
            from sparsebench.harness.run.measure import RunOptions

            with measuring() as show:
                path = go_on(resume, RunOptions(progress=show, on_message=telling(debug)))
        else:
            path = _resumed(resume, device, data, timeout, debug)
    elif repeat or profile:
        raise typer.Exit(profiled(str(suite), device, data, only, repeat, profile))
    else:
        ahead.early(device or devices, 0 if slurm or submit else ways.count, replicates)
        from sparsebench.harness.doctor.findings import nothing_compared
        from sparsebench.harness.plan.plan import uncontested
        from sparsebench.harness.plan.suite import read
        from sparsebench.harness.run.state import Flags

        asked, first = read(str(suite), data), ways.first(device)
        if not (slurm or submit) and uncontested(asked, first, only):
            warn(nothing_compared(asked.name, first))
        flags = Flags(first, data, timeout, replicates, only, energy, shard)
        path = _measured(asked, flags, debug, to=to, ways=ways)
    _told(path, as_json, markdown, browse)


def _resumed(
    run: Path, device: str | None, data: Path | None, timeout_s: float, debug: bool
) -> Path:
    """Go on with a run by its own suite and flags, on this device if one is named."""
    from sparsebench.harness.machine.device import named
    from sparsebench.harness.run.own_suite import own_suite
    from sparsebench.harness.run.state import Flags
    from sparsebench.results import store

    stopped = not_merged(store.read(run))
    own = stopped.state["flags"]
    data = data or (Path(own["data"]) if own.get("data") else None)
    asked = own_suite(stopped, data)
    flags = Flags(
        *(named(device or own["device"]), data, timeout_s, own["replicates"], own["only"]),
        *(own.get("energy", False), own.get("shard", "")),
    )
    return _measured(asked, flags, debug, resume=run)


def _measured(
    asked: "Suite",
    flags: "Flags",
    debug: bool,
    *,
    to: Path | None = None,
    resume: Path | None = None,
    ways: Ways | None = None,
) -> Path:
    """Measure here, or shared out in one of the ways, and return the run."""
    from sparsebench.harness.run.measure import RunOptions, measure

    engine = ways.measure if ways else measure
    ahead.meanwhile(*REPORTING)
    with measuring() as show:
        options = RunOptions(progress=show, on_message=telling(debug))
        return engine(asked, flags, to, resume, options)


def _told(path: Path, as_json: bool, markdown: bool, browse: bool) -> None:
    """Print the answer of a run and write its report; exit with SOME_FAILED where cases failed."""
    from sparsebench.reports.build import build
    from sparsebench.reports.terminal import Answer, answer_json, answer_markdown, counted
    from sparsebench.results import store
    from sparsebench.results.analysis import analyse

    measured = store.read(path)
    page = path / "report.html"
    found = analyse(measured)
    counts = counted(found)
    if as_json:
        told = {"run": str(path), "report": str(page), "cases": counts}
        print_json({**told, **answer_json(measured, found)})
    elif markdown:
        out.write(answer_markdown(measured, found))
    else:
        wide().print(Answer(measured, found))
        out.print("cases: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    build(measured, page, found=found)  # the answer need not wait for the page
    if not as_json and not markdown:
        out.print(f"report: {page}", soft_wrap=True, highlight=False)
    if browse:
        show_page(page)
    if counts.keys() - {"ok", "unsupported"}:
        raise typer.Exit(SOME_FAILED)


@app.command()
def report(
    path: RunPath,
    to: Annotated[
        Path | None, typer.Option("--out", help="HTML file; default: in the run.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write the rows as CSV.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Also write the rows as Parquet.")] = None,
    errors: Annotated[
        Path | None, typer.Option(help="What prune --json printed: error against speed-up.")
    ] = None,
    markdown: Markdown = False,
    browse: Open = False,
) -> None:
    """Write a run's report, and print its answer again. The page is one file, and opens offline."""
    from sparsebench.reports.build import build
    from sparsebench.reports.terminal import Answer, answer_markdown
    from sparsebench.results import bundle, store
    from sparsebench.results.analysis import analyse
    from sparsebench.results.frame import frame, to_csv, to_parquet
    from sparsebench.results.model_files import read_pruning

    measured = store.read(path)
    if changed := bundle.changed(path, measured.state):
        said = f"[yellow]warning:[/] {escape(changed)}; the report is of what is there now"
        err.print(said, soft_wrap=True, highlight=False)
    to = to or path / "report.html"
    build(measured, to, read_pruning(errors) if errors else None)
    if csv:
        to_csv(frame(measured.rows), csv)
    if parquet:
        to_parquet(frame(measured.rows), parquet)
    found = analyse(measured)
    if markdown:
        out.write(answer_markdown(measured, found))
    else:
        wide().print(Answer(measured, found))
        out.print(f"report: {to}", soft_wrap=True, highlight=False)
    if browse:
        show_page(to)


app.command("try")(try_)
app.command()(merge)
app.command()(status)
app.command()(compare)
app.command()(publish)


app.command()(validate)
app.command()(reproduce)
app.command()(confirm)


@app.command()
def tune(
    suite: Annotated[str, typer.Argument(help="A suite's name, or a file.yaml.")] = "sparsity",
    device: Device = None,
    minutes: Annotated[float, typer.Option(help="Time to take, about.", min=0.1, max=1440)] = 10.0,
    only: Only = "",
    to: Annotated[
        Path | None, typer.Option("--out", help="Table to write; default: yours, for this GPU.")
    ] = None,
    data: Data = None,
) -> None:
    """Search the best configurations for this GPU. Runs take them from the table written."""
    from sparsebench.harness.machine.device import named
    from sparsebench.harness.plan.suite import read
    from sparsebench.harness.run.tune import tune as tuned

    with measuring("tune") as show:
        found = tuned(read(suite, data), named(device), minutes, only, to, data, show)
    for line in found.lines:
        out.print(line, soft_wrap=True, highlight=False, markup=False)
    if found.failed:
        raise typer.Exit(SOME_FAILED)


app.command()(doctor)
app.command("new-gpu")(new_gpu)
app.command()(prune)
app.command("train-lm")(train_lm)
app.command()(whole)
app.add_typer(claims, name="claims")
app.add_typer(campaign, name="campaign")

"""`sparsebench campaign`: many suites in one order, measured in pieces on one or more machines."""

from datetime import timedelta
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sparsebench.errors import ResultError
from sparsebench.harness.commands import _options as opt
from sparsebench.harness.commands._console import (
    GATE_FAILED,
    SOME_FAILED,
    measuring,
    message_printer,
    print_json,
    stdout,
    wide,
)
from sparsebench.harness.commands._sharing import Devices, Sharing

if TYPE_CHECKING:
    from sparsebench.harness.shared_runs.campaign_file import Campaign

campaign = typer.Typer(
    help="Run many suites in a fixed order, over several sessions.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

PUBLISHED = Path("results/published")
GPU = PUBLISHED / "nvidia-h200"

File = Annotated[str, typer.Argument(help="A campaign's name, or a file.yaml.")]
Folder = Annotated[
    Path,
    typer.Option("--out", help="Folder of the campaign's runs: a new one, or the one to resume."),
]
Names = Annotated[list[str] | None, typer.Option("--entry", help="Only this entry; repeatable.")]


@campaign.command()
def plan(
    file: File = "published",
    gpu: opt.PublishedRuns = None,
    data: opt.Data = None,
    names: Names = None,
    device: Annotated[
        str | None, typer.Option(help="Also list what entries lack on this device, such as cuda:0.")
    ] = None,
    peers: opt.Peers = None,
    as_json: opt.Json = False,
) -> None:
    """Estimate the GPU time of each entry and of the whole campaign.

    With --device, also list the packages, checkouts and files that contenders need and that are
    missing.
    """
    from sparsebench.harness.costs.campaign_needs import obstacles
    from sparsebench.harness.costs.estimates import campaign_estimates
    from sparsebench.results.formatting import join_words

    requested = _read_campaign(file)
    if gpu is None and not GPU.is_dir():
        raise ResultError(f"--gpu: expected published runs; found no {GPU} in this folder")
    selected = {entry.name for entry in requested.select(names or [])}
    estimates = campaign_estimates(requested, gpu or GPU, data)
    entries = [each for each in estimates if each.entry.name in selected]
    total = sum(each.seconds or 0.0 for each in entries)
    lacks = {e.entry.name: obstacles(e.entry, device, data) for e in entries} if device else {}
    if as_json:
        lines = [
            {"name": e.entry.name, "replicates": e.entry.replicates, "seconds": e.seconds}
            | {"how": e.how}
            | ({"lacks": lacks[e.entry.name]} if device else {})
            for e in entries
        ]
        print_json({"title": requested.title, "entries": lines, "seconds": total})
    else:
        table = Table("entry", "what", "processes", "about", "", box=None)
        for each in entries:
            entry, time = each.entry, "–" if each.seconds is None else _time(each.seconds)
            subject = getattr(entry, entry.kind)
            subject_text = ", ".join(subject) if isinstance(subject, list) else subject
            what = f"{entry.kind} {subject_text} {entry.only}".strip()
            table.add_row(entry.name, escape(what), str(entry.replicates), time, escape(each.how))
        wide().print(table)
        for name, reasons in lacks.items():
            for reason in reasons:
                stdout.say(f"{name}: {reason}")
        limit = _time(requested.budget_s)
        unknown = [each.entry.name for each in entries if each.seconds is None]
        without = f" without {join_words(unknown)}" if unknown else ""
        stdout.print(f"about {_time(total)} of one GPU (h:mm:ss){without}; the budget is {limit}")
    if total > requested.budget_s:
        raise typer.Exit(GATE_FAILED)


@campaign.command()
def run(
    out: Folder,
    file: File = "published",
    budget: opt.Budget = None,
    device: opt.Device = None,
    devices: Devices = "",
    data: opt.Data = None,
    names: Names = None,
    timeout: opt.Timeout = 120.0,
    peers: opt.Peers = None,
) -> None:
    """Measure what is left of a campaign, until the budget ends.

    The same command resumes the campaign.
    """
    from sparsebench.harness.shared_runs.campaign_sitting import Sitting

    until = monotonic() + opt.budget_s(budget) if budget else inf
    requested, sharing = _read_campaign(file), Sharing(devices)
    first = sharing.first(device)
    entries = requested.select(names or [])
    sitting = Sitting(requested, entries, out, data, until, timeout, message_printer())
    with measuring(out=out) as show:
        sitting.run(sharing.device_names if sharing else [first], show)
    for name, reason in sitting.reasons.items():
        if reason:
            stdout.say(f"{name}: {reason}")
    status(out, file, names)
    if sitting.refused:
        raise typer.Exit(SOME_FAILED)


@campaign.command()
def status(
    out: Folder, file: File = "published", names: Names = None, as_json: opt.Json = False
) -> None:
    """Show how far each entry of a campaign is, without a GPU."""
    from sparsebench.harness.shared_runs.campaign_publication import published_entries
    from sparsebench.harness.shared_runs.campaign_sitting import state
    from sparsebench.results.formatting import are

    requested = _read_campaign(file)
    states = [state(out, entry) for entry in requested.select(names or [])]
    if as_json:
        print_json(states)
        return
    table = Table("entry", "status", "contests", "cards", "GPU time", box=None)
    for each in states:
        contests = f"{each.done} of {each.of}" if each.of else ""
        cards = str(each.cards or "")
        table.add_row(each.name, each.status, contests, cards, _time(each.seconds))
    wide().print(table)
    whole = sum(each.status == "whole" for each in states)
    spent = _time(sum(each.seconds for each in states))
    stdout.print(f"{whole} of {are(len(states), 'entry')} whole, after {spent} of one GPU")
    shown = {each.name for each in states} & {*published_entries(requested, out, PUBLISHED)}
    if shown:
        stdout.print(f"{len(shown)} of them are in {PUBLISHED} already, measured by this code")


@campaign.command()
def publish(
    out: Folder,
    file: File = "published",
    into: Annotated[Path, typer.Option(help="Folder of the published runs.")] = PUBLISHED,
    names: Names = None,
) -> None:
    """Replace the published runs with a finished campaign's.

    The command also writes every page that shows published numbers.

    With --entry, replace only the runs of those entries, each of which must be whole.
    """
    from sparsebench.harness.shared_runs.campaign_publication import publish as replace

    for page in replace(_read_campaign(file), out, into, names or []):
        stdout.say(f"{page}: written")


def _read_campaign(file: str) -> "Campaign":
    from sparsebench.harness.shared_runs.campaign_file import campaign

    return campaign(file)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))

"""`sparsebench campaign`: many suites in one order, measured in pieces on one or more machines."""

from datetime import timedelta
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sparsebench.harness.commands import _options as opt
from sparsebench.harness.commands._console import (
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

File = Annotated[str, typer.Argument(help="A campaign's name, or a file.yaml.")]
Folder = Annotated[
    Path,
    typer.Option("--out", help="Folder of the campaign's runs: a new one, or the one to resume."),
]
Names = Annotated[list[str] | None, typer.Option("--entry", help="Only this entry; repeatable.")]


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
    _show_states(requested, out, names)
    if sitting.refused:
        raise typer.Exit(SOME_FAILED)


@campaign.command()
def status(
    out: Annotated[Path | None, opt.out_file("Folder of the campaign's runs.")] = None,
    file: File = "published",
    names: Names = None,
    as_json: opt.Json = False,
) -> None:
    """List the entries of a campaign, and how far each one is in --out."""
    _show_states(_read_campaign(file), out, names, as_json)


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


def _show_states(
    requested: "Campaign", out: Path | None, names: list[str] | None, as_json: bool = False
) -> None:
    from sparsebench.harness.shared_runs.campaign_sitting import EntryState, state
    from sparsebench.results.formatting import are

    entries = requested.select(names or [])
    states = [state(out, each) if out else EntryState(each.name, "open") for each in entries]
    if as_json:
        print_json(states)
        return
    columns = "entry", "what", "processes", "status", "contests", "cards", "GPU time"
    table = Table(*columns, box=None)
    for entry, each in zip(entries, states, strict=True):
        contests = f"{each.done} of {each.of}" if each.of else ""
        how_far = each.status, contests, str(each.cards or ""), _time(each.seconds)
        table.add_row(entry.name, escape(entry.what), str(entry.replicates), *how_far)
    wide().print(table)
    whole = sum(each.status == "whole" for each in states)
    spent = _time(sum(each.seconds for each in states))
    stdout.print(f"{whole} of {are(len(states), 'entry')} whole, after {spent} of one GPU")


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))

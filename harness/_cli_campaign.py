"""The commands about campaigns: plan, run, status, publish."""

from dataclasses import asdict
from datetime import timedelta
from math import inf
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sparsebench.errors import ResultError
from sparsebench.harness._cli import (
    GATE_FAILED,
    SOME_FAILED,
    Data,
    Device,
    Json,
    Peers,
    Timeout,
    measuring,
    out,
    print_json,
    telling,
    wide,
)
from sparsebench.harness._cli_cluster import Devices, Ways
from sparsebench.harness._cli_survey import PUBLISHED, budget_s

campaign = typer.Typer(
    help="Measure many suites in one order, in pieces, over several machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

GPU = PUBLISHED / "nvidia-h200"  # whose runs tell what things cost

File = Annotated[str, typer.Argument(help="A campaign's name, or a file.yaml.")]
To = Annotated[Path, typer.Option("--to", help="Folder of its runs; it is made, or gone on with.")]
Budget = Annotated[
    str | None, typer.Option(help="Time to take: 90s, 10m, 2h; default: as long as it takes.")
]
Names = Annotated[
    list[str] | None, typer.Option("--entry", help="This entry alone; more than once, these.")
]


@campaign.command()
def plan(
    file: File = "published",
    gpu: Annotated[
        Path | None,
        typer.Option(help=f"Published runs that tell what things cost; default {GPU}."),
    ] = None,
    data: Data = None,
    names: Names = None,
    as_json: Json = False,
) -> None:
    """Say what each entry will cost on a GPU, and all of them; run nothing."""
    from sparsebench.harness.campaign.costs import estimates
    from sparsebench.harness.campaign.plan import campaign as read

    if gpu is None and not GPU.is_dir():
        said = f"expected {GPU}, the published runs of a checkout, found none here"
        raise ResultError(f"--gpu: {said}; --gpu names others")
    asked = read(file)
    chosen = [entry.name for entry in asked.named(names or [])]
    found = [each for each in estimates(asked, gpu or GPU, data) if each.entry.name in chosen]
    total = sum(each.seconds or 0.0 for each in found)
    if as_json:
        entries = [
            {"name": e.entry.name, "replicates": e.entry.replicates, "seconds": e.seconds}
            for e in found
        ]
        print_json({"title": asked.title, "entries": entries, "seconds": total})
    else:
        table = Table("entry", "what", "processes", "about", "", box=None)
        for each in found:
            entry, time = each.entry, "?" if each.seconds is None else _time(each.seconds)
            what = f"{entry.kind} {getattr(entry, entry.kind) or ''} {entry.only}".strip()
            table.add_row(entry.name, escape(what), str(entry.replicates), time, escape(each.how))
        wide().print(table)
        out.print(f"{_time(total)} of one GPU (h:mm:ss), of a budget of {_time(asked.budget_s)}")
    if total > asked.budget_s:
        raise typer.Exit(GATE_FAILED)


@campaign.command()
def run(
    to: To,
    file: File = "published",
    budget: Budget = None,
    device: Device = None,
    devices: Devices = "",
    data: Data = None,
    names: Names = None,
    timeout: Timeout = 120.0,
    peers: Peers = None,
) -> None:
    """Measure what is left of a campaign, for a while; the same command goes on later."""
    from sparsebench.harness.campaign.plan import campaign as read
    from sparsebench.harness.campaign.sitting import Sitting

    until = monotonic() + budget_s(budget) if budget else inf
    asked, ways = read(file), Ways(devices)
    first = ways.first(device)
    entries = asked.named(names or [])
    sitting = Sitting(asked, entries, to, data, until, timeout, telling())
    with measuring("campaign run --to") as show:
        sitting.run(ways.named if ways else [first], show)
    for name, why in sitting.said.items():
        if why:
            out.print(f"{name}: {why}", soft_wrap=True, highlight=False, markup=False)
    status(to, file, names)
    if sitting.refused:
        raise typer.Exit(SOME_FAILED)


@campaign.command()
def status(to: To, file: File = "published", names: Names = None, as_json: Json = False) -> None:
    """Say how far each entry of a campaign is, without a GPU."""
    from sparsebench.harness.campaign.plan import campaign as read
    from sparsebench.harness.campaign.publish import published
    from sparsebench.harness.campaign.sitting import state
    from sparsebench.results.formatting import are

    asked = read(file)
    states = [state(to, entry) for entry in asked.named(names or [])]
    if as_json:
        print_json([asdict(each) for each in states])
        return
    table = Table("entry", "is", "contests", "cards", "GPU time", box=None)
    for each in states:
        contests = f"{each.done} of {each.of}" if each.of else ""
        cards = str(each.cards or "")
        table.add_row(each.name, each.status, contests, cards, _time(each.seconds))
    wide().print(table)
    whole = sum(each.status == "whole" for each in states)
    spent = _time(sum(each.seconds for each in states))
    out.print(f"{whole} of {are(len(states), 'entry')} whole, after {spent} of one GPU")
    named = {each.name for each in states}
    if same := len(named.intersection(published(asked, to, PUBLISHED))):
        out.print(f"{same} of them are in {PUBLISHED} already, of this code")


@campaign.command()
def publish(
    to: To,
    file: File = "published",
    into: Annotated[Path, typer.Option(help="Folder of the published runs.")] = PUBLISHED,
    names: Names = None,
) -> None:
    """Put a whole campaign in the place of the published runs, and draw every page.

    With --entry those entries alone, which are whole; runs of other names stay.
    """
    from sparsebench.harness.campaign.plan import campaign as read
    from sparsebench.harness.campaign.publish import publish as replace

    for page in replace(read(file), to, into, names or []):
        out.print(f"{page}: written", soft_wrap=True, highlight=False, markup=False)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))

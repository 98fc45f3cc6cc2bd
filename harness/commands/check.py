"""`sparsebench check`: what a suite would measure, and how long it would take."""

from datetime import timedelta

import typer
from rich.markup import escape

from sparsebench.harness.commands import _options as opt
from sparsebench.harness.commands._console import print_json, stdout


def check(
    suite: opt.SuiteName,
    device: opt.Device = None,
    data: opt.Data = None,
    only: opt.Only = "",
    replicates: opt.Replicates = 3,
    gpu: opt.PublishedRuns = None,
    peers: opt.Peers = None,
    as_json: opt.Json = False,
) -> None:
    """Estimate the run time of a suite, and list unsupported cases."""
    from sparsebench.harness.costs.estimates import preview, preview_here
    from sparsebench.harness.costs.measured_times import times_on
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.plan.selection import has_only_baselines
    from sparsebench.harness.plan.suite import read
    from sparsebench.results.formatting import amount

    if gpu and device:
        raise typer.BadParameter("expected --device or --gpu, found both")
    requested = read(suite, data)
    if gpu:
        planned = preview(requested, times_on(gpu), only, replicates)
    else:
        planned = preview_here(requested, full_name(device), only, replicates, data)
    if as_json:
        print_json(planned)
        return
    stdout.print(escape(planned["title"]), style="bold")
    counts = f"{amount(planned['problems'], 'problem')}, {amount(planned['cases'], 'case')}"
    stdout.print(f"{counts}, {planned['supported']} of them supported on {planned['device']}")
    if not gpu and has_only_baselines(requested, planned["device"], only):
        some = "only baselines are" if planned["supported"] else "no case is"
        stdout.print(f"{some} supported, so nothing will be compared")
    estimate = timedelta(seconds=planned["estimate_s"])
    stdout.print(f"about {estimate} (h:mm:ss) for {amount(replicates, 'replicate')}")
    if gpu:
        largest, memory = (planned[name] / 2**30 for name in ("largest_bytes", "memory_bytes"))
        stdout.say(f"a dense kernel needs up to {largest:.1f} GiB; the GPU has {memory:.0f} GiB")
        if planned["unknown"]:
            stdout.say(f"estimated from typical times: {', '.join(planned['unknown'])}")
    for entry in planned["unsupported"]:
        stdout.say(f"{entry['cases']:>5}  {entry['contender']}: {entry['reason']}")

"""`sparsebench check`: what a suite would measure, and which cases a device does not support."""

from rich.markup import escape

from sparsebench.harness.commands import _options as opt
from sparsebench.harness.commands._console import print_json, stdout


def check(
    suite: opt.SuiteName,
    device: opt.Device = None,
    data: opt.Data = None,
    only: opt.Only = "",
    peers: opt.Peers = None,
    as_json: opt.Json = False,
) -> None:
    """Count the cases of a suite, and list those that a device does not support."""
    from sparsebench.harness.catalog import load_op
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.plan.selection import has_only_baselines
    from sparsebench.harness.plan.selection import only as selected
    from sparsebench.harness.plan.suite import read
    from sparsebench.harness.plan.support import count_support
    from sparsebench.results.formatting import amount

    requested, picked = read(suite, data), full_name(device)
    contests = selected(requested.contests, only)
    cases = count_support(contests, picked)
    supported = sum(count for each, count in cases.items() if not each.reason)
    unsupported = sorted((*each, count) for each, count in cases.items() if each.reason)
    largest = max(load_op(c.problem.op).held_bytes(c.problem) for c in contests)
    if as_json:
        print_json(
            {
                "suite": requested.name,
                "title": requested.title,
                "device": picked,
                "problems": len(contests),
                "cases": cases.total(),
                "supported": supported,
                "largest_bytes": largest,
                "unsupported": [
                    {"contender": label, "reason": reason, "cases": count}
                    for label, _, reason, count in unsupported
                ],
            }
        )
        return
    stdout.print(escape(requested.title), style="bold", highlight=False)
    counts = f"{amount(len(contests), 'problem')}, {amount(cases.total(), 'case')}"
    stdout.print(f"{counts}, {supported} of them supported on {picked}")
    if has_only_baselines(requested, picked, only):
        some = "only baselines are" if supported else "no case is"
        stdout.print(f"{some} supported, so nothing will be compared")
    stdout.print(f"a dense kernel needs up to {largest / 2**30:.1f} GiB")
    for label, _, reason, count in unsupported:
        stdout.say(f"{count:>5}  {label}: {reason}")

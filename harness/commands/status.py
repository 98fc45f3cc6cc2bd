"""`sparsebench status`: how far a run is."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sparsebench.harness.commands._console import print_json, stdout, wide
from sparsebench.harness.commands._options import Json, require_run


def status(
    run: Annotated[Path, typer.Argument(help="A run directory, or the one of a shared run.")],
    as_json: Json = False,
) -> None:
    """Show how far a run is, from any host that can read its folder."""
    from sparsebench.harness.shared_runs.run_paths import is_shared, parts_of

    shared_out = is_shared(run)
    if not shared_out:
        require_run(run)
    from sparsebench.results.formatting import amount
    from sparsebench.results.run import store

    if not shared_out:
        state = store.read(run).state
        counts = state["contests"]
        if as_json:
            print_json({"status": state["status"], "contests": counts})
        else:
            of = amount(counts["of"], "contest")
            stdout.print(f"{state['status']}: {counts['done']} of {of}")
        return
    from sparsebench.harness.shared_runs import shared_folder
    from sparsebench.harness.shared_runs.cluster_jobs import jobs, statuses

    folder = parts_of(run)
    plan, suite = shared_folder.read(folder)
    shares, sent = list(shared_folder.progress(folder, plan)), jobs(folder)
    words = statuses(folder, plan, shares)
    shares = [replace(share, status=words[share.number]) for share in shares]
    contests = plan.contests(suite)
    done, total = sum(share.contests for share in shares), len(contests) * plan.flags.replicates
    left = shared_folder.count_free(folder, plan, contests)
    if as_json:
        parts = [asdict(share) | {"jobs": sent.get(str(share.number), [])} for share in shares]
        print_json({"contests": {"done": done, "of": total, "unclaimed": left}, "parts": parts})
        return
    measured = f"{done} of {amount(total, 'contest')} in all processes"
    stdout.print(f"{measured}, {amount(left, 'problem')} not begun")
    table = Table("part", "status", "contests", "device", "jobs", box=None)
    for share in shares:
        ids = " ".join(sent.get(str(share.number), []))
        table.add_row(str(share.number), share.status, str(share.contests), share.device, ids)
    wide().print(table)

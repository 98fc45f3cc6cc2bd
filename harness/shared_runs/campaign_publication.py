"""A whole campaign, published in place of the runs before it.

    DIR/NAME           ─> INTO/GPU/NAME             every run, with its digests verified; no logs
    DIR/claims/NAME    ─> INTO/GPU/claims-NAME      what claims measured
    INTO/GPU/NAME      ─> INTO/GPU/earlier/DAY-COMMIT/NAME    a run that is replaced; with entry
                          names, only runs of those names are
    pages and picture  ─> written from the runs that are there now (reports/published.py)

Either everything is published or nothing: an entry that is not whole is an error, and if a page
cannot be written, the earlier runs are restored.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.harness.shared_runs.campaign_file import Campaign
from sparsebench.harness.shared_runs.campaign_sitting import pack, state
from sparsebench.results import files
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import device_name, folder_name


def publish(campaign: Campaign, out: Path, into: Path, names: Sequence[str] = ()) -> list[Path]:
    """Replace the runs of the campaign's GPU below `into`, and return the pages that changed.

    With `names` of entries, only their runs are replaced. Raises ResultError if an entry is not
    whole, a run was changed, or a page needs a run that does not exist.
    """
    entries = campaign.select(names)
    unfinished = [entry.name for entry in entries if state(out, entry).status != "whole"]
    if unfinished:
        raise ResultError(
            f"{out}: expected whole entries, found unfinished {', '.join(unfinished)}"
        )
    runs = {entry.name: out / entry.name for entry in entries if entry.kind != "claims"}
    for name in (entry.name for entry in entries if entry.kind == "claims"):
        runs |= {
            run.name if run.name.startswith(name) else f"{name}-{run.name}": run
            for run in store.runs_in(out / name)
        }
    for run in runs.values():
        bundle.verify(run)
    gpus = {device_name(files.from_json(run / "environment.json")) for run in runs.values()}
    if len(gpus) != 1:
        raise ResultError(f"expected runs of one GPU, found {', '.join(sorted(gpus)) or 'none'}")
    home = into / folder_name(gpus.pop())
    with _replace(home) as before:
        unchanged = {run.name: run for run in store.runs_in(before)} if names else {}
        for name, run in (unchanged | runs).items():
            shutil.copytree(run, home / name, ignore=shutil.ignore_patterns("*.log"))
            pack(home / name)
        _keep(before, home)
        from sparsebench.reports.published import write

        return write(into.resolve().parents[1])


def _keep(before: Path, home: Path) -> None:
    """Copy the bundles of a folder that `home` has no more to `home`/earlier, for the history."""
    if (before / bundle.EARLIER).exists():
        shutil.copytree(before / bundle.EARLIER, home / bundle.EARLIER)
    identities = {bundle.identity(run) for run in store.runs_in(home)}
    for run in store.runs_in(before):
        if (run / bundle.MANIFEST).exists() and bundle.identity(run) not in identities:
            day = str(files.from_json(run / "run.json").get("started", ""))[:10]
            commit = str(files.from_json(run / "environment.json").get("commit") or "")[:7]
            shutil.copytree(run, home / bundle.EARLIER / f"{day}-{commit}".strip("-") / run.name)


@contextmanager
def _replace(home: Path) -> Iterator[Path]:
    """Replace a folder by a new one and yield the old one, which is restored on an error.

    Meanwhile the old one is beside `published`, where no page looks for runs.
    """
    before = home.parent.with_name(f".{home.name}.before")
    if before.exists():
        reason = "found the runs from before an interrupted publication"
        raise ResultError(f"{before}: expected none, {reason}; move them back to {home}")
    if home.exists():
        home.rename(before)
    home.mkdir(parents=True)
    try:
        yield before
    except BaseException:
        shutil.rmtree(home)
        if before.exists():
            before.rename(home)
        raise
    if before.exists():
        shutil.rmtree(before)

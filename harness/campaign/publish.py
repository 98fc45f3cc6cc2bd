"""A campaign that is whole, put in the place of the runs that were published before.

    DIR/NAME           ─> INTO/GPU/NAME             every run, its digests verified
    DIR/claims/NAME    ─> INTO/GPU/claims-NAME      what claims had measured
    INTO/GPU           ─> gone: history keeps it
    pages and picture  ─> drawn from what is there now (reports/published)

All of it or nothing: an entry that is not whole is said before, and where a page cannot be drawn
the runs from before are put back.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.harness.campaign.plan import Campaign
from sparsebench.harness.campaign.sitting import state
from sparsebench.results import bundle, files
from sparsebench.results.environment import device_name


def publish(campaign: Campaign, to: Path, into: Path) -> list[Path]:
    """Replace the runs of the campaign's GPU below `into`, and draw the pages of its checkout.

    Return the pages that have changed. ResultError where the campaign is not whole, a run was
    changed, or a page asks for what is not there.
    """
    open_ = [entry.name for entry in campaign.entries if state(to, entry).status != "whole"]
    if open_:
        raise ResultError(f"{to}: expected every entry whole, found {', '.join(open_)} open")
    runs = {run.name: run for run in _runs(to)}
    claims = [entry.name for entry in campaign.entries if entry.kind == "claims"]
    for name in claims:
        runs |= {f"{name}-{run.name}": run for run in _runs(to / name)}
    for run in runs.values():
        bundle.verify(run)
    home = into / _folder(list(runs.values()))
    with _replaced(home):
        for name, run in runs.items():
            shutil.copytree(run, home / name)
        return _drawn(into.resolve().parents[1])


def _runs(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/run.json"))


def _folder(runs: Sequence[Path]) -> str:
    """Return the folder of the runs' kind of GPU: nvidia-h200."""
    names = {device_name(files.from_json(run / "environment.json")) for run in runs}
    if len(names) != 1:
        raise ResultError(f"expected runs of one GPU, found {', '.join(sorted(names)) or 'none'}")
    return re.sub(r"[^a-z0-9]+", "-", names.pop().lower()).strip("-")


@contextmanager
def _replaced(home: Path) -> Iterator[None]:
    """Make a folder anew; put back what was there where that does not succeed."""
    before = home.with_name(f".{home.name}.before")
    if home.exists():
        home.rename(before)
    home.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(home)
        if before.exists():
            before.rename(home)
        raise
    if before.exists():
        shutil.rmtree(before)


def _drawn(root: Path) -> list[Path]:
    from sparsebench.reports.published.__main__ import write

    return write(root)

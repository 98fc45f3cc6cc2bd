"""A campaign that is whole, put in the place of the runs that were published before.

    DIR/NAME           ─> INTO/GPU/NAME             every run, its digests verified; no logs
    DIR/claims/NAME    ─> INTO/GPU/claims-NAME      what claims had measured
    INTO/GPU           ─> gone: history keeps it; where entries are named, only runs of their names
    pages and picture  ─> drawn from what is there now (reports/published.py)

All of what is asked for or nothing: an entry that is not whole is said before, and where a page
cannot be drawn the runs from before are put back.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.harness.shared_runs.campaign_file import Campaign
from sparsebench.harness.shared_runs.sitting import state
from sparsebench.results import bundle, files
from sparsebench.results.provenance import device_name


def publish(campaign: Campaign, to: Path, into: Path, names: Sequence[str] = ()) -> list[Path]:
    """Replace the runs of the campaign's GPU below `into`, and draw the pages of its checkout.

    With `names` of entries, only runs of these names are replaced, and the others stay. Return the
    pages that have changed. ResultError where an entry is not whole, a run was changed, or a page
    asks for what is not there.
    """
    entries = campaign.named(names)
    open_ = [entry.name for entry in entries if state(to, entry).status != "whole"]
    if open_:
        raise ResultError(f"{to}: expected every entry whole, found {', '.join(open_)} open")
    runs = {entry.name: to / entry.name for entry in entries if entry.kind != "claims"}
    for name in (entry.name for entry in entries if entry.kind == "claims"):
        runs |= {f"{name}-{run.name}": run for run in _runs(to / name)}
    for run in runs.values():
        bundle.verify(run)
    home = into / _folder(list(runs.values()))
    with _replaced(home) as before:
        kept = {run.name: run for run in _runs(before)} if names else {}
        for name, run in (kept | runs).items():
            shutil.copytree(run, home / name, ignore=shutil.ignore_patterns("*.log"))
        return _drawn(into.resolve().parents[1])


def published(campaign: Campaign, to: Path, into: Path) -> list[str]:
    """Name the entries whose runs below `into` are by the GPU and the code of the folder `to`."""
    if not (to / "alike.json").exists():
        return []
    here = files.from_json(to / "alike.json")
    home = into / _slug(str(here["gpu.name"]))
    known = {name: home / name / "environment.json" for name in campaign.names}
    code = {n: files.from_json(f).get("code_sha256") for n, f in known.items() if f.exists()}
    return [name for name, digest in code.items() if digest == here["code_sha256"]]


def _runs(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/run.json"))


def _folder(runs: Sequence[Path]) -> str:
    """Return the folder of the runs' kind of GPU: nvidia-h200."""
    names = {device_name(files.from_json(run / "environment.json")) for run in runs}
    if len(names) != 1:
        raise ResultError(f"expected runs of one GPU, found {', '.join(sorted(names)) or 'none'}")
    return _slug(names.pop())


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


@contextmanager
def _replaced(home: Path) -> Iterator[Path]:
    """Make a folder anew, and yield the old one; put it back where that does not succeed.

    Meanwhile the old one is beside `published`, where no page looks for runs.
    """
    before = home.parent.with_name(f".{home.name}.before")
    if before.exists():
        said = "expected none, found the runs from before a publication that was stopped"
        raise ResultError(f"{before}: {said}; move it back to {home}, for what is there now")
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


def _drawn(root: Path) -> list[Path]:
    from sparsebench.reports.published import write

    return write(root)

"""The report of a run that is not on disk."""

from pathlib import Path

from sparsebench.reports.build import build, frames_of
from sparsebench.results.model_files import Pruning
from sparsebench.results.store import Run


def report_of(
    run: Run, to: Path | None = None, pruning: Pruning | None = None, only: str = ""
) -> str:
    """Return a run's report, and write it if a path is given."""
    return build(frames_of(run, pruning), to, only=only)

"""The report of a run that is not on disk, and what a terminal shows."""

from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from sparsebench.reports.build import build
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import analyse


def report_of(run: StoredRun, to: Path | None = None, only: str = "") -> str:
    """Return a run's report, and write it if a path is given."""
    return build(analyse(run), to, only=only)


def printed(shown: RenderableType, width: int, **options: Any) -> str:
    """Return what a terminal of this width shows."""
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()

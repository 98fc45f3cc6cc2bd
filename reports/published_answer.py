"""What a published GPU says about the problems of a run, for a machine without a GPU.

    run on a CPU ─> its suite and problems ─> the published run of that suite on a GPU ─> its answer

None of it was measured here, and its first line says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from sparsebench.reports.findings import findings
from sparsebench.reports.terminal import indented, tables
from sparsebench.results.formatting import amount
from sparsebench.results.record import Status
from sparsebench.results.run import store
from sparsebench.results.run.provenance import device_name, on_gpu
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import analyse

HOW = "To measure a GPU, run the same command on a machine with an NVIDIA GPU."


@dataclass(frozen=True)
class PublishedAnswer:
    """The answer of a published GPU to the problems of a run, for a rich console."""

    run: StoredRun
    published: Path

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the published answer, if there is one, and how to measure a GPU."""
        yield Text()
        if there := published_run(self.run, self.published):
            processes = amount(int(there.state["flags"]["replicates"]), "process")
            place = there.path.relative_to(self.published)
            device, where = device_name(there.environment), f"{place}, {processes}"
            heading = f"NOT MEASURED HERE: the same suite on one {device} ({where})"
            yield Text(heading, style="bold yellow")
            every = analyse(there)
            measured = every.of(every.cases[every.cases.status == Status.OK])
            for line in findings(measured):
                yield indented(line)
            yield Text()
            for table in tables(measured):
                yield table
                yield Text()
        yield Text(HOW)


def published_run(run: StoredRun, published: Path) -> StoredRun | None:
    """Return the published run on a GPU that has problems of this run, with these problems alone.

    Among several, a run that is named after the suite comes first, then the one of most processes.
    """
    ids = {row.case.problem.id for row in run.rows}
    ranked: list[tuple[bool, int, Path]] = []
    for file in sorted(published.glob("*/*/run.json")):
        with store.neighbour():
            environment, state = store.facts(file.parent)
            if state["suite"] == run.state.get("suite") and on_gpu(environment):
                named = file.parent.name == state["suite"]
                ranked.append((named, state["flags"]["replicates"], file.parent))
    for _, _, path in sorted(ranked, reverse=True):
        with store.neighbour():
            there = store.read(path)
            rows = [row for row in there.rows if row.case.problem.id in ids]
            if any(row.status is Status.OK for row in rows):
                return replace(there, rows=rows)
    return None

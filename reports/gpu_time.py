"""The GPU time behind each published page: the sum over the runs that its numbers come from.

    page                        runs   minutes
    Should I prune?               25       104

A run's time is that from its start to its end (`seconds` of run.json). The GPU is held for all of
it, also while the host compiles kernels and checks outputs. Runs on a CPU do not count, and a run
counts in each page that shows it.
"""

from collections.abc import Iterable, Mapping

from sparsebench.reports.headline import PublishedRun
from sparsebench.reports.tables import markdown_table
from sparsebench.results.formatting import significant
from sparsebench.results.run.provenance import on_gpu


def gpu_time(runs: Mapping[str, PublishedRun], pages: Mapping[str, Iterable[str]]) -> str:
    """Return a Markdown table with a line for each page; `pages` names the runs of each."""
    lines = []
    for page, names in pages.items():
        shown = [runs[name] for name in {*names}]
        seconds = [r.run.state["seconds"] for r in shown if on_gpu(r.run.environment)]
        lines.append([page, str(len(seconds)), significant(sum(seconds) / 60)])
    return markdown_table(["page", "runs", "minutes"], lines)

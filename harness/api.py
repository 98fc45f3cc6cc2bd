"""Runs from Python: measure a suite or load a run, and inspect it.

    run = sparsebench.run("quick")            # or a file.yaml, or a suite as a mapping
    run = sparsebench.load("runs/A")
    run                                       # in a notebook: the answer, as on the report's page
    run.frame(), run.summary()                # pandas: one line per row, one line per case
    run.plot("answer").save("a.png")          # a figure of the report; run.plots lists them

Loading needs no torch. Results are computed when they are needed.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sparsebench._discovery import did_you_mean
from sparsebench._writing import write_file
from sparsebench.errors import ResultError, SuiteError
from sparsebench.reports.build import build, figures
from sparsebench.reports.terminal import answer_markdown, count_statuses
from sparsebench.results.run import store
from sparsebench.results.run.provenance import device_name
from sparsebench.results.tables.analysis import Analysis, analyse

if TYPE_CHECKING:
    from sparsebench.harness.plan.suite import Suite

ANSWER = "answer"  # the figure that summarizes the run
PICTURE = '<img alt="{}" src="data:image/png;base64,{}" style="max-width: 620px">'
# Where a page in a page is not shown, as on GitHub, the picture before it stays.
FRAME = (
    '<iframe title="{}" srcdoc="{}" style="width: 100%; height: 480px; border: 0" '
    "onload=\"this.style.height = this.contentDocument.documentElement.scrollHeight + 24 + 'px'; "
    'if (this.previousElementSibling) this.previousElementSibling.hidden = true">'
    "</iframe>"
)


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure as a separate page, with the badges of its run; a notebook displays it.

    `png` has its drawings, for GitHub and PDF; it is None if the figure is a table.
    """

    name: str
    html: str

    @cached_property
    def png(self) -> bytes | None:
        from sparsebench.reports.figures._png import png  # matplotlib takes 0.3 s

        return png(self.html)

    def save(self, path: Path | str) -> Path:
        """Write the page, one file that opens offline, and return its path.

        A path that ends in .png gets the drawings alone. Raises ResultError if there are none.
        """
        if Path(path).suffix.lower() != ".png":
            write_file(Path(path), self.html)
            return Path(path)
        if self.png is None:
            expected = f"expected a figure with a drawing, found the table {self.name}"
            raise ResultError(f"{path}: {expected}; .html has it")
        write_file(Path(path), self.png)
        return Path(path)

    def __repr__(self) -> str:
        """Describe the figure where HTML cannot be displayed."""
        return f"Plot({self.name!r}, {len(self.html)} bytes of HTML: .save(path))"

    def _repr_html_(self) -> str:
        page = self.html.replace("<head>", '<head><base href="about:srcdoc">', 1)  # for href="#x"
        picture = b64encode(self.png).decode() if self.png else ""
        before = PICTURE.format(escape(self.name), picture) if picture else ""
        return f"<div>{before}{FRAME.format(escape(self.name), escape(page))}</div>"

    def _repr_png_(self) -> bytes | None:
        return self.png


@dataclass(frozen=True, repr=False)
class Run:
    """A run with its results. `stored` is its content on disk (results/run/store.py)."""

    stored: store.StoredRun

    @property
    def path(self) -> Path:
        return self.stored.path

    @property
    def status(self) -> str:
        """Return `finished`, `interrupted`, or `running` while a process measures the run."""
        return str(self.stored.state["status"])

    @property
    def device(self) -> str:
        return device_name(self.stored.environment)

    @cached_property
    def _analysis(self) -> Analysis:
        return analyse(self.stored)

    def frame(self) -> pd.DataFrame:
        """Return one line per row: a case in one process, scope and cache state.

        Columns: results/tables/frame.py; times in µs. Samples are in `stored.rows`.
        """
        return self._analysis.rows.copy()

    def summary(self) -> pd.DataFrame:
        """Return one line per case, scope and cache state, over all processes, with its verdict.

        Columns: results/tables/cases.py; `speedup` is over the baseline, with its interval
        `speedup_low`, `speedup_high`; `median_us` is the time; `outcome` is the verdict.
        """
        return self._analysis.cases.copy()

    def answer(self) -> str:
        """Return the answer of `sparsebench run` as Markdown: the fastest, with its certainty."""
        return answer_markdown(self._analysis)

    @property
    def plots(self) -> dict[str, str]:
        return {figure.name: figure.title for figure in figures()}

    def plot(self, name: str = ANSWER) -> Plot:
        """Draw one figure of the report. Raises ResultError if it does not apply to the run."""
        if name not in (names := self.plots):
            message = f"{name!r}{did_you_mean(name, names)}"
            raise ResultError(f"plot: expected one of {', '.join(names)}; found {message}")
        return Plot(name, build(self._analysis, only=name))

    def report(self, path: Path | str | None = None) -> Path:
        """Write the report, by default into the run, and return its path."""
        page = self.path / "report.html" if path is None else Path(path)
        build(self._analysis, page)
        return page

    def __repr__(self) -> str:
        cases = ", ".join(
            f"{count} {status}" for status, count in count_statuses(self._analysis).items()
        )
        return f"Run({str(self.path)!r}, {self.device}, {self.status}; cases: {cases or 'none'})"

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()

    def _repr_markdown_(self) -> str:
        return self.answer()


def load(path: Path | str) -> Run:
    """Read a run directory or a published bundle. Raises ResultError."""
    return Run(store.read(path))


def run(
    suite: str | Path | Mapping[str, Any],
    *,
    device: str | None = None,
    data: Path | str | None = None,
    out: Path | str | None = None,
    only: str = "",
    replicates: int = 3,
    timeout_s: float = 120.0,
    energy: bool = False,
    progress: bool = True,
) -> Run:
    """Measure a suite in worker processes, as `sparsebench run` does, and return the run.

    suite       the name of a suite, a file.yaml, or the content of such a file as a mapping
    device      cpu, cuda or cuda:N; by default a GPU if there is one
    data        folder of a suite's source files
    out         the new run directory; by default runs/TIME-...
    only        measure less: "block=64 sparsity=0.8|0.9"
    replicates  fresh processes: 3 for a look, 8 for a verdict
    timeout_s   seconds without an answer after which a contender is ended
    energy      also measure energy and time of a call under load (bench/energy.py)
    progress    show progress and machine findings on stderr

    A failing case becomes a row, and its traceback is in failures.log. Ctrl-C keeps the measured
    rows: the KeyboardInterrupt has the run's `path`, and `sparsebench run --resume PATH` continues
    it. Raises SuiteError, ResultError, WorkerError.
    """
    from sparsebench.harness.commands._console import message_printer, progress_bar
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.run.measure import RunOptions, measure
    from sparsebench.harness.run.run_json import Flags

    folder, to = (Path(path) if path is not None else None for path in (data, out))
    expanded = _suite(suite, folder)
    flags = Flags(full_name(device), folder, timeout_s, replicates, only, energy)
    if not progress:
        return load(measure(expanded, flags, to, None))
    with progress_bar() as show:
        options = RunOptions(progress=show, on_message=message_printer())
        return load(measure(expanded, flags, to, None, options))


def _suite(suite: str | Path | Mapping[str, Any], data: Path | None) -> "Suite":
    import yaml

    from sparsebench.harness.plan.suite import expand, read

    if not isinstance(suite, Mapping):
        return read(str(suite), data)
    written = {"schema": "sparsebench/suite@1", "title": "From Python", **suite}
    try:
        text = yaml.safe_dump(written, sort_keys=False)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise SuiteError(f"suite: expected texts, numbers, lists and mappings, {reason}") from error
    return expand("python", text, data)

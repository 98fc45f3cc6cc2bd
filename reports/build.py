"""Write a run as one HTML file that opens offline, with every figure of reports/figures/.

    run ─> analysis ─> figures/*.py (TITLE, ORDER, draw) ─> templates/report.html

    ┌ badges, device, title, evidence     #top      the first screen shows the answer,
    │ figure `answer`                     #answer   and the other figures are collapsed below it
    │ how it was measured                 #measured
    └ every other figure, sorted by ORDER  #NAME    below the heads of GROUPS

The page loads nothing: CSS, JavaScript, SVG and data are inlined. The only external links are to
the run's files. The URL fragment stores the selected view: #m=16&block=64.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from sparsebench._discovery import load, modules
from sparsebench._writing import write_file
from sparsebench.errors import ResultError, SuiteError
from sparsebench.reports.figures._again import again_command
from sparsebench.reports.findings import headline
from sparsebench.reports.page import render
from sparsebench.reports.terminal import count_statuses, trust
from sparsebench.results.badges import badges
from sparsebench.results.formatting import amount, brackets, capital, selection
from sparsebench.results.run.provenance import device_title, flat, on_gpu
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import Analysis

DATA = ["rows.jsonl", "rows.jsonl.gz", "suite.yaml", "environment.json", "run.json"]
FIRST = "answer"  # the only figure that is not collapsed
GROUPS = {0: "Results", 50: "Efficiency", 75: "Trust", 85: "Data"}  # heads by first ORDER
VERSIONS = ["torch", "triton", "cuda", "cublas", "cusparse", "cusparselt", "cupy-cuda13x"]


@dataclass(frozen=True)
class Figure:
    """A file of reports/figures/."""

    name: str
    title: str
    order: int
    draw: Callable[[Analysis], Markup]


@dataclass(frozen=True)
class Surrounding:
    """HTML that a site adds to a report: in its head element, above it, as evidence and below."""

    head: str = ""
    top: str = ""
    evidence: str = ""
    foot: str = ""


def build(
    analysis: Analysis,
    out_path: Path | None = None,
    surrounding: Surrounding = Surrounding(),
    only: str = "",
) -> str:
    """Return the report, and write it if a path is given.

    surrounding  what a site adds around the report
    only         the name of a figure to draw alone; ResultError if it does not apply to the run
    """
    run = analysis.run
    chosen = [figure for figure in figures() if only in ("", figure.name)]
    drawn = [(figure, body) for figure in chosen if (body := _draw_figure(figure, analysis))]
    if not drawn and only:
        raise ResultError(f"{run.path}: figure {only}: expected cases to draw, found none")
    page = render(
        "report.html",
        first=[(figure, body) for figure, body in drawn if figure.name == (only or FIRST)],
        groups=_group([part for part in drawn if part[0].name != (only or FIRST)]),
        evidence=_evidence(analysis),
        badges=[label.parts for label in badges(analysis)],
        links=[] if only else _links(run.path, out_path),
        surrounding=surrounding,
        facts=_facts(analysis),
        trust=_trust(analysis),
        title=str(run.suite.get("title", run.path.name)),
        about=str(run.suite.get("description", "")),
        device=device_title(run.environment),
    )
    if out_path:
        write_file(out_path, page)
    return page


def figures() -> list[Figure]:
    """Return all figures in their order, those of plug-ins included. Raises SuiteError."""
    loaded = [load_figure(name) for name in modules("reports.figures")]
    return sorted(loaded, key=lambda figure: (figure.order, figure.name))


def load_figure(name: str) -> Figure:
    """Return a figure by the name of its file or of a plug-in. Raises SuiteError."""
    parts = load("reports.figures", name)
    title, order, draw = (getattr(parts, part, None) for part in ("TITLE", "ORDER", "draw"))
    if not (isinstance(title, str) and isinstance(order, int) and callable(draw)):
        expected = "expected a text TITLE, an integer ORDER and a function draw"
        raise SuiteError(f"{name}: {expected}; found {title!r}, {order!r} and {draw!r}")
    return Figure(name, title, order, draw)


def _draw_figure(figure: Figure, analysis: Analysis) -> Markup:
    try:
        return figure.draw(analysis)
    except Exception as error:
        place = modules("reports.figures").get(figure.name, "")
        kind = RuntimeError if place.startswith("sparsebench.") else SuiteError
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise kind(f"figure {figure.name} ({place}): {reason}") from error


def _group(drawn: Sequence[tuple[Figure, Markup]]) -> list[tuple[str, list[tuple[Figure, Markup]]]]:
    """Put the figures below the head of their group, by ORDER."""
    ends = [*list(GROUPS)[1:], 10**9]
    groups = [
        (title, [part for part in drawn if start <= part[0].order < end])
        for (start, title), end in zip(GROUPS.items(), ends, strict=True)
    ]
    return [(title, parts) for title, parts in groups if parts]


def _evidence(analysis: Analysis) -> dict[str, Any]:
    """Return the headline, the evidence for it, and the command that measures it again."""
    run, cases, timed, pairs = analysis.run, analysis.cases, analysis.timed, analysis.noise.pairs
    finding = headline(analysis)
    if not finding:
        return {}
    case = finding.pop("case")
    once = timed.drop_duplicates("case_id")
    differences = pairs.different.dropna()
    text = f"{int(differences.sum())} of {{}} differ" if len(differences) else "{}, not judged"
    counts = [
        brackets(timed.gain_interval[timed.case_id == case]),
        text.format(amount(len(pairs), "A/A pair")),
    ]
    if on_gpu(run.environment):  # nothing records what slows a CPU
        limited = int((once["mark"].fillna("") != "").sum())
        of_cases = amount(len(once), "case")
        counts.append(f"{limited} of {of_cases} had a slowed GPU or a late host in some process")
    again = again_command(run, cases)(dict(cases[cases.case_id == case].iloc[0]))
    return {**finding, "counts": " · ".join(counts), "again": again}


def _facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Return names and values: date, devices, versions, commit, numbers of cases and processes."""
    run, cases = analysis.run, analysis.cases
    facts_of_run = flat(run.environment)
    names = {"driver": "gpu.driver"} | {name: f"versions.{name}" for name in VERSIONS}
    versions = [f"{name} {facts_of_run[key]}" for name, key in names.items() if key in facts_of_run]
    problems = amount(cases.problem_id.nunique(), "problem")
    statuses = [f"{count} {status}" for status, count in count_statuses(analysis).items()]
    dirty = " with uncommitted changes" if facts_of_run.get("dirty") == "True" else ""
    facts = {
        "started": str(run.state.get("started", "")),
        "devices": _devices(run),
        "versions": ", ".join(versions),
        "commit": facts_of_run.get("commit", "") + dirty,
        "only": selection(run.state.get("flags", {}).get("only", "")),
        "cases": f"{', '.join(statuses).replace('_', ' ')}, of {problems}",
        "processes": str(analysis.rows.replicate.nunique()),
    }
    return [(name, value) for name, value in facts.items() if value]


def _devices(run: StoredRun) -> str:
    """Name the devices of a merged run; "" for a run on a single device."""
    shards = run.state.get("shards", [])
    if not shards:
        return ""
    hosts = len({shard["host"] for shard in shards})
    taken = f"{run.state['seconds']:g} s in total, in {run.state['wall_s']:g} s of wall time"
    return f"{device_title(run.environment)}, on {amount(hosts, 'host')}; {taken}"


def _trust(analysis: Analysis) -> list[str]:
    """Return what the terminal says of the reliability of the numbers, and what intervals are."""
    held = brackets(analysis.timed.gain_interval) if len(analysis.timed) else ""
    sentences = [f"{capital(held)}."] if held else []
    sentences += [_shared(analysis)] if analysis.run.state.get("shards") else []
    return [*trust(analysis), *sentences]


def _shared(analysis: Analysis) -> str:
    """Say whether intervals of a merged run span processes of more than one device."""
    count = analysis.rows.groupby("case_id").device.nunique()
    devices = len(analysis.run.environment["devices"])
    on = f"All contenders of a problem ran on one device of {devices}"
    if (count == 1).all():
        return f"{on} in every process, so no interval spans two devices."
    moved = f"{(count > 1).sum()} of {len(count)} cases have processes on more than one device"
    return f"{on} in each process. {moved}; their intervals include the difference of devices."


def _links(run: Path, out: Path | None) -> list[tuple[str, str]]:
    """Return the run's files with their paths relative to the folder of the page."""
    home = Path(os.path.relpath(run.resolve(), out.resolve().parent)) if out else Path()
    return [(name, (home / name).as_posix()) for name in DATA if (run / name).exists()]

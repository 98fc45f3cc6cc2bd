"""The page of a survey: its first screen (survey.py), and everything else folded below it.

first    finding, grid, sentences
folded   the same cases on other devices, kernels, state of the machine, what is left out
beside   decide*/report.html and screen/report.html, which list every case
"""

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.reports import build, grids
from sparsebench.reports.build import Figure
from sparsebench.reports.comparison import sentences
from sparsebench.reports.comparison_tables import cases, intervals, problems
from sparsebench.reports.figures._html import NOTHING, note
from sparsebench.reports.page import render
from sparsebench.reports.survey import Summary, summarise
from sparsebench.reports.tables import html_table
from sparsebench.results import files
from sparsebench.results.comparison.changes import Changes, other_devices
from sparsebench.results.formatting import (
    brackets,
    capital,
    duration,
    join_words,
)
from sparsebench.results.run import store
from sparsebench.results.run.store import without_paths
from sparsebench.results.tables.analysis import Analysis, analyse

STEPS = {"doctor": "Check of the machine", "compile": "Compilation", "tune": "Tuning"}
STEPS |= {"screen": "Look at all problems", "decide": "Verdicts"}


def write(path: Path, against: Sequence[Path]) -> Summary:
    """Write a survey's report.html and the reports of its runs; return the first screen."""
    survey = files.from_json(path / "survey.json")
    names = [*sorted(folder.name for folder in path.glob("decide*")), "screen"]
    runs = [path / name for name in names if _ran(path / name)]
    with ProcessPoolExecutor(max(1, len(runs)), get_context("spawn")) as pool:
        drawn = [pool.submit(_report, run) for run in runs]
        by_run = {run.name: analyse(store.read(run)) for run in runs}
        summary, page = _draw_pages(survey, path, by_run, against)
        write_file(path / "report.html", page)
        for report in drawn:
            report.result()
    return summary


def _report(path: Path) -> None:
    build.build(analyse(store.read(path)), path / "report.html")


def _ran(path: Path) -> bool:
    return (path / "run.json").exists() and any(not row.reference for row in store.rows(path))


def _draw_pages(
    survey: dict[str, Any], path: Path, by_run: dict[str, Analysis], against: Sequence[Path]
) -> tuple[Summary, str]:
    """Return the first screen and the page."""
    fitness, kernels = (_read_list(path / name) for name in ("fitness.json", "kernels.json"))
    others, refused = other_devices([*by_run.values()], against)
    others.sort(key=lambda there: -len(there.cases))
    device = by_run["screen"].device if "screen" in by_run else survey["device"]
    summary = summarise(device, by_run, others, kernels, fitness)
    sections = [
        ("elsewhere", "The same cases on other devices", _others(others, refused)),
        ("kernels", "Kernels on this device", _kernels(kernels)),
        ("fitness", "State of the machine", _fitness(fitness)),
        ("left", "Left out", _table_of_rest({**survey["left"], **survey["notes"]})),
    ]
    steps = [f"{name} {seconds:g} s" for name, seconds in survey["seconds"].items()]
    page = render(
        "report.html",
        first=[_section("answer", "The answer", _first(summary, Path(path.name)))],
        groups=[("Details", [_section(*section) for section in sections if section[2]])],
        evidence=None,
        badges=summary.badges,
        surrounding=build.Surrounding(),
        links=[*((f"{n}/report.html",) * 2 for n in by_run), ("survey.json", "survey.json")],
        facts=[("budget", duration(1e6 * survey["budget_s"])), ("steps", ", ".join(steps))],
        trust=[f"{name}: {analysis.noise.sentence}" for name, analysis in by_run.items()],
        title=summary.question,
        about=f"Suite {survey['suite']}: one process measures every problem, and several processes "
        "measure the deciding cases again. Verdicts use no number of the look.",
        device="sparsebench new-gpu",
    )
    return summary, page


def _first(summary: Summary, path: Path) -> Markup:
    """Return the first screen; `path` is the folder in the commands."""
    verdicts = [case for case in summary.grid.cases if pd.notna(case["low"])]
    held = capital(brackets(case["gain_interval"] for case in verdicts))
    texts = [summary.key, held, "Hatched: not settled", "A speedup without brackets is a look."]
    caption = ". ".join(filter(None, texts))
    address = "{run}/report.html#case-{case_id}".format_map
    drawn = grids.html(summary.grid, address, caption) if summary.grid.rows else NOTHING
    sentences = Markup("").join(
        Markup('<p class="{}">{}</p>').format("why unreliable" if warns else "why", sentence)
        for sentence in [*summary.others, *summary.state]
        for warns in [sentence.startswith("Warning")]
    )
    steps = Markup("").join(
        Markup('<p class="again"><code>sparsebench {}</code> {}</p>').format(*step)
        for step in summary.steps(path).items()
    )
    page = '<p class="finding"><b>{}</b></p>{}{}{}'
    return Markup(page).format(summary.finding, drawn, sentences, steps)


def _others(others: list[Changes], refused: list[str]) -> Markup:
    lines = [note(f"Left out: {without_paths(why)}") for why in refused]
    if not others:
        none = "Nothing is compared, because no published run shares a case with this survey."
        return Markup("").join([note(none), *lines])
    return Markup("").join([*map(_other, others), *lines])


def _other(there: Changes) -> Markup:
    """List the shared cases of another device: times first, then gains over its baseline."""
    names = join_words([run.path.name for run in there.b.runs])
    runs = f"The devices were measured in different processes. Other runs: {names}."
    head = Markup("<h3>{} beside {}</h3>").format(capital(there.b.name), there.a.device)
    held = " ".join(intervals([there]))
    text = note(f"{' '.join(sentences(there))} {runs} Problems: {problems([there])}. {held}")
    return head + text + replace(cases([there]), title="").html()


def _kernels(kernels: list[dict[str, Any]]) -> Markup:
    if not kernels:
        return note("Kernels were not checked: the survey stopped earlier.")
    runs = sum(kernel["supported"] > 0 for kernel in kernels)
    rows = []
    for each in sorted(kernels, key=lambda each: (not each["supported"], each["kernel"])):
        here = "runs" if each["supported"] else "does not run"
        counts = f"{each['supported']} of {each['cases']}"
        rows.append([each["kernel"], here, counts, each["reason"] or "–"])
    words = f"{runs} of {len(kernels)} kernels run here. Each was checked on its cases in all"
    heads = ["kernel", "here", ">cases", "most frequent reason against the others"]
    return note(f"{words} suites.") + html_table(heads, rows)


def _fitness(fitness: list[dict[str, Any]]) -> Markup:
    if not fitness:
        return note("The doctor did not run: the survey stopped earlier.")
    heads = ["level", "check", "finding", "meaning", "advice"]
    names = ("level", "check", "found", "means", "do")
    return html_table(heads, [[finding[name] or "–" for name in names] for finding in fitness])


def _table_of_rest(left: dict[str, str]) -> Markup:
    if not left:
        return note("Nothing: every step finished within the budget.")
    return html_table(["step", "reason"], [[STEPS.get(n, n), why] for n, why in left.items()])


def _read_list(file: Path) -> list[dict[str, Any]]:
    """Read a list of JSON objects; [] if the survey stopped before it wrote the file."""
    if not file.exists():
        return []
    try:
        data = json.loads(files.text(file, files.YAML_BYTES))
    except ValueError as error:
        raise ResultError(f"{file}: expected JSON, found {error}") from error
    return list(data)


def _section(name: str, title: str, body: Markup) -> tuple[Figure, Markup]:
    """Return a section that is drawn already, as the template takes it."""
    return Figure(name, title, 0, lambda analysis: body), body

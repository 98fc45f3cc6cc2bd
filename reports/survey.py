"""The page of a survey (harness/new_gpu): how well a device runs sparse formats.

    ┌ badges, device
    │ warnings about the machine         #answer
    │ verdicts, a line per problem                  from decide/, in several processes
    │ looks, a line per shape                       from screen/, in one process; map and figure
    ├ the same cases on other GPUs       #elsewhere
    └ ceilings, kernels, fitness, what was left out

The page is made from the files of the survey and the bundles of other devices. The reports of
screen/ and decide/, which list every case, are written with it.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.reports import build
from sparsebench.reports.build import Figure
from sparsebench.reports.figures import answer
from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._html import note
from sparsebench.reports.tables import html_table
from sparsebench.results import files, store
from sparsebench.results.analysis import Analysis, NoCrossing, analyse
from sparsebench.results.answer import Badge, badge_text, badges, field_text, sentences, winner
from sparsebench.results.changes import OtherDevice, other_devices, problem_fields
from sparsebench.results.contests import contests, views, with_gains, with_shapes
from sparsebench.results.formatting import (
    amount,
    between,
    duration,
    listed,
    percent,
    plain,
    significant,
    times,
)

RUNS = "decide", "screen"  # a verdict outweighs a look
VERDICTS = 8  # lines on the first screen; decide/report.html shows all
PLACE = ("op", "dtype", "level", "active", "m", "shape", "block")
SHAPE = ["op", "pattern", "dtype", "n", "k"]
STEPS = {"doctor": "Check of the machine", "probe": "Check of the kernels"}
STEPS |= {"tune": "Tuning", "screen": "Look at all problems", "decide": "Verdicts"}


def write(path: Path, against: Sequence[Path]) -> Path:
    """Write a survey's report.html and the reports of its runs; return the path of the page."""
    survey = files.from_json(path / "survey.json")
    runs = [path / name for name in RUNS if _ran(path / name)]
    with ProcessPoolExecutor(len(RUNS), get_context("spawn")) as pool:
        drawn = [pool.submit(_report, run) for run in runs]
        by_run = {run.name: _frames(run) for run in runs}
        page = path / "report.html"
        write_file(page, _page(survey, path, by_run, against))
        for report in drawn:
            report.result()
    return page


def _report(path: Path) -> None:
    build.build(store.read(path), path / "report.html")


def _ran(path: Path) -> bool:
    return (path / "run.json").exists() and any(not row.reference for row in store.rows(path))


def _frames(path: Path) -> Frames:
    run = store.read(path)
    analysis = analyse(run)
    return Frames(run, analysis.rows, analysis.cases, analysis.noise)


def _analysis(frames: Frames) -> Analysis:
    return Analysis(frames.rows, frames.noise, frames.cases)


def _page(
    survey: dict[str, Any], path: Path, by_run: dict[str, Frames], against: Sequence[Path]
) -> str:
    fitness, kernels = (_listed(path / name) for name in ("fitness.json", "kernels.json"))
    own_runs = [(frames.run, _analysis(frames)) for frames in by_run.values()]
    others, refused = other_devices(own_runs, against)
    device = by_run["screen"].device if "screen" in by_run else survey["device"]
    left = {**survey["left"], **survey["notes"]}
    sections = [
        ("elsewhere", "The same cases on other GPUs", _others(others, refused, device)),
        ("ceilings", "Ceilings", _ceilings(by_run, others, device)),
        ("kernels", "Kernels on this device", _kernels(kernels)),
        ("fitness", "State of the machine", _fitness(fitness)),
        ("left", "Left out", _left(left)),
    ]
    named = [(Figure(n, title, 0, _undrawn), body) for n, title, body in sections if body]
    first = Figure("answer", "Which format wins on this device", 0, _undrawn)
    reports = [(f"{name}/report.html", f"{name}/report.html") for name in by_run]
    steps = [f"{name} {seconds:g} s" for name, seconds in survey["seconds"].items()]
    return build.rendered(
        first=[(first, _warned(fitness) + _answer(by_run))],
        sections=named,
        badges=_badges(survey["left"], by_run),
        surrounding=build.Surrounding(),
        links=[*reports, ("survey.json", "survey.json")],
        facts=[("budget", duration(1e6 * survey["budget_s"])), ("steps", ", ".join(steps))],
        trust=_trust(by_run),
        title="How well does this device run sparse formats?",
        about=f"Suite {survey['suite']}: one process measures every problem, and the deciding "
        "cases are measured again in several processes. Verdicts use no number of the look.",
        device=device,
    )


def _badges(left: dict[str, str], by_run: dict[str, Frames]) -> list[tuple[str, str, str]]:
    """Return the badges of both runs: class, text and reason with the name of the part."""
    parts = {"decide": "Verdicts", "screen": "Look"}
    badges_by_kind: dict[Badge, tuple[str, str]] = {}
    if left:
        why = f"The survey stopped in {listed([*left])}; new-gpu --resume continues it."
        badges_by_kind[Badge.UNFINISHED] = str(Badge.UNFINISHED), why
    for name, frames in by_run.items():
        for badge, why in badges(frames.cases, frames.noise, frames.run.environment):
            reason = why if badge is Badge.SIMULATED else f"{parts[name]}: {why}"
            badges_by_kind.setdefault(badge, (badge_text(badge, frames.cases), reason))
    if not by_run:
        badges_by_kind[Badge.EMPTY] = str(Badge.EMPTY), "Nothing was measured."
    return [(badge.name.lower(), *reason) for badge, reason in badges_by_kind.items()]


def _trust(by_run: dict[str, Frames]) -> list[str]:
    return [f"{name}: {frames.noise.sentence}" for name, frames in by_run.items()]


def _warned(fitness: list[dict[str, Any]]) -> Markup:
    """Write the warnings of the doctor and the names of its notes."""
    bad = [finding for finding in fitness if finding["level"] == "warning"]
    sentences = [
        f"{finding['check']}: {finding['found']}. {finding['means']} {finding['do']}"
        for finding in bad
    ]
    lines = [Markup('<p class="why unreliable">Warning: {}</p>').format(line) for line in sentences]
    notes = [finding["check"] for finding in fitness if finding["level"] == "note"]
    if notes:
        text = f"Notes about the machine: {listed(notes)}."
        lines.append(Markup('<p class="why">{} <a href="#fitness">More</a></p>').format(text))
    return Markup("").join(lines)


def _answer(by_run: dict[str, Frames]) -> Markup:
    if "screen" not in by_run:
        return Markup("<p>Nothing was measured, so there is no answer.</p>")
    parts = [_items(f"Verdicts, {_processes(by_run, 'decide')}", _verdicts(by_run["decide"]))] if (
        "decide" in by_run
    ) else []  # fmt: skip
    parts.append(_items(f"A look, {_processes(by_run, 'screen')}", _looks(by_run["screen"])))
    drawn = answer.draw(by_run["screen"])
    drawn = Markup(drawn.replace('href="#case-', 'href="screen/report.html#case-'))
    return Markup("").join([*parts, Markup("<h3>The look, problem by problem</h3>"), drawn])


def _processes(by_run: dict[str, Frames], name: str) -> str:
    return amount(int(by_run[name].cases.processes.max()), "process")


def _items(title: str, lines: list[tuple[str, str]]) -> Markup:
    if not lines:
        return NOTHING
    items = Markup("").join(Markup("<li><b>{}:</b> {}</li>").format(*line) for line in lines)
    return Markup('<h3>{}</h3><ul class="answers">{}</ul>').format(title, items)


def _verdicts(frames: Frames) -> list[tuple[str, str]]:
    """Return a line per problem with its winner, for each shape and m the best first."""
    if with_gains(frames.cases).empty:
        return []
    problems = contests(frames.cases)
    lines = pd.concat([with_shapes(group) for _, group in problems.groupby("op", sort=False)])
    lines = lines.sort_values("best_gain", ascending=False, kind="stable")
    again = lines.groupby(["op", "pattern", "dtype", "m", "shape"], dropna=False).cumcount()
    lines = lines.loc[again.sort_values(kind="stable").index]
    verdicts = [(_place(line), f"{winner(line)}.") for _, line in lines.iterrows()]
    more = len(verdicts) - VERDICTS
    there = f"decide/report.html has {amount(more, 'more verdict')}."
    return verdicts[:VERDICTS] + ([("More", there)] if more > 0 else [])


def _looks(frames: Frames) -> list[tuple[str, str]]:
    """Return a line per shape: the break-even, and the winner at the highest sparsity."""
    firsts = [
        view
        for _, cases in frames.cases.groupby(SHAPE, sort=False, dropna=False)
        for view in views(cases)[:1]
    ]
    firsts.sort(key=lambda view: -view.cells.best_gain.fillna(0).max())
    looks = []
    for view in firsts:
        parts = list(dict.fromkeys([*sentences(view)[:1], *sentences(view)[-1:]]))
        looks.append((_place(view.cells.iloc[0], varying=view.cells), " ".join(parts)))
    return looks


def _place(line: "pd.Series[Any]", varying: pd.DataFrame | None = None) -> str:
    """Write the fields of a problem, or those that several problems share."""
    words = []
    for name in PLACE:
        if name not in line or pd.isna(line[name]) or line[name] == 0:
            continue
        if varying is None or varying[name].nunique() == 1:
            words.append(field_text(name, line[name]))
    return " · ".join(filter(None, words))


def _others(others: list[OtherDevice], refused: list[str], device: str) -> Markup:
    lines = [note(f"Left out: {why}") for why in refused]
    if not others:
        none = "Nothing is compared, because no published run shares a case with this survey."
        return Markup("").join([note(none), *lines])
    return Markup("").join([*(_other(each, device) for each in others), *lines])


def _other(there: OtherDevice, device: str) -> Markup:
    name = f"another {there.device}" if there.same_kind else there.device
    cases = there.ratios
    if cases.empty:
        words = f"No case has a speedup over the same baseline on both {device} and {name}."
        return Markup("<h3>{}</h3>").format(f"Compared with {name}") + note(words)
    counted = cases.word.value_counts()
    counts = listed([f"{count} {word}" for word, count in counted.items() if word])
    words = (
        f"{len(cases)} shared cases, each over its own device's baseline. On the other device: "
        f"{counts}. Geometric mean of the other speedup over the speedup here: "
        f"{significant(there.mean)}. "
        f"The devices were measured in different processes. Other runs: {listed(there.runs)}."
    )
    head = Markup("<h3>{}</h3>").format(f"{device} compared with {name}") + note(words)
    return head + _crossings(there) + _ratios(there)


def _crossings(there: OtherDevice) -> Markup:
    """List the break-even of each contender on both devices."""
    evens = there.break_evens
    if evens.empty:
        return NOTHING
    varying = [name for name in evens.columns[:-3] if evens[name].nunique(dropna=False) > 1]
    rows = [
        [*(_field(line[name]) for name in varying), line["label"], *map(_from, _sides(line))]
        for line in evens.to_dict("records")
    ]
    evens = evens.sort_values([*varying, "label"], kind="stable", key=_sortable)
    title = note(
        "Sparsity from which each contender is faster than the baseline, by shared levels:"
    )
    return title + html_table([*varying, "contender", ">here", ">there"], rows)


def _sortable(column: "pd.Series[Any]") -> "pd.Series[Any]":
    numbers = pd.to_numeric(column, errors="coerce")
    return column.astype(str) if numbers.isna().any() else numbers


def _sides(line: dict[Any, Any]) -> list[dict[str, Any]]:
    return [line["here"], line["there"]]


def _from(even: dict[str, Any]) -> str:
    """Write a break-even, or the reason that there is none."""
    if even["note"] == NoCrossing.BELOW:
        return f"at {percent(even['first_level'])} already"
    if even["note"] == NoCrossing.ABOVE:
        return f"not up to {percent(even['last_level'])}"
    return percent(even["break_even"])


def _ratios(there: OtherDevice) -> Markup:
    """List the cases: speedups over the local baseline, shares of the local bound, times."""
    cases = there.ratios
    varying = [
        name for name in problem_fields(there.cases) if cases[name].nunique(dropna=False) > 1
    ]
    heads = [*varying, "contender", ">× baseline here", ">there", ">there / here", "there is"]
    heads += [">of bound here", ">there", ">time here", ">there", "run there"]
    rows = [
        [
            *(percent(line[n]) if n == "sparsity" else _field(line[n]) for n in varying),
            line["label"],
            *(times(line[name]) for name in ("speedup_a", "speedup_b")),
            between(line["ratio"], line["low"], line["high"]),
            str(line["word"]),
            *(_part(line[f"of_bound_{side}"]) for side in "ab"),
            *(duration(line[f"median_us_{side}"]) for side in "ab"),
            line["run"],
        ]
        for line in cases.to_dict("records")
    ]
    return html_table(heads, rows)


def _field(value: Any) -> str:
    return "–" if pd.isna(value) else plain(value)


def _part(share: float) -> str:
    return percent(round(share, 2)) if share > 0 else "–"


def _ceilings(by_run: dict[str, Frames], others: list[OtherDevice], device: str) -> Markup:
    """List the measured ceilings of this device and of the other devices."""
    if "screen" not in by_run:
        return NOTHING
    named = {device: by_run["screen"].run.environment.get("ceilings", {})}
    named |= {other.device: other.ceilings for other in others if not other.same_kind}
    flat = {name: _flat_ceilings(ceilings) for name, ceilings in named.items()}
    kinds = list(dict.fromkeys(kind for ceilings in flat.values() for kind in ceilings))
    rows = [
        [kind, *(significant(ceilings.get(kind)) for ceilings in flat.values())] for kind in kinds
    ]
    return html_table(["measured", *(f">{name}" for name in named)], rows)


def _flat_ceilings(data: dict[str, Any]) -> dict[str, float]:
    names = {f"{way}_gb_per_s": f"{way}, GB/s" for way in ("read", "copy", "write")}
    values = {text: data[name] for name, text in names.items() if data.get(name)}
    values |= {f"{dtype}, TFLOP/s": rate for dtype, rate in data.get("matrix_tflops", {}).items()}
    values |= {"a launch, µs": data["launch_us"]} if data.get("launch_us") else {}
    return values | ({"L2, MiB": data["l2_bytes"] / 2**20} if data.get("l2_bytes") else {})


def _kernels(kernels: list[dict[str, Any]]) -> Markup:
    if not kernels:
        return note(
            "Kernels were not checked: the device is simulated, or the survey stopped earlier."
        )
    runs = sum(kernel["supported"] > 0 for kernel in kernels)
    rows = [
        [
            kernel["kernel"],
            "runs" if kernel["supported"] else "does not run",
            f"{kernel['supported']} of {kernel['cases']}",
            kernel["reason"] or "–",
        ]
        for kernel in sorted(
            kernels, key=lambda kernel: (not kernel["supported"], kernel["kernel"])
        )
    ]
    words = (
        f"{runs} of {len(kernels)} kernels run here. Each was checked on its cases in all suites."
    )
    return note(words) + html_table(
        ["kernel", "here", ">cases", "most frequent reason against the others"], rows
    )


def _fitness(fitness: list[dict[str, Any]]) -> Markup:
    if not fitness:
        return note(
            "The doctor did not run: the device is simulated, or the survey stopped earlier."
        )
    heads = ["level", "check", "finding", "meaning", "advice"]
    names = ("level", "check", "found", "means", "do")
    return html_table(heads, [[finding[name] or "–" for name in names] for finding in fitness])


def _left(left: dict[str, str]) -> Markup:
    if not left:
        return note("Nothing: every step finished within the budget.")
    return html_table(["step", "reason"], [[STEPS.get(n, n), why] for n, why in left.items()])


def _listed(file: Path) -> list[dict[str, Any]]:
    """Read a list of JSON objects; [] if the survey stopped before it wrote the file."""
    if not file.exists():
        return []
    try:
        data = json.loads(files.text(file, files.YAML_BYTES))
    except ValueError as error:
        raise ResultError(f"{file}: expected JSON, found {error}") from error
    return list(data)


def _undrawn(frames: Frames) -> Markup:
    """Take the place of `draw` for a section that is drawn already."""
    return NOTHING

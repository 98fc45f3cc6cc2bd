"""The page of a survey (harness/new_gpu): what a device is worth for sparse formats.

    ┌ badges, device
    │ is the machine fit                 #answer    first the warnings, then the answer:
    │ verdicts, a line a problem                    decide/, in several processes
    │ looks, a line a shape                         screen/, in one process; its map and figure
    ├ the same cases on other GPUs       #elsewhere
    └ ceilings, kernels, fitness, what was left out

It reads what the survey wrote, and the bundles of other devices. It also writes the reports of
screen/ and decide/, which have every case.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

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

RUNS = "decide", "screen"  # a verdict counts more than a look
VERDICTS = 8  # lines on the first screen; decide/report.html has all
PLACE = ("op", "dtype", "level", "active", "m", "shape", "block")
SHAPE = ["op", "pattern", "dtype", "n", "k"]
STEPS = {"doctor": "Whether the machine is fit", "probe": "Which kernels run here"}
STEPS |= {"tune": "Tuning", "screen": "The look at all problems", "decide": "The verdicts"}


def write(path: Path, against: Sequence[Path]) -> Path:
    """Write a survey's report.html, and the reports of its runs; return the page."""
    survey = files.from_json(path / "survey.json")
    runs = [path / name for name in RUNS if _ran(path / name)]
    with ProcessPoolExecutor(len(RUNS), get_context("spawn")) as beside:
        drawn = [beside.submit(_report, run) for run in runs]
        found = {run.name: _frames(run) for run in runs}
        page = path / "report.html"
        page.write_text(_page(survey, path, found, against), "utf-8")
        for report in drawn:
            report.result()
    return page


def _report(path: Path) -> None:
    build.build(store.read(path), path / "report.html")


def _ran(path: Path) -> bool:
    return (path / "run.json").exists() and any(not row.reference for row in store.rows(path))


def _frames(path: Path) -> Frames:
    run = store.read(path)
    found = analyse(run)
    return Frames(run, found.rows, found.cases, found.noise)


def _analysis(frames: Frames) -> Analysis:
    return Analysis(frames.rows, frames.noise, frames.cases)


def _page(
    survey: dict[str, Any], path: Path, found: dict[str, Frames], against: Sequence[Path]
) -> str:
    fitness, kernels = (_listed(path / name) for name in ("fitness.json", "kernels.json"))
    own = [(frames.run, _analysis(frames)) for frames in found.values()]
    others, refused = other_devices(own, against)
    device = found["screen"].device if "screen" in found else survey["device"]
    left = {**survey["left"], **survey["notes"]}
    sections = [
        ("elsewhere", "The same cases on other GPUs", _others(others, refused, device)),
        ("ceilings", "Ceilings", _ceilings(found, others, device)),
        ("kernels", "Which kernels run here", _kernels(kernels)),
        ("fitness", "Is the machine fit", _fitness(fitness)),
        ("left", "What was left out", _left(left)),
    ]
    named = [(Figure(n, title, 0, _undrawn), body) for n, title, body in sections if body]
    first = Figure("answer", "Which format wins here", 0, _undrawn)
    reports = [(f"{name}/report.html", f"{name}/report.html") for name in found]
    steps = [f"{name} {seconds:g} s" for name, seconds in survey["seconds"].items()]
    return build.rendered(
        first=[(first, _warned(fitness) + _answer(found))],
        sections=named,
        badges=_badges(survey["left"], found),
        surrounding=build.Surrounding(),
        links=[*reports, ("survey.json", "survey.json")],
        facts=[("budget", duration(1e6 * survey["budget_s"])), ("steps", ", ".join(steps))],
        trust=_trust(found),
        title="What is this device worth for sparse formats?",
        about=f"Suite {survey['suite']}: one process looks at every problem, and what decides is "
        "measured anew in several. No number of the look is in a verdict.",
        device=device,
    )


def _badges(left: dict[str, str], found: dict[str, Frames]) -> list[tuple[str, str, str]]:
    """Return the badges of both runs: class, text and reason, which says what part it is of."""
    parts = {"decide": "Verdicts", "screen": "Look"}
    several: dict[Badge, tuple[str, str]] = {}
    if left:
        why = f"The survey stopped in {listed([*left])}; new-gpu --resume goes on."
        several[Badge.UNFINISHED] = str(Badge.UNFINISHED), why
    for name, frames in found.items():
        for badge, why in badges(frames.cases, frames.noise, frames.run.environment):
            said = why if badge is Badge.SIMULATED else f"{parts[name]}: {why}"
            several.setdefault(badge, (badge_text(badge, frames.cases), said))
    if not found:
        several[Badge.EMPTY] = str(Badge.EMPTY), "Nothing was measured."
    return [(badge.name.lower(), *said) for badge, said in several.items()]


def _trust(found: dict[str, Frames]) -> list[str]:
    return [f"{name}: {frames.noise.sentence}" for name, frames in found.items()]


def _warned(fitness: list[dict[str, Any]]) -> Markup:
    """Write the warnings of the doctor; say how many notes there are."""
    bad = [each for each in fitness if each["level"] == "warning"]
    said = [f"{each['check']}: {each['found']}. {each['means']} {each['do']}" for each in bad]
    lines = [Markup('<p class="why unreliable">Not fit: {}</p>').format(line) for line in said]
    notes = [each["check"] for each in fitness if each["level"] == "note"]
    if notes:
        text = f"Worth knowing of the machine: {listed(notes)}."
        lines.append(Markup('<p class="why">{} <a href="#fitness">More</a></p>').format(text))
    return Markup("").join(lines)


def _answer(found: dict[str, Frames]) -> Markup:
    if "screen" not in found:
        return Markup("<p>Nothing was measured: there is no answer.</p>")
    parts = [_items(f"Verdicts, {_processes(found, 'decide')}", _verdicts(found["decide"]))] if (
        "decide" in found
    ) else []  # fmt: skip
    parts.append(_items(f"A look, {_processes(found, 'screen')}", _looks(found["screen"])))
    drawn = answer.draw(found["screen"])
    drawn = Markup(drawn.replace('href="#case-', 'href="screen/report.html#case-'))
    return Markup("").join([*parts, Markup("<h3>The look, problem by problem</h3>"), drawn])


def _processes(found: dict[str, Frames], name: str) -> str:
    return amount(int(found[name].cases.processes.max()), "process")


def _items(title: str, lines: list[tuple[str, str]]) -> Markup:
    if not lines:
        return NOTHING
    items = Markup("").join(Markup("<li><b>{}:</b> {}</li>").format(*line) for line in lines)
    return Markup('<h3>{}</h3><ul class="answers">{}</ul>').format(title, items)


def _verdicts(frames: Frames) -> list[tuple[str, str]]:
    """Return a line a problem: what it is, and who wins it; of each shape and m the best first."""
    if with_gains(frames.cases).empty:
        return []
    found = contests(frames.cases)
    lines = pd.concat([with_shapes(own) for _, own in found.groupby("op", sort=False)])
    lines = lines.sort_values("best_gain", ascending=False, kind="stable")
    again = lines.groupby(["op", "pattern", "dtype", "m", "shape"], dropna=False).cumcount()
    lines = lines.loc[again.sort_values(kind="stable").index]
    said = [(_place(line), f"{winner(line)}.") for _, line in lines.iterrows()]
    more = len(said) - VERDICTS
    there = f"{amount(more, 'problem')} with a verdict in decide/report.html."
    return said[:VERDICTS] + ([("More", there)] if more > 0 else [])


def _looks(frames: Frames) -> list[tuple[str, str]]:
    """Return a line a shape: from where on a format beats dense, and who wins at its last level."""
    firsts = [
        view
        for _, cases in frames.cases.groupby(SHAPE, sort=False, dropna=False)
        for view in views(cases)[:1]
    ]
    firsts.sort(key=lambda view: -view.cells.best_gain.fillna(0).max())
    said = []
    for view in firsts:
        own = list(dict.fromkeys([*sentences(view)[:1], *sentences(view)[-1:]]))
        said.append((_place(view.cells.iloc[0], varying=view.cells), " ".join(own)))
    return said


def _place(line: "pd.Series[Any]", varying: pd.DataFrame | None = None) -> str:
    """Write the fields of a problem; of several ones those that they share."""
    words = []
    for name in PLACE:
        if name not in line or pd.isna(line[name]) or line[name] == 0:
            continue
        if varying is None or varying[name].nunique() == 1:
            words.append(field_text(name, line[name]))
    return " · ".join(each for each in words if each and each != "blocks of 1")


def _others(others: list[OtherDevice], refused: list[str], device: str) -> Markup:
    lines = [note(f"Left out: {why}") for why in refused]
    if not others:
        none = "No published run has a case of this survey: nothing is compared."
        return Markup("").join([note(none), *lines])
    return Markup("").join([*(_other(each, device) for each in others), *lines])


def _other(there: OtherDevice, device: str) -> Markup:
    name = f"another {there.device}" if there.same_kind else there.device
    own = there.ratios
    if own.empty:
        said = f"No case has a speed-up over the same baseline on both, {device} and {name}."
        return Markup("<h3>{}</h3>").format(f"Against {name}") + note(said)
    words = own.word.value_counts()
    counts = listed([f"{words[word]} {word}" for word in words.index if word])
    said = (
        f"Of {len(own)} shared cases there are, each over its own device's baseline: {counts}. "
        f"Geometric mean of speed-up there over speed-up here: {significant(there.mean)}. "
        f"Between runs: no process had both devices. There: {listed(there.runs)}."
    )
    head = Markup("<h3>{}</h3>").format(f"{device} against {name}") + note(said)
    return head + _crossings(there) + _ratios(there)


def _crossings(there: OtherDevice) -> Markup:
    """Draw the break-even of each contender on both devices."""
    found = there.break_evens
    if found.empty:
        return NOTHING
    varying = [name for name in found.columns[:-3] if found[name].nunique(dropna=False) > 1]
    rows = [
        [*(_field(line[name]) for name in varying), line["label"], *map(_from, _sides(line))]
        for line in found.to_dict("records")
    ]
    found = found.sort_values([*varying, "label"], kind="stable", key=_sortable)
    title = note("Faster than the baseline from this sparsity on, by the levels of both devices:")
    return title + html_table([*varying, "contender", ">here", ">there"], rows)


def _sortable(column: "pd.Series[Any]") -> "pd.Series[Any]":
    numbers = pd.to_numeric(column, errors="coerce")
    return column.astype(str) if numbers.isna().any() else numbers


def _sides(line: dict[Any, Any]) -> list[dict[str, Any]]:
    return [line["here"], line["there"]]


def _from(found: dict[str, Any]) -> str:
    """Write a break-even, or why there is none."""
    if found["note"] == NoCrossing.BELOW:
        return f"already {percent(found['first_level'])}"
    if found["note"] == NoCrossing.ABOVE:
        return f"not up to {percent(found['last_level'])}"
    return percent(found["break_even"])


def _ratios(there: OtherDevice) -> Markup:
    """Draw the cases: ratios to the local baseline, parts of the local bound, then times."""
    own = there.ratios
    varying = [name for name in problem_fields(there.cases) if own[name].nunique(dropna=False) > 1]
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
        for line in own.to_dict("records")
    ]
    return html_table(heads, rows)


def _field(value: Any) -> str:
    return "–" if pd.isna(value) else plain(value)


def _part(share: float) -> str:
    return percent(round(share, 2)) if share > 0 else "–"


def _ceilings(found: dict[str, Frames], others: list[OtherDevice], device: str) -> Markup:
    """Draw the measured ceilings of this device, and of those that it is held against."""
    if "screen" not in found:
        return NOTHING
    named = {device: found["screen"].run.environment.get("ceilings", {})}
    named |= {other.device: other.ceilings for other in others if not other.same_kind}
    flat = {name: _flat_ceilings(each) for name, each in named.items()}
    kinds = list(dict.fromkeys(kind for each in flat.values() for kind in each))
    rows = [[kind, *(significant(each.get(kind)) for each in flat.values())] for kind in kinds]
    return html_table(["measured", *(f">{name}" for name in named)], rows)


def _flat_ceilings(data: dict[str, Any]) -> dict[str, float]:
    names = {f"{way}_gb_per_s": f"{way}, GB/s" for way in ("read", "copy", "write")}
    own = {said: data[name] for name, said in names.items() if data.get(name)}
    own |= {f"{dtype}, TFLOP/s": rate for dtype, rate in data.get("matrix_tflops", {}).items()}
    own |= {"a launch, µs": data["launch_us"]} if data.get("launch_us") else {}
    return own | ({"L2, MiB": data["l2_bytes"] / 2**20} if data.get("l2_bytes") else {})


def _kernels(kernels: list[dict[str, Any]]) -> Markup:
    if not kernels:
        return note("Kernels were not asked: the device is simulated, or the survey stopped first.")
    runs = sum(each["supported"] > 0 for each in kernels)
    rows = [
        [
            each["kernel"],
            "runs" if each["supported"] else "does not run",
            f"{each['supported']} of {each['cases']}",
            each["reason"] or "–",
        ]
        for each in sorted(kernels, key=lambda each: (not each["supported"], each["kernel"]))
    ]
    said = (
        f"{runs} of {len(kernels)} kernels run here. Each was asked about its cases in all suites."
    )
    return note(said) + html_table(["kernel", "here", ">cases", "why not the others, mostly"], rows)


def _fitness(fitness: list[dict[str, Any]]) -> Markup:
    if not fitness:
        return note(
            "The doctor was not asked: the device is simulated, or the survey stopped first."
        )
    heads = ["level", "check", "found", "what it means", "what to do"]
    names = ("level", "check", "found", "means", "do")
    return html_table(heads, [[each[name] or "–" for name in names] for each in fitness])


def _left(left: dict[str, str]) -> Markup:
    if not left:
        return note("Nothing: every step finished inside the budget.")
    return html_table(["step", "what"], [[STEPS.get(n, n), why] for n, why in left.items()])


def _listed(file: Path) -> list[dict[str, Any]]:
    """Read a list of JSON objects; none where the survey stopped before it was written."""
    if not file.exists():
        return []
    try:
        data = json.loads(files.text(file, files.YAML_BYTES))
    except ValueError as error:
        raise ResultError(f"{file}: expected JSON, found {error}") from error
    return list(data)


def _undrawn(frames: Frames) -> Markup:
    """Stand for the drawing of a section that is drawn already."""
    return NOTHING

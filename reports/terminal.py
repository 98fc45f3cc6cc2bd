"""The answer of a run on a terminal, or in Markdown: sentences, each format, the fastest, trust.

    device, suite, badges          what a reader must know before any number
    sentences                      results/answer.py, as on the page
    formats                        each format once, or why it has no time
    fastest                        of each problem, a table for each op, pattern and dtype
    break-even                     of each format, by its first contender
    not measured                   every reason, with its cases
    trust                          noise floor, reliability, marks, the state of the machine

Tables are fitted to the window. The name of a winner is never cut.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from sparsebench.reports.tables import Cell, Table
from sparsebench.results.analysis import Analysis, NoCrossing, break_even, winners
from sparsebench.results.answer import Badge, answers, badge_text, badges, unfit
from sparsebench.results.contests import with_gains
from sparsebench.results.families import OF_ACTIVATIONS
from sparsebench.results.formatting import FORMATS, are, duration, estimate, kernel, percent
from sparsebench.results.frame import fields
from sparsebench.results.noise import Noise, Reliability
from sparsebench.results.provenance import devices_named
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run

VERDICT = 8  # processes that are advised for a verdict; FEWEST is the least
LEVEL = 0.9  # that the formats are compared at, or the nearest that was measured
LINES = 30  # of a table on a terminal; the report and Markdown have them all
MORE = "more lines are in the report and in --markdown"
REASONS = 12
PARTS = ["op", "pattern", "dtype"]  # a table each
CONTEST = ["problem_id", "scope", "cache"]
USUAL = {("scope", "kernel"), ("cache", "cold"), ("block", "1"), ("skew", "iid"), ("block", "")}
OUTCOMES = {"faster": "good", "slower": "bad", "inconclusive": "unsure", "no_difference": "quiet"}
GOOD, BAD = (Badge.VERDICT, Badge.LOOK), "bold red"


@dataclass(frozen=True)
class Answer:
    """What `sparsebench run` ends with, for a rich console."""

    run: Run
    found: Analysis

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield every part, top to bottom."""
        cases = by_size(self.found.cases)
        yield _title(self.run, cases, self.found)
        for about, said in answers(cases):
            yield from (Text(line, style="bold") for line in said)
            yield Text(f"({about})")
        if not (cases.status == Status.OK).any():
            yield Text("Nothing was measured.", style=BAD)
        for sheet in sheets(cases):
            yield Text()
            yield sheet.shortened(LINES, MORE)
        yield Text()
        yield from (Text(line) for line in trust(self.run, cases, self.found))


def answer_markdown(run: Run, found: Analysis) -> str:
    """Return the answer as Markdown, for pasting; with every line of every table."""
    cases = by_size(found.cases)
    marked = [text for _, text in labels(run, cases, found.noise)]
    said = ["\n".join([*said, f"({about})"]) for about, said in answers(cases)]
    parts = [f"**{_heading(run)}** ({'; '.join(marked)})", *said]
    parts += [sheet.markdown() for sheet in sheets(cases)]
    return "\n\n".join([*parts, *trust(run, cases, found)]) + "\n"


def answer_json(run: Run, found: Analysis) -> dict[str, Any]:
    """Return the answer for a script."""
    cases = by_size(found.cases)
    tables = {"winners": winners(cases), "break_even": break_even(cases)}
    said = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
    word, why = found.noise.reliability
    head: dict[str, Any] = {
        "answer": [{"where": about, "sentences": lines} for about, lines in answers(cases)],
        "badges": [text for _, text in labels(run, cases, found.noise)],
    }
    floors = {"noise_floor": found.noise.floors}
    return head | said | floors | {"reliability": word, "reliability_why": why}


def labels(run: Run, cases: pd.DataFrame, noise: Noise) -> list[tuple[Badge, str]]:
    """Return a run's badges and their texts, the gravest first."""
    found = badges(cases, noise, run.environment, run.state)
    return [(badge, badge_text(badge, cases)) for badge, _ in found]


def counted(found: Analysis) -> dict[str, int]:
    """Count the suite's cases by status; `ok` means ok in every process, scope and cache state."""
    asked = _asked(by_size(found.cases))
    return {str(status): int(count) for status, count in asked.status.value_counts().items()}


def by_size(cases: pd.DataFrame) -> pd.DataFrame:
    """Sort cases by the fields of their problems: a run takes them in a random order."""
    names = ["op", *fields(cases), "source"]
    return cases.sort_values(names, key=_sizes, kind="stable", ignore_index=True)


def sheets(cases: pd.DataFrame) -> list[Table]:
    """Return the tables of an answer."""
    found = []
    if (cases.status == Status.OK).any():
        found.append(_formats(cases))
        timed = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
        several = timed[timed.groupby(CONTEST).label.transform("nunique") > 1]
        parts = winners(several).groupby(PARTS, sort=False, dropna=False)
        found += [_fastest(part) for _, part in parts]
        even = break_even(cases[cases["format"] != "dense"])
        even = even[even.first_level < even.last_level]
        found += [] if even.empty else [_crossings(even)]
    missing = _missing(cases)
    return found + ([missing] if missing.lines else [])


def trust(run: Run, cases: pd.DataFrame, found: Analysis) -> list[str]:
    """Return sentences on how far the numbers can be trusted."""
    noise = found.noise
    busy = "; ".join(unfit(run.state))
    lines = [f"The machine was busy, so no number here is to be trusted: {busy}."] if busy else []
    lines.append(noise.sentence)
    if noise.reliability[0] is not Reliability.UNKNOWN:
        lines.append(noise.reliability[1])
    if (cases.processes < FEWEST).all():
        few = f"Fewer than {FEWEST} processes give a look, not a verdict"
        lines.append(f"{few}: --replicates {VERDICT} gives one.")
    above = len(_beyond(cases))
    if above:
        why = "more than zeros can save. There the baseline is slow, by itself or by other work"
        lines.append(f"{are(above, 'speed-up')} above 1 / (1 - sparsity), {why}.")
    for name, why in (("mark", "{} when timed"), ("marks", "{}, of their outputs")):
        marks = cases[name][cases[name].fillna("") != ""].value_counts()
        lines += [f"{are(n, 'case')} marked: {why.format(mark)}." for mark, n in marks.items()]
    return lines


def outcome(line: Mapping[Any, Any]) -> Cell:
    """Write `faster`, `no difference`, `inconclusive (+3)` for 3 more processes, or a dash."""
    more, words = line["more_processes"], line["outcome"].replace("_", " ") or "-"
    return words if pd.isna(more) else f"{words} (+{more})", OUTCOMES.get(line["outcome"], "")


def shown(name: str, value: Any) -> str:
    """Write a field: a level in per cent, a source by its file."""
    if pd.isna(value):
        return "-"
    if name == "sparsity":
        return percent(value)
    return f"{value:g}" if isinstance(value, float) else str(value).rpartition("/")[2]


def split(table: pd.DataFrame, names: list[str]) -> tuple[list[str], str]:
    """Return the fields that vary, for columns, and the constant ones as text."""
    values = {name: table[name].unique() for name in names if name in table}
    varying = [name for name, found in values.items() if len(found) > 1]
    constant = {name: found[0] for name, found in values.items() if len(found) == 1}
    said = {name: shown(name, value) for name, value in constant.items()}
    words = [value for name, value in said.items() if name in PARTS]
    words += [f"{n} {v}" for n, v in said.items() if n not in PARTS and (n, v) not in USUAL]
    return varying, ", ".join(word for word in words if not word.endswith("-"))


def _asked(cases: pd.DataFrame) -> pd.DataFrame:
    """Return each case once, with its worst status."""
    asked = cases[~cases.twin.astype(bool)]
    worst_first = asked.sort_values("status", key=lambda status: status == Status.OK)
    return worst_first.drop_duplicates("case_id")


def _sizes(column: pd.Series) -> pd.Series:
    """Return what to sort a column by: its numbers where it has any, else its text."""
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers if numbers.notna().any() else column.astype(str)


def _heading(run: Run) -> str:
    words = [devices_named(run.environment), str(run.state.get("suite", run.path.name))]
    return " · ".join([*words, str(run.suite.get("title", ""))]).rstrip(" ·")


def _title(run: Run, cases: pd.DataFrame, found: Analysis) -> Text:
    line = Text(_heading(run))
    for badge, text in labels(run, cases, found.noise):
        line.append("  ").append(f"[{text}]", style="" if badge in GOOD else BAD)
    return line


def _formats(cases: pd.DataFrame) -> Table:
    """Return each format once, at the level nearest to LEVEL, over the fastest dense contender."""
    found = with_gains(cases)
    sparse = found[found.side != "dense"]
    best = {name: _nearest(group) for name, group in sparse.groupby("kind", sort=False)}
    top = max(best.values(), key=lambda case: case["gain"], default=None)
    dense = _dense(found, top)
    lines: list[list[Cell]] = []
    for name, group in cases[~cases.twin.astype(bool)].groupby("format", sort=False):
        case, word = dense if name == "dense" else best.get(name), FORMATS.get(str(name), str(name))
        if case is None:
            reasons = group.detail[group.status != Status.OK].mode()
            why = str(reasons.iloc[0]) if len(reasons) else "no time"
            lines.append([word, "-", "", "", (f"not measured: {why}", "quiet")])
            continue
        lines.append([word, who(case), duration(case["median_us"]), _gain(case), _place(case)])
    lines.sort(key=lambda line: line[0] != "dense")
    columns: tuple[str, ...] = ("format", "fastest kernel", "time", "× dense", "where")
    title, places = "Each format at its best", {_text(line[-1]) for line in lines}
    if len(places) == 1:
        columns, lines = columns[:-1], [line[:-1] for line in lines]
        title = f"{title}: {places.pop()}"
    words = ("format", "fastest kernel", "where")
    return Table(title=title, columns=columns, lines=lines, words=words)


def _nearest(group: pd.DataFrame) -> dict[Any, Any]:
    """Return the fastest case at the level nearest to LEVEL."""
    away = (group.level - LEVEL).abs().fillna(1).round(6)
    near = group[away == away.min()].assign(haste=-group.median_us)
    return dict(near.sort_values(["gain", "haste"], na_position="first").iloc[-1])


def _dense(found: pd.DataFrame, top: Mapping[Any, Any] | None) -> dict[Any, Any] | None:
    """Return the fastest dense case of the contest of `top`; without one that of all."""
    dense = found[(found.side == "dense") & (found.gain == 1)]
    if top is not None:
        dense = dense[(dense[CONTEST] == pd.Series(top)[CONTEST]).all(axis=1)]
    return dict(dense.sort_values("median_us").iloc[0]) if len(dense) else None


def _beyond(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the sparse weights faster by more than 1 / (1 - sparsity): the baseline was slow."""
    sparse = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    dense = sparse["format"].isin({"dense", *OF_ACTIVATIONS})
    sparse = sparse[~dense & (sparse.level > 0) & (sparse.level < 1)]
    return sparse[sparse.speedup_low > 1 / (1 - sparse.level)]


def _condition(case: Mapping[Any, Any]) -> str:
    """Say how sparse a case is: `90 %, blocks of 128`; `29 of 5632 units on`."""
    block = str(case.get("block", ""))
    said = [percent(case["level"])] if case["level"] > 0 else []
    said += [f"blocks of {block}"] if block not in ("", "1", "nan") else []
    if pd.notna(case.get("active")):
        units = case["intermediate"] if pd.isna(case["n"]) else case["n"]  # of a decoding step
        said.append(f"{case['active']:g} of {units} units on")
    if pd.notna(case.get("source")):
        said.append(str(case["source"]).rpartition("/")[2])
    return ", ".join(said)


def _place(best: Mapping[Any, Any]) -> str:
    return f"{best['op']}, m = {best['m']}, {_condition(best)}".rstrip(", ")


def who(case: Mapping[Any, Any]) -> str:
    """Name what ran: of a portfolio the kernel that it chose, and by whom."""
    chosen, own = str(case["chosen"]).partition(", ")[2], kernel(case["label"])
    if not chosen or chosen.startswith(str(case["kernel"])):
        return chosen or own
    return f"{chosen} (by {case['kernel']})"


def _fastest(best: pd.DataFrame) -> Table:
    """Return the fastest case of each problem, with the interval and outcome of its speed-up."""
    varying, constant = split(best, ["op", *fields(best), "source", "scope", "cache"])
    bases = best.baseline_label.dropna().unique()
    against = f"× {kernel(bases[0])}" if len(bases) == 1 else "× baseline"
    columns = [*varying, "fastest", "time", against, "outcome", "tied with", "accuracy"]
    lines: list[list[Cell]] = [
        [
            *(shown(name, line[name]) for name in varying),
            who(line),
            duration(line["median_us"]),
            _ratio(line),
            outcome(line),
            kernel(line["runner_up"]) if line["tied"] else "",
            str(line["marks"] or ""),
        ]
        for line in best.to_dict("records")
    ]
    empty = {"outcome": "-", "tied with": "", "accuracy": ""}
    used = [n for n in columns if any(_text(x[columns.index(n)]) != empty.get(n) for x in lines)]
    kept = [[line[columns.index(name)] for name in used] for line in lines]
    interval = " and ".join(sorted({str(kind) for kind in best.interval.dropna()}))
    title = f"Fastest: {constant} ({interval})"
    words = {"fastest", "outcome", "tied with", "accuracy", "op", "pattern", "dtype", "source"}
    spare = ("tied with", "outcome")
    return Table(title=title, columns=used, lines=kept, words=words, spare=spare)


def _crossings(even: pd.DataFrame) -> Table:
    """Return from which sparsity on each format is faster, by its first contender."""
    even = even.assign(
        ran_as=[FORMATS.get(kind, kind) for kind in even["format"]],
        order=even.break_even.mask(even.note == NoCrossing.BELOW, 0.0).fillna(2.0),
    )
    names = list(even.columns)
    names = names[names.index("op") : names.index("format")]
    first = (
        even.sort_values("order", kind="stable").drop_duplicates([*names, "ran_as"]).sort_index()
    )
    varying, _ = split(first, names)
    lines = []
    for line in first.to_dict("records"):
        level = f"from {percent(round(line['break_even'], 2))}" if not line["note"] else ""
        if line["note"] == NoCrossing.BELOW:
            level = f"below {percent(line['first_level'])}"
        elif line["note"]:
            level = f"not up to {percent(line['last_level'])}"
        fields_ = [shown(name, line[name]) for name in varying]
        lines.append([*fields_, line["ran_as"], kernel(line["label"]), level])
    columns = (*varying, "format", "first contender", "faster than the baseline")
    words = ("format", "first contender", "op", "pattern", "dtype")
    return Table(title="Break-even, by sparsity", columns=columns, lines=lines, words=words)


def _missing(cases: pd.DataFrame) -> Table:
    """Return why cases have no time: what went wrong first, then what cannot run here."""
    asked = _asked(cases)
    bad = asked[asked.status != Status.OK]
    groups = bad.groupby(["status", "detail"], sort=False)
    counted = sorted(
        ((status == Status.UNSUPPORTED, -len(group), str(status), str(why), group)
         for (status, why), group in groups),
        key=lambda entry: entry[:4],
    )  # fmt: skip
    lines: list[list[Cell]] = []
    for fine, count, status, why, group in counted[:REASONS]:
        who = ", ".join(dict.fromkeys(map(kernel, group.label)))
        style = "quiet" if fine else "bad"
        lines.append([str(-count), (status.replace("_", " "), style), f"{why}: {who}"])
    if left := len(counted) - REASONS:
        lines += [[str(left), "", "more reasons: in the report"]] if left > 0 else []
    columns = ("cases", "status", "reason, and who")
    return Table(title="Not measured", columns=columns, lines=lines, words=columns[1:])


def _ratio(line: Mapping[Any, Any]) -> Cell:
    """Write a speed-up, coloured by its outcome; of a look by its interval."""
    if line["label"] == line["baseline_label"]:
        return "1", ""
    low, high = line["speedup_low"], line["speedup_high"]
    style = OUTCOMES.get(line["outcome"], "good" if low > 1 else "bad" if high < 1 else "")
    return estimate(line["speedup"], low, high, line["uncertainty"]), style


def _gain(case: Mapping[Any, Any]) -> Cell:
    """Write a gain over dense, coloured if it is decided."""
    style = ("good" if case["gain"] > 1 else "bad") if case["decided"] else "unsure"
    if case["side"] == "dense":
        return "1", ""
    return estimate(*(case[name] for name in ("gain", "low", "high", "half"))), style


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]

"""The answer of a run, for a terminal, as Markdown and as JSON.

    device, suite, badges    needed to read any number
    sentences                those of the report (results/answer.py)
    formats                  each format once, or the reason that it has no time
    fastest                  the fastest case of each problem; a table per op, pattern and dtype
    break-even               each format's, by its first contender
    not measured             every reason, with its cases
    trust                    noise floor, reliability, marks, state of the machine

Tables fit the window, but the name of a winner is never cut.
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
from sparsebench.results.formatting import (
    FORMATS,
    are,
    blocks_text,
    duration,
    estimate,
    kernel,
    percent,
)
from sparsebench.results.frame import fields
from sparsebench.results.noise import Noise, Reliability
from sparsebench.results.outcome import STYLES
from sparsebench.results.provenance import devices_named
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run

VERDICT = 8  # recommended processes for a verdict; FEWEST is the minimum
LEVEL = 0.9  # formats are compared at the measured sparsity nearest to this
LINES = 30  # lines of a table on a terminal; the report and Markdown show all
MORE = "more lines are in the report and in --markdown"
REASONS = 12  # shown at most
PARTS = ["op", "pattern", "dtype"]  # one table for each combination
CONTEST = ["problem_id", "scope", "cache"]
USUAL = {("scope", "kernel"), ("cache", "cold"), ("block", "1"), ("skew", "iid"), ("block", "")}
GOOD, BAD = (Badge.VERDICT, Badge.LOOK), "bold red"


@dataclass(frozen=True)
class Answer:
    """The answer that `sparsebench run` prints, for a rich console."""

    run: Run
    analysis: Analysis

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield every part from top to bottom."""
        cases = by_size(self.analysis.cases)
        yield _title(self.run, cases, self.analysis)
        for about, lines in answers(cases):
            yield from (Text(line, style="bold") for line in lines)
            yield Text(f"({about})")
        if not (cases.status == Status.OK).any():
            yield Text("Nothing was measured.", style=BAD)
        for table in tables(cases):
            yield Text()
            yield table.shortened(LINES, MORE)
        yield Text()
        yield from (Text(line) for line in trust(self.run, cases, self.analysis))


def answer_markdown(run: Run, analysis: Analysis) -> str:
    """Return the answer as Markdown with every line of every table."""
    cases = by_size(analysis.cases)
    badge_texts = [text for _, text in labels(run, cases, analysis.noise)]
    sentences = ["\n".join([*sentences, f"({about})"]) for about, sentences in answers(cases)]
    parts = [f"**{_heading(run)}** ({'; '.join(badge_texts)})", *sentences]
    parts += [table.markdown() for table in tables(cases)]
    return "\n\n".join([*parts, *trust(run, cases, analysis)]) + "\n"


def answer_json(run: Run, analysis: Analysis) -> dict[str, Any]:
    """Return the answer for a script."""
    cases = by_size(analysis.cases)
    tables = {"winners": winners(cases), "break_even": break_even(cases)}
    plain = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
    word, why = analysis.noise.reliability
    answer: dict[str, Any] = {
        "answer": [{"where": about, "sentences": lines} for about, lines in answers(cases)],
        "badges": [text for _, text in labels(run, cases, analysis.noise)],
    }
    floors = {"noise_floor": analysis.noise.floors}
    return answer | plain | floors | {"reliability": word, "reliability_why": why}


def labels(run: Run, cases: pd.DataFrame, noise: Noise) -> list[tuple[Badge, str]]:
    """Return a run's badges and their texts, the most severe first."""
    badges_ = badges(cases, noise, run.environment, run.state)
    return [(badge, badge_text(badge, cases)) for badge, _ in badges_]


def counted(analysis: Analysis) -> dict[str, int]:
    """Count the cases of the suite by status; `ok` means ok in all processes and measures."""
    each_once = _once(by_size(analysis.cases))
    return {str(status): int(count) for status, count in each_once.status.value_counts().items()}


def by_size(cases: pd.DataFrame) -> pd.DataFrame:
    """Sort cases by the fields of their problems, because a run takes them in random order."""
    names = ["op", *fields(cases), "source", "seed"]
    return cases.sort_values(names, key=_sizes, kind="stable", ignore_index=True)


def tables(cases: pd.DataFrame) -> list[Table]:
    """Return the tables of an answer."""
    answer_tables = []
    if (cases.status == Status.OK).any():
        answer_tables.append(_formats(cases))
        timed = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
        contested = timed[timed.groupby(CONTEST).label.transform("nunique") > 1]
        parts = winners(contested).groupby(PARTS, sort=False, dropna=False)
        answer_tables += [_fastest(part) for _, part in parts]
        even = break_even(cases[cases["format"] != "dense"])
        even = even[even.first_level < even.last_level]
        answer_tables += [] if even.empty else [_crossings(even)]
    missing = _missing(cases)
    return answer_tables + ([missing] if missing.lines else [])


def trust(run: Run, cases: pd.DataFrame, analysis: Analysis) -> list[str]:
    """Return sentences about the reliability of the numbers."""
    noise = analysis.noise
    busy = "; ".join(unfit(run.state))
    lines = [f"Do not trust these numbers, because the machine was busy: {busy}."] if busy else []
    lines.append(noise.sentence)
    if noise.reliability[0] is not Reliability.UNKNOWN:
        lines.append(noise.reliability[1])
    if (cases.processes < FEWEST).all():
        few = f"Fewer than {FEWEST} processes give a look. For a verdict"
        lines.append(f"{few}, use --replicates {VERDICT}.")
    above = len(_beyond(cases))
    if above:
        why = "more than zeros can save. There the baseline is slow or was disturbed by other work"
        lines.append(f"{are(above, 'speedup')} above 1 / (1 - sparsity), {why}.")
    if count := _with_other_levels(analysis.rows, cases):
        why = "whose weights have more zeros than the suite asks for"
        lines.append(f"{are(count, 'problem')} shown at the level of a file, {why}.")
    for name, why in (("mark", "{} during timing"), ("marks", "{} of the output")):
        marks = cases[name][cases[name].fillna("") != ""].value_counts()
        lines += [f"{are(n, 'case')} marked: {why.format(mark)}." for mark, n in marks.items()]
    return lines


def _with_other_levels(rows: pd.DataFrame, cases: pd.DataFrame) -> int:
    """Count the problems that are shown at another sparsity than they ask for."""
    if rows.empty:
        return 0
    requested = cases.problem_id.map(rows.groupby("problem_id").sparsity.first())
    other = (requested > 0) & cases.level.notna() & (cases.level != requested)
    return int(cases.problem_id[other].nunique())


def outcome(line: Mapping[Any, Any]) -> Cell:
    """Write `faster`, `equal`, `not settled (+3)` for 3 more processes, or a dash."""
    more, words = line["more_processes"], line["outcome"] or "-"
    return words if pd.isna(more) else f"{words} (+{more})", STYLES.get(line["outcome"], "")


def shown(name: str, value: Any) -> str:
    """Write a field: a sparsity as a percentage."""
    if pd.isna(value):
        return "-"
    if name == "sparsity":
        return percent(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def split(table: pd.DataFrame, names: list[str]) -> tuple[list[str], str]:
    """Return the names of the fields that vary, and the constant fields as text."""
    values = {name: table[name].unique() for name in names if name in table}
    varying = [name for name, distinct in values.items() if len(distinct) > 1]
    constant = {name: distinct[0] for name, distinct in values.items() if len(distinct) == 1}
    texts = {name: shown(name, value) for name, value in constant.items()}
    words = [value for name, value in texts.items() if name in PARTS]
    words += [f"{n} {v}" for n, v in texts.items() if n not in PARTS and (n, v) not in USUAL]
    return varying, ", ".join(word for word in words if not word.endswith("-"))


def _once(cases: pd.DataFrame) -> pd.DataFrame:
    """Return each case once with its worst status."""
    cases_of_suite = cases[~cases.twin.astype(bool)]
    worst_first = cases_of_suite.sort_values("status", key=lambda status: status == Status.OK)
    return worst_first.drop_duplicates("case_id")


def _sizes(column: pd.Series) -> pd.Series:
    """Return the sort key of a column: its numbers if it has any, else its text."""
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers if numbers.notna().any() else column.astype(str)


def _heading(run: Run) -> str:
    words = [devices_named(run.environment), str(run.state.get("suite", run.path.name))]
    return " · ".join([*words, str(run.suite.get("title", ""))]).rstrip(" ·")


def _title(run: Run, cases: pd.DataFrame, analysis: Analysis) -> Text:
    line = Text(_heading(run))
    for badge, text in labels(run, cases, analysis.noise):
        line.append("  ").append(f"[{text}]", style="" if badge in GOOD else BAD)
    return line


def _formats(cases: pd.DataFrame) -> Table:
    """Return each format at the sparsity nearest to LEVEL, over the fastest dense contender."""
    timed = with_gains(cases)
    sparse = timed[timed.side != "dense"]
    best = {name: _nearest(group) for name, group in sparse.groupby("kind", sort=False)}
    top = max(best.values(), key=lambda case: case["gain"], default=None)
    dense = _dense(timed, top)
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
    """Return the fastest case at the sparsity nearest to LEVEL."""
    away = (group.level - LEVEL).abs().fillna(1).round(6)
    near = group[away == away.min()].assign(haste=-group.median_us)
    return dict(near.sort_values(["gain", "haste"], na_position="first").iloc[-1])


def _dense(timed: pd.DataFrame, top: Mapping[Any, Any] | None) -> dict[Any, Any] | None:
    """Return the fastest dense case in the contest of `top`, or overall without one."""
    dense = timed[(timed.side == "dense") & (timed.gain == 1)]
    if top is not None:
        dense = dense[(dense[CONTEST] == pd.Series(top)[CONTEST]).all(axis=1)]
    return dict(dense.sort_values("median_us").iloc[0]) if len(dense) else None


def _beyond(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases faster by more than 1 / (1 - sparsity), whose baseline was slow."""
    sparse = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    dense = sparse["format"].isin({"dense", *OF_ACTIVATIONS})
    sparse = sparse[~dense & (sparse.level > 0) & (sparse.level < 1)]
    return sparse[sparse.speedup_low > 1 / (1 - sparse.level)]


def _condition(case: Mapping[Any, Any]) -> str:
    """Describe the sparsity of a case: `90 %, 128 × 128 blocks` or `29 of 5632 units active`."""
    block = str(case.get("block", ""))
    parts = [percent(case["level"])] if case["level"] > 0 else []
    parts += [blocks_text(block)] if block not in ("", "1", "nan") else []
    if pd.notna(case.get("active")):
        units = case["intermediate"] if pd.isna(case["n"]) else case["n"]  # decoding
        parts.append(f"{case['active']:g} of {units} units active")
    if pd.notna(case.get("source")):
        parts.append(str(case["source"]))
    return ", ".join(parts)


def _place(best: Mapping[Any, Any]) -> str:
    return f"{best['op']}, m = {best['m']}, {_condition(best)}".rstrip(", ")


def who(case: Mapping[Any, Any]) -> str:
    """Name the kernel that ran; for a portfolio the chosen kernel and the portfolio."""
    chosen, name = str(case["chosen"]).partition(", ")[2], kernel(case["label"])
    if not chosen or chosen.startswith(str(case["kernel"])):
        return chosen or name
    return f"{chosen} (by {case['kernel']})"


def _fastest(best: pd.DataFrame) -> Table:
    """Return the fastest case of each problem with the interval and outcome of its speedup."""
    names = ["op", *fields(best), "source", "seed", "scope", "cache"]
    varying, constant = split(best, [n for n in names if n != "seed" or best.seed.nunique() > 1])
    bases = best.baseline_label.dropna().unique()
    against = f"× {kernel(bases[0])}" if len(bases) == 1 else "× baseline"
    columns = [*varying, "fastest", "time", against, "outcome", "not settled against", "accuracy"]
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
    empty = {"outcome": "-", "not settled against": "", "accuracy": ""}
    used = [n for n in columns if any(_text(x[columns.index(n)]) != empty.get(n) for x in lines)]
    kept = [[line[columns.index(name)] for name in used] for line in lines]
    interval = " and ".join(sorted({str(kind) for kind in best.interval.dropna()}))
    title = f"Fastest: {constant} ({interval})"
    words = {
        "fastest",
        "outcome",
        "not settled against",
        "accuracy",
        "op",
        "pattern",
        "dtype",
        "source",
    }
    spare = ("not settled against", "outcome")
    return Table(title=title, columns=used, lines=kept, words=words, spare=spare)


def _crossings(even: pd.DataFrame) -> Table:
    """Return the sparsity at which each format overtakes the baseline, by its first contender."""
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
    """Return why cases have no time: first the failures, then the unsupported cases."""
    each_once = _once(cases)
    bad = each_once[each_once.status != Status.OK]
    groups = bad.groupby(["status", "detail"], sort=False)
    counted = sorted(
        ((status == Status.UNSUPPORTED, -len(group), str(status), str(why), group)
         for (status, why), group in groups),
        key=lambda entry: entry[:4],
    )  # fmt: skip
    lines: list[list[Cell]] = []
    for fine, count, status, why, group in counted[:REASONS]:
        kernels = ", ".join(dict.fromkeys(map(kernel, group.label)))
        style = "quiet" if fine else "bad"
        lines.append([str(-count), (status.replace("_", " "), style), f"{why}: {kernels}"])
    if left := len(counted) - REASONS:
        lines += [[str(left), "", "more reasons are in the report"]] if left > 0 else []
    columns = ("cases", "status", "reason and contenders")
    return Table(title="Not measured", columns=columns, lines=lines, words=columns[1:])


def _ratio(line: Mapping[Any, Any]) -> Cell:
    """Write a speedup, coloured by its outcome, or by its interval in a look."""
    if line["label"] == line["baseline_label"]:
        return "1", ""
    low, high = line["speedup_low"], line["speedup_high"]
    style = STYLES.get(line["outcome"], "good" if low > 1 else "bad" if high < 1 else "")
    return estimate(line["speedup"], low, high, line["uncertainty"]), style


def _gain(case: Mapping[Any, Any]) -> Cell:
    """Write a gain over dense, coloured if it is decided."""
    style = ("good" if case["gain"] > 1 else "bad") if case["decided"] else "unsure"
    if case["side"] == "dense":
        return "1", ""
    return estimate(*(case[name] for name in ("gain", "low", "high", "half"))), style


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]

"""The answer of a survey (harness/new_gpu): is sparsity worth it on this device?

    ┌ title, badges
    │ finding    Yes: BSR up to 5.1× (95 %, m = 4096), 2:4 up to 1.5×. No: CSR.
    │ grid       formats and levels × tokens: the fastest contender over the fastest dense one
    │ others     a sentence for each other device
    │ state      how much is settled, which kernels cannot run, the clock, the doctor's warnings
    └ folded     survey_page.py

The terminal prints the `Summary`, and the page begins with it.
A number from the runs of several processes (decide*) replaces that of the screening, which is a
look: one process, so the grid marks it as not settled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from sparsebench.reports.comparison_tables import BRACKETS_OF_MEANS
from sparsebench.reports.figures._figure import Frames
from sparsebench.reports.tables import Cell, Table
from sparsebench.results.badges import Badge, badges
from sparsebench.results.comparison.changes import Changes, mean
from sparsebench.results.comparison.compare import GAIN, TIME
from sparsebench.results.formatting import (
    FORMATS,
    PATTERNS,
    amount,
    brackets,
    capital,
    join_words,
    percent,
    times,
)
from sparsebench.results.run.provenance import on_gpu
from sparsebench.results.statistics.outcome import Outcome, outcome
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.contests import contests, with_gains, with_shapes
from sparsebench.results.tables.frame import HOST_LATE, records

OPS = {"linear_dgrad": "input gradient of ", "linear_wgrad": "weight gradient of "}
ROW = ["name", "level", "dtype"]
LEAST = 0.01  # uncertainty that a cell shows
OPEN = "?"  # marks a cell of the terminal that is not settled
OTHERS = 2  # sentences about other devices on the first screen
KEY = "Speedup of the best block and shape over the fastest dense contender, by tokens at once"
ABSENT = "Empty: the suite does not measure it."
DENSE = "“dense”: sparsebench chooses a dense kernel."
CAUSES = {
    "power-limited": "the power limit lowered the clock",
    "thermal": "heat lowered the clock",
    "hardware slowdown": "the hardware lowered the clock",
    HOST_LATE: "the host was late",
}


@dataclass(frozen=True)
class Summary:
    """The first screen of a survey.

    problems  a line per problem: the columns of `contests`, run, name, processes, settled, and
              interval, what its brackets hold
    badges    the class, the text and the reason of each
    """

    device: str
    badges: list[tuple[str, str, str]]
    finding: str
    problems: pd.DataFrame
    others: list[str]
    state: list[str]

    @property
    def question(self) -> str:
        return f"{self.device}: is sparsity worth it?"

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        line = Text(self.question, style="bold")
        for _, text, _ in self.badges:
            line.append(f"  [{text}]", style="")
        yield line
        yield Text(self.finding, style="bold")
        if len(self.problems):
            yield Text()
            yield grid(self.problems)
            yield Text()
        yield from (Text(sentence) for sentence in [*self.others, *self.state])


def summarise(
    device: str,
    by_run: Mapping[str, Frames],
    others: list[Changes],
    kernels: list[dict[str, Any]],
    fitness: list[dict[str, Any]],
) -> Summary:
    """Return the first screen of the runs of a survey, those of the most processes first."""
    problems, shown = _problems(by_run), others[:OTHERS]
    return Summary(
        device=device,
        badges=_badges(by_run),
        finding=_finding(problems),
        problems=problems,
        others=[*map(compare_device, shown), *([BRACKETS_OF_MEANS] if shown else ())],
        state=_state(problems, by_run, kernels, fitness),
    )


def _problems(by_run: Mapping[str, Frames]) -> pd.DataFrame:
    """Return a line per problem of the screening, from the run of the most processes."""
    parts: list[pd.DataFrame] = []
    seen: set[str] = set()
    for run, frames in by_run.items():
        cases = frames.cases[~frames.cases.problem_id.isin(seen)]
        timed = with_gains(cases)
        sparse = cases[cases["format"] != "dense"].drop_duplicates("problem_id")
        if sparse.empty:
            continue
        lines = contests(timed) if len(timed) else sparse.assign(best_gain=np.nan)
        text_without_gain = sparse[~sparse.problem_id.isin(lines.problem_id)]
        lines = pd.concat(
            [lines, text_without_gain[text_without_gain.columns.intersection(lines.columns)]]
        )
        lines = pd.concat([with_shapes(group) for _, group in lines.groupby("op", sort=False)])
        processes = cases.groupby("problem_id").processes.max()
        kinds = sparse.set_index("problem_id")["format"]
        intervals = timed.drop_duplicates("case_id").set_index("case_id").gain_interval
        parts.append(
            lines.assign(
                run=run,
                processes=lines.problem_id.map(processes),
                interval=lines.best_case_id.map(intervals),
                name=[_name(line, kinds) for line in records(lines)],
            )
        )
        seen |= set(lines.problem_id)
    if not parts:
        return pd.DataFrame()
    problems = pd.concat(parts, ignore_index=True)
    outcomes = pd.Series([_outcome(line) for line in records(problems)], problems.index)
    return problems.assign(settled=problems.best_gain.notna() & (outcomes != Outcome.NOT_SETTLED))


def _name(line: Mapping[Any, Any], kinds: "pd.Series[Any]") -> str:
    """Name what a row of the grid stores, without its level: `BSR`, `sparse activations`."""
    if pd.notna(line.get("active")):
        return "sparse activations"
    kind = str(kinds.get(line["problem_id"], "sparse"))
    return OPS.get(line["op"], "") + PATTERNS.get(line["pattern"], FORMATS.get(kind, kind))


def _outcome(line: Mapping[Any, Any]) -> Outcome:
    """Return the outcome of a problem's winner against dense; one process settles nothing."""
    if not line["processes"] >= FEWEST:
        return Outcome.NOT_SETTLED
    word = outcome(line["best_low"], line["best_high"])
    return word if line["best_decided"] or word is Outcome.EQUAL else Outcome.NOT_SETTLED


def grid_rows(problems: pd.DataFrame) -> Iterator[tuple[str, dict[Any, "pd.Series[Any]"]]]:
    """Yield each row of the grid: its title, and the best problem of each number of tokens.

    The formats with the largest gains come first, and gradients last.
    """
    groups: Any = problems.sort_values("level").groupby(ROW, sort=False, dropna=False)
    ranks = {name: rank for rank, name in enumerate(_names(problems))}
    many_dtypes, usual = problems.groupby("name").dtype.nunique() > 1, usual_dtype(problems)
    ordered = sorted(groups, key=lambda row: (ranks[row[0][0]], row[0][2]))
    for (name, level, dtype), group in ordered:
        names_dtype = many_dtypes[name] or dtype != usual
        title = f"{name}, {percent(round(level, 3))}" + (f", {dtype}" if names_dtype else "")
        best = group.sort_values(["settled", "best_gain"], na_position="first", kind="stable")
        yield title, {m: lines.iloc[-1] for m, lines in best.groupby("m")}


def usual_dtype(problems: pd.DataFrame) -> str:
    """Return the dtype of rows that name none; "" if every row must name its own."""
    by_name = problems.groupby("name").dtype.unique()
    only = {dtypes[0] for dtypes in by_name if len(dtypes) == 1}
    return str(only.pop()) if len(only) == 1 else ""


def _names(problems: pd.DataFrame) -> list[str]:
    """Return the names of the grid's rows in their order."""
    best = problems.groupby("name").agg(gain=("best_gain", "max"), op=("op", "first"))
    best = best.assign(gradient=best.op.isin(OPS)).sort_values("gain", ascending=False)
    return list(best.sort_values("gradient", kind="stable").index)


def gain_text(line: "pd.Series[Any]") -> str:
    """Write the gain of a cell, with two decimals at most."""
    return times(line.best_gain, max(line.best_half, LEAST))


def text_without_gain(line: "pd.Series[Any]") -> str:
    """Return the text of a cell without a gain: whether a dense kernel was chosen."""
    return "none" if pd.isna(line.get("dense_gain")) else "dense"


def legend(problems: pd.DataFrame, mark: str, intervals: str) -> str:
    """Explain the grid; `mark` shows that a cell is not settled, `intervals` how precise it is."""
    rows = [list(cells.values()) for _, cells in grid_rows(problems)]
    untimed_texts = [
        text_without_gain(cell) for row in rows for cell in row if pd.isna(cell.best_gain)
    ]
    usual = usual_dtype(problems)
    parts = {
        f"{KEY}.": True,
        f"Rows without a dtype are {usual}.": usual != "",
        f"{intervals}.": bool(intervals),
        f"{mark}: not settled.": (problems.best_gain.notna() & ~problems.settled).any(),
        DENSE: "dense" in untimed_texts,
        ABSENT: any(len(row) < problems.m.nunique() for row in rows),
    }
    return " ".join(text for text, applies in parts.items() if applies)


def grid(problems: pd.DataFrame) -> Table:
    """Return the grid for a terminal."""
    tokens = sorted(problems.m.unique())
    lines: list[list[Cell]] = [
        [title, *(_text(cells.get(m)) for m in tokens)] for title, cells in grid_rows(problems)
    ]
    heads = ["", *map(str, tokens)]
    title = legend(problems, OPEN, _precision(problems))
    return Table(title=title, columns=heads, lines=lines, words=[""])


def _precision(problems: pd.DataFrame) -> str:
    """Say how far the settled cells are from the ends of their intervals; "" without such a cell.

    The grid of a terminal has no room for intervals.
    """
    sure = problems[problems.settled]
    ends = pd.concat([sure.best_high / sure.best_gain, sure.best_gain / sure.best_low])
    if ends.isna().all():
        return ""
    meaning = brackets(sure.interval).removeprefix("brackets: ")
    most = f"±{100 * (ends.max() - 1):.2g}\N{NO-BREAK SPACE}%"
    return f"Intervals reach {most} at most ({meaning}); the report shows each"


def _text(line: "pd.Series[Any] | None") -> Cell:
    if line is None:
        return ""
    if pd.isna(line.best_gain):
        return text_without_gain(line), "quiet"
    text = gain_text(line)
    if not line.settled:
        return f"{text}{OPEN}", "unsure"
    return f"{text} ", "good" if line.best_gain > 1 else "bad"


def _finding(problems: pd.DataFrame) -> str:
    """Say for which formats sparsity is worth it, for which it is not, and what is open."""
    if problems.empty:
        return "Nothing was measured, so there is no answer."
    answers: dict[str, list[str]] = {"yes": [], "no": [], "open": [], "none": []}
    for name in _names(problems):
        group = problems[problems.name == name]
        timed, decided = group[group.best_gain.notna()], group[group.settled]
        gains = decided[decided.best_gain > 1].sort_values("best_gain")
        if len(gains):
            best = gains.iloc[-1]
            where = f"{percent(round(best.level, 3))} zeros, {amount(int(best.m), 'token')}"
            answers["yes"].append(f"{name} up to {gain_text(best)} ({where})")
        else:
            kind = "none" if timed.empty else "no" if len(decided) == len(timed) else "open"
            more = ""
            if kind == "open":
                best = timed.sort_values("best_gain").iloc[-1]
                more = f" (so far up to {gain_text(best)})"
            elif kind == "none":  # the format may run in another dtype, in rows of the fastest one
                more = f" in {join_words(sorted(set(group.dtype)))}"
            answers[kind].append(f"{name}{more}")
    opening = {"yes": "Yes", "no": "No", "open": "Not settled", "none": "No kernel runs here for"}
    return " ".join(
        f"{opening[kind]}{'' if kind == 'none' else ':'} {join_words(names)}."
        for kind, names in answers.items()
        if names
    )


def compare_device(there: Changes) -> str:
    """Compare another device in a sentence: first the dense times, then the gains over them."""
    name = capital(there.b.name)
    dense, gains = mean(there.cases[there.cases.is_baseline], TIME), mean(there.contenders, GAIN)
    parts = []
    if dense:
        shared = amount(dense.cases, "shared case")
        parts.append(f"takes {dense.inverse.text} of the time for the dense products ({shared})")
    if gains:
        shared = amount(gains.cases, "shared case")
        parts.append(
            f"the gains of its sparse kernels over its own dense ones are {gains.text} of those "
            f"here ({shared})"
        )
    return f"{name} {', and '.join(parts)}." if parts else f"{name}: no shared times."


def _state(
    problems: pd.DataFrame,
    by_run: Mapping[str, Frames],
    kernels: list[dict[str, Any]],
    fitness: list[dict[str, Any]],
) -> list[str]:
    """Return sentences about how much is settled, the kernels, the clock and the machine."""
    lines = []
    if len(problems):
        timed, decided = problems.best_gain.notna(), problems.settled
        once = int((timed & (problems.processes < FEWEST)).sum())
        chosen = [
            line for _, line in problems[~timed].iterrows() if text_without_gain(line) == "dense"
        ]
        counts = {
            f"of {len(problems)} settled": int(decided.sum()),
            f"measured in fewer than {FEWEST} processes": once,
            "not settled": int((timed & ~decided).sum()) - once,
            "for which sparsebench chooses a dense kernel": len(chosen),
            "without a time": int((~timed).sum()) - len(chosen),
        }
        parts = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
        lines.append(f"Problems: {parts}.")
    newer = [k for k in kernels if not k["supported"] and "compute capability" in k["reason"]]
    if newer:
        reason = pd.Series([kernel["reason"] for kernel in newer]).mode()[0]
        lines.append(
            f"{amount(len(newer), 'kernel')} cannot run on this generation of GPU ({reason}). "
            "The portable kernels took their place."
        )
    timed_cases = [
        frames.cases[frames.cases.median_us.notna() & ~frames.cases.twin.astype(bool)]
        for frames in by_run.values()
        if on_gpu(frames.run.environment)  # nothing records what slows a CPU
    ]
    if sum(map(len, timed_cases)):
        lines.append(_slowed(pd.concat([cases.mark.fillna("") for cases in timed_cases])))
    warnings = [finding for finding in fitness if finding["level"] == "warning"]
    return lines + [f"Warning: {each['check']}: {each['found']}." for each in warnings]


def _slowed(marks: "pd.Series[str]") -> str:
    """Say during how many cases the GPU was slowed or the host was late, and why that is fair."""
    counts = {words: int(marks.str.contains(mark).sum()) for mark, words in CAUSES.items()}
    causes = [f"{words} during {count}" for words, count in counts.items() if count]
    cases = amount(len(marks), "case")
    if not causes:
        return f"Nothing slowed the GPU during {cases}."
    fair = "Contenders of a problem take turns, so all of them are slowed alike"
    return f"In at least one process, {join_words(causes)} of {cases}. {fair}."


def _badges(by_run: Mapping[str, Frames]) -> list[tuple[str, str, str]]:
    """Return the badges of the run that counts: class, text and reason."""
    if not by_run:
        return [(Badge.EMPTY.name.lower(), str(Badge.EMPTY), "Nothing was measured.")]
    frames = next(iter(by_run.values()))
    return [label.parts for label in badges(frames, with_state=False)]

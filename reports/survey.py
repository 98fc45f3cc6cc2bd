"""The answer of a survey (harness/new_gpu): is sparsity worth it on this device?

    ┌ title, badges
    │ finding    Faster than dense: BSR for some problems, up to 5.1× [5.0, 5.2]. Slower: CSR.
    │ grid       formats and levels × tokens: the fastest contender over the fastest dense one
    │ others     what `compare` says of each other device
    │ state      how much is settled, which kernels cannot run, the clock, the doctor's warnings
    └ folded     survey_page.py

The terminal prints the `Summary`, and the page begins with it.
A number from the runs of several processes (decide*) replaces that of the screening, which is a
look: one process, so it settles nothing and has no interval.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from sparsebench.reports import grids
from sparsebench.reports.comparison import sentences
from sparsebench.reports.comparison_tables import BRACKETS_OF_MEANS
from sparsebench.results.badges import Badge, badges
from sparsebench.results.comparison.changes import Changes
from sparsebench.results.comparison.sides import short_name
from sparsebench.results.formatting import (
    FORMATS,
    PATTERNS,
    amount,
    join_words,
    percent,
)
from sparsebench.results.run.provenance import on_gpu
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import with_gains, with_shapes
from sparsebench.results.tables.frame import HOST_LATE, records
from sparsebench.results.tables.grid import Grid, findings, grid, outcome_of

OPS = {"linear_dgrad": "input gradient of ", "linear_wgrad": "weight gradient of "}
OTHERS = 2  # other devices on the first screen
KEY = "Speedup of the best block and shape, {}, by tokens at once"
CAUSES = {
    "power-limited": "the power limit lowered the clock",
    "thermal": "heat lowered the clock",
    "hardware slowdown": "the hardware lowered the clock",
    HOST_LATE: "the host was late",
}


@dataclass(frozen=True)
class Summary:
    """The first screen of a survey.

    key       what a cell of the grid holds, and which weights dense multiplies
    grid      formats and levels × tokens, without a row if nothing was measured
    badges    the class, the text and the reason of each
    compared  other published GPUs with the same cases, the one with most of them first
    """

    device: str
    badges: list[tuple[str, str, str]]
    finding: str
    key: str
    grid: Grid
    others: list[str]
    state: list[str]
    compared: list[str]

    def next_steps(self, path: Path) -> list[str]:
        """Return a line for each of `steps`, and a line above them."""
        lines = [f"  sparsebench {step}\n    {what}" for step, what in self.steps(path).items()]
        return ["\nWhat you can do with it:"] * bool(lines) + lines

    def steps(self, path: Path) -> dict[str, str]:
        """Return commands that take the folder of the survey; {} if it measured nothing."""
        if not self.grid.rows:
            return {}
        folder, gpu = quote(str(path)), quote(short_name(self.device))
        advise = f"advise Llama-3-8B --gpu {gpu} --batch 16 --run {folder}"
        first = self.compared[:1]
        steps = {f"compare {folder} {quote(name)}": "beside a published GPU" for name in first}
        steps |= {advise: "should I prune this model here?"}
        steps |= {f"publish {folder} --out site": "a site with every case"}
        return steps | {f"contribute {folder}": "send it: a pull request without private names"}

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
        if self.grid.rows:
            title = f"{self.key}; the report shows each interval. ?: not settled."
            yield from (Text(), grids.table(self.grid, title), Text())
        yield from (Text(sentence) for sentence in [*self.others, *self.state])


def summarise(
    device: str,
    by_run: Mapping[str, Analysis],
    others: list[Changes],
    kernels: list[dict[str, Any]],
    fitness: list[dict[str, Any]],
) -> Summary:
    """Return the first screen of the runs of a survey, those of the most processes first."""
    lines, shown = survey_lines(by_run), others[:OTHERS]
    compared = [" ".join(sentences(there)) for there in shown]
    by_format = grid(lines, "level", row="format_name")
    finding = " ".join(grids.sentences(findings(by_format)))
    return Summary(
        device=device,
        badges=_badges(by_run),
        finding=finding if len(lines) else "Nothing was measured, so there is no answer.",
        key=KEY.format(grids.against(lines)) if len(lines) else "",
        grid=survey_grid(lines),
        others=[*compared, *([BRACKETS_OF_MEANS] if shown else ())],
        state=_state(lines, by_run, kernels, fitness),
        compared=[short_name(each.b.device) for each in others if each.b.device != device],
    )


LINE = ["problem_id", "op", "m", "dtype", "level", "side", "gain", "low", "high", "decided"]
LINE += ["median_us", "place", "of_units", "run", "format_name", "row"]


def survey_lines(by_run: Mapping[str, Analysis]) -> pd.DataFrame:
    """Return the sparse cases with a time, each problem from the run of the most processes.

    format_name  what a case stores, without its level: `BSR`, `sparse activations`
    row          the same with the level and the dtype
    """
    parts = [pd.DataFrame(columns=LINE)]
    seen: set[str] = set()
    for run, analysis in by_run.items():
        timed = with_gains(analysis.cases[~analysis.cases.problem_id.isin(seen)])
        seen |= set(analysis.cases.problem_id)
        if len(timed):
            shaped = [with_shapes(of_op) for _, of_op in timed.groupby("op", sort=False)]
            parts.append(pd.concat(shaped).assign(run=run))
    lines = pd.concat(parts[1:] or parts, ignore_index=True)
    lines = lines[lines.side != "dense"]
    if lines.empty:
        return lines
    names = [_name(line) for line in records(lines)]
    levels = lines.level.map(lambda level: percent(round(level, 3)))
    lines = lines.assign(format_name=names)
    lines = lines.assign(row=lines.format_name + ", " + levels + ", " + lines["dtype"])
    lines.loc[lines.processes < FEWEST, ["low", "high", "decided"]] = np.nan, np.nan, False
    return lines


def _name(line: Mapping[Any, Any]) -> str:
    if pd.notna(line.get("active")):
        return "sparse activations"
    kind = FORMATS.get(line["kind"], str(line["kind"]))
    return OPS.get(line["op"], "") + PATTERNS.get(line["pattern"], kind)


def survey_grid(lines: pd.DataFrame) -> Grid:
    """Return the best case by row and tokens, settled ones first."""
    is_settled = [outcome_of(line) in SETTLED for line in records(lines)]
    best = lines.assign(is_settled=is_settled)
    best = best.sort_values(["is_settled", "gain"], na_position="first")
    best = best.drop_duplicates(["row", "m"], keep="last")
    return grid(best, "m")


SETTLED = (Outcome.FASTER, Outcome.SLOWER, Outcome.EQUAL)


def _state(
    lines: pd.DataFrame,
    by_run: Mapping[str, Analysis],
    kernels: list[dict[str, Any]],
    fitness: list[dict[str, Any]],
) -> list[str]:
    """Return sentences about how much is settled, the kernels, the clock and the machine."""
    texts = []
    every = [analysis.cases[analysis.cases["format"] != "dense"] for analysis in by_run.values()]
    if every:
        sparse = pd.concat(every).drop_duplicates("problem_id").problem_id
        outcomes = lines.problem_id[[outcome_of(line) in SETTLED for line in records(lines)]]
        untimed = len({*sparse} - {*lines.problem_id})
        texts.append(
            f"{outcomes.nunique()} of {amount(len(sparse), 'problem')} are settled"
            f"{f', and {untimed} have no time' if untimed else ''}."
        )
    newer = [k for k in kernels if not k["supported"] and "compute capability" in k["reason"]]
    if newer:
        reason = pd.Series([kernel["reason"] for kernel in newer]).mode()[0]
        texts.append(
            f"{amount(len(newer), 'kernel')} cannot run on this generation of GPU ({reason}). "
            "The portable kernels took their place."
        )
    timed_cases = [
        analysis.cases[analysis.cases.median_us.notna() & ~analysis.cases.twin.astype(bool)]
        for analysis in by_run.values()
        if on_gpu(analysis.run.environment)  # nothing records what slows a CPU
    ]
    if sum(map(len, timed_cases)):
        texts.append(_slowed(pd.concat([cases.mark.fillna("") for cases in timed_cases])))
    warnings = [finding for finding in fitness if finding["level"] == "warning"]
    return texts + [f"Warning: {each['check']}: {each['found']}." for each in warnings]


def _slowed(marks: "pd.Series[str]") -> str:
    """Say during how many cases the GPU was slowed or the host was late, and why that is fair."""
    counts = {words: int(marks.str.contains(mark).sum()) for mark, words in CAUSES.items()}
    causes = [f"{words} during {count}" for words, count in counts.items() if count]
    cases = amount(len(marks), "case")
    if not causes:
        return f"Nothing slowed the GPU during {cases}."
    fair = "Contenders of a problem take turns, so all of them are slowed alike"
    return f"In at least one process, {join_words(causes)} of {cases}. {fair}."


def _badges(by_run: Mapping[str, Analysis]) -> list[tuple[str, str, str]]:
    """Return the badges of the run that counts: class, text and reason."""
    if not by_run:
        return [(Badge.EMPTY.name.lower(), str(Badge.EMPTY), "Nothing was measured.")]
    analysis = next(iter(by_run.values()))
    ended = Badge.UNFINISHED  # a run of a survey ends with the budget
    return [label.parts for label in badges(analysis) if label.badge is not ended]

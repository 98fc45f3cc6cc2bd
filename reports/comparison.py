"""Show sides of a comparison beside each other: in the terminal, as Markdown and as a page.

    workloads   two kinds of GPU: times and gains of decoding, prefill, ... (workloads.py)
    sentences   how often each side takes less time, gains more, and what the changes come from
    grid        two kinds of GPU: what each format gains over dense on both
    cases       every case, the largest settled difference first
    notes       what else differs, what the brackets hold, and every run

All three show the same findings, tables and notes. The terminal shows the LINES largest
differences, and Markdown folds the cases away.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from sparsebench._gpus import names_device
from sparsebench.errors import ResultError
from sparsebench.reports.cells import numbers
from sparsebench.reports.comparison_tables import EVERY, cases, grid, intervals, problems
from sparsebench.reports.page import render
from sparsebench.reports.site.cards import run_lines
from sparsebench.reports.tables import Table, escape_markdown
from sparsebench.reports.workloads import TwoGpus, of_cells, two_gpus
from sparsebench.results.badges import badges
from sparsebench.results.comparison.changes import Changes, changes, mean
from sparsebench.results.comparison.compare import GAIN, TIME
from sparsebench.results.comparison.sides import Side, short_card
from sparsebench.results.formatting import amount, are, join_words, significant
from sparsebench.results.record import Status
from sparsebench.results.run.provenance import choices_of, flat, on_gpu
from sparsebench.results.statistics.outcome import DIFFERENT, Outcome
from sparsebench.results.tables.analysis import Analysis

LINES = 30
FACTS_SHOWN = 8
FACTS = {"code_sha256": "hash of the code", "gpu.driver": "driver"}  # names for readers


def gpus(sides: Sequence[Side]) -> list[TwoGpus]:
    """Return every side against the first by workload, if they ran on another kind of GPU."""
    first, *others = sides
    others = [side for side in others if side.device != first.device]
    if not others:
        return []
    parts = [
        run_lines(run, str(run.run.path), side.name)
        for side in (first, *others)
        for run in side.analyses
        if len(run.timed)
    ]
    lines = pd.concat(parts, ignore_index=True)
    return [two_gpus(lines, first.name, side.name) for side in others]


def published_gpus(names: Sequence[str]) -> list[TwoGpus]:
    """Return the same of the published cells, if each name is that of another published GPU."""
    table = numbers()
    matches = [[gpu for gpu in table.gpu.unique() if names_device(name, gpu)] for name in names]
    by_gpu = {gpus[0]: name for gpus, name in zip(matches, names, strict=True) if len(gpus) == 1}
    if len(by_gpu) < len(names) or any(Path(name).is_dir() for name in names):
        return []
    table = table.assign(gpu=table.gpu.map(by_gpu))
    return [of_cells(table, names[0], other) for other in names[1:]]


@dataclass(frozen=True)
class ComparisonReport:
    """The sides, and the changes of every side but the first against the first."""

    sides: Sequence[Side]
    others: Sequence[Changes]

    @property
    def findings(self) -> list[str]:
        """Return the sentences of the result, those about each other side in turn."""
        return [text for other in self.others for text in sentences(other)]

    @property
    def tables(self) -> list[Table]:
        grids = [grid(other) for other in self.others if not other.same_device]
        return [*grids, cases(self.others)]

    @property
    def notes(self) -> list[str]:
        """Return what else differs, what the brackets hold, and a line for each run."""
        shared = problems(self.others)
        return [
            *([f"Shared by all problems of an op: {shared}."] if shared else []),
            *intervals(self.others),
            *(note for other in self.others for note in _differences(other)),
            f"results/statistics/outcome.py defines {join_words([*Outcome])}.",
            *(f"{side.name}: {_about(each)}." for side in self.sides for each in side.analyses),
        ]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield from (Text(text, style="bold") for text in self.findings)
        for table in self.tables:
            yield Text()
            yield table.shortened(LINES, "more in --html and --markdown")
        yield Text()
        yield from map(Text, self.notes)


def compare_sides(sides: Sequence[Side]) -> ComparisonReport:
    """Compare every side with the first; raises ResultError if two share no case with a time."""
    others = [changes(sides[0], side) for side in sides[1:]]
    for other in others:
        if other.contenders.empty:
            expected = "expected a shared case with a time that is not a baseline"
            raise ResultError(f"{other.a.paths} and {other.b.paths}: {expected}, found none")
    return ComparisonReport(sides, others)


def markdown(result: ComparisonReport) -> str:
    """Return the comparison for a pull request, with all cases folded away."""
    *grids, every = (table.markdown() for table in result.tables)
    fold = f"<details><summary>{EVERY}</summary>\n\n{every}\n\n</details>"
    texts = [f"**{text}**" for text in map(escape_markdown, result.findings)]
    return "\n\n".join([*texts, *grids, fold, *map(escape_markdown, result.notes)]) + "\n"


def html(result: ComparisonReport, site: Any = None, root: str = "") -> str:
    """Return the comparison as one page that opens offline.

    On a page of a site (reports/site/pages.py), `root` is the path from it to the first page.
    """
    links = [
        (f"{side.name}: {run.path.name}", f"{root}{run.path.as_posix()}/index.html")
        for side in result.sides
        for run in side.runs
    ]
    return render(
        "comparison.html",
        title=f"{join_words([side.name for side in result.sides])} compared",
        result=result,
        site=site,
        root=root,
        runs=links if site else [],
    )


def to_json(result: ComparisonReport) -> dict[str, Any]:
    """Return everything for a script."""
    dropped = [f"{name}_{end}" for name in ("times", "codes", "cards") for end in "ab"]
    return {
        "runs": {side.name: [str(run.path) for run in side.runs] for side in result.sides},
        "changes": {
            other.b.name: {
                **other.counts,
                "same_device": other.same_device,
                **{
                    name: asdict(average) if (average := mean(lines, of)) else None
                    for name, lines, of in (
                        ("geometric_mean", other.contenders, GAIN),
                        ("times_mean", other.contenders, TIME),
                        ("baselines_mean", other.baselines, TIME),
                    )
                },
                "cases": json.loads(other.cases.drop(columns=dropped).to_json(orient="records")),
            }
            for other in result.others
        },
    }


def reproduction(changes: Changes) -> dict[str, Any]:
    """Say whether the second run reproduces the first, and where; see changes.py.

    Raises ResultError if there is no cell to repeat.
    """
    cells, changed_cells, (run,) = changes.repeated, changes.unrepeated, changes.b.runs
    if cells.empty:
        expected = "expected a case with a speedup in one run that both support"
        raise ResultError(f"{changes.a.paths} and {changes.b.paths}: {expected}, found none")
    same_cards = (cells.cards_a == cells.cards_b).all() and on_gpu(run.environment)
    place = "the same machine" if same_cards else "the same kind of device"
    place = place if changes.same_device else "another device"
    word = "Not reproduced" if len(changed_cells) else "Reproduced"
    if changes.looks == len(cells):
        word = f"A look, {'not consistent' if len(changed_cells) else 'consistent'}"
    unchanged = len(cells) - len(changed_cells)
    return {
        "reproduced": changed_cells.empty,
        "place": place,
        "cells": len(cells),
        "unchanged": unchanged,
        "looks": changes.looks,
        "choices": str(choices_of(run.state)),
        "sentence": f"{word}: {unchanged} of {amount(len(cells), 'speedup')} have no settled "
        f"change, on {place}. {choices_of(run.state).sentence}",
    }


def sentences(other: Changes) -> list[str]:
    """Write the result against the first side, in up to three sentences."""
    a, b, counts = other.a.name, other.b.name, other.counts
    of_cases = amount(len(other.contenders), "case")
    first = f"Baselines aside, {b} is faster than {a} in {counts.get('faster', 0)} of {of_cases}"
    first += f" and slower in {counts.get('slower', 0)}"
    rest = [f"{are(counts[w], 'case')} {w}" for w in ("equal", "not settled", "not measured")
            if counts.get(w)]  # fmt: skip
    texts = ["; ".join([first, *rest]) + "."]
    more, less = ((other.contenders.gain == word).sum() for word in DIFFERENT)
    if more + less and (gains := mean(other.contenders, GAIN)):
        texts.append(
            f"The speedup of {b} over its own baseline is larger than that of {a} in "
            f"{amount(int(more), 'case')} and smaller in {less}; it is {gains.text} of that of {a} "
            f"(geometric mean over "
            f"{amount(gains.cases, 'case')})."
        )
    causes = other.contenders.cause[other.contenders.cause != ""].value_counts()
    if len(causes):
        where = join_words([f"{cause} in {amount(n, 'case')}" for cause, n in causes.items()])
        texts.append(f"The changes come from {where}.")
    elif other.same_device and len(times := other.contenders.time.dropna()):
        most = 100 * np.abs(np.log(times)).max()
        texts.append(f"No change is settled; times differ by at most {significant(most, 2)} %.")
    return texts


def _differences(other: Changes) -> list[str]:
    """Say what only one side has, and what else differs between both."""
    names = other.a.name, other.b.name
    pairs = zip(names, other.missing, reversed(names), strict=True)
    notes = [f"{has} has {amount(n, 'case')} that {lacks} lacks." for has, n, lacks in pairs if n]
    facts = [
        f"{FACTS.get(name, name.removeprefix('switches.'))} ({a[:12]} and {b[:12]})"
        for name, a, b in other.differences
    ]
    if facts:
        more = [f"{len(facts) - FACTS_SHOWN} more"] * (len(facts) > FACTS_SHOWN)
        listed = join_words([*facts[:FACTS_SHOWN], *more])
        notes.append(f"{join_words([*names])} differ in {listed}.")
    return notes


def _about(analysis: Analysis) -> str:
    """Describe a run: its path, device, card, commit, date and badges."""
    run = analysis.run
    facts = flat(run.environment)
    cards = sorted({short_card(row.device) for row in run.rows if row.device.startswith("GPU-")})
    words = [str(run.path), facts.get("gpu.name") or facts.get("cpu.name") or ""]
    words += [f"card {join_words(cards)}"] if cards else []
    words += [f"commit {facts['commit'][:7]}"] if "commit" in facts else []
    words += [str(run.state.get("started", ""))[:10]]
    words += [label.text for label in badges(analysis)]
    timed = analysis.cases[~analysis.cases.twin.astype(bool) & (analysis.cases.status == Status.OK)]
    limited = int(timed.mark.str.contains("power-limited").sum())
    if limited:
        words.append(f"{limited} of {amount(len(timed), 'case')} power-limited in some process")
    return ", ".join(filter(None, words))

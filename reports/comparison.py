"""Compare runs: a summary, then every case, the largest change first.

    A, B, C ...   the runs; each is compared with A
    warning       comes first if a run is simulated
    summary       the number of faster, slower and equal cases; geometric mean; other differences
    table         speedups over the local baseline, their ratio, parts of the local bound, times

A terminal shows the LINES largest changes, Markdown folds all cases away, and HTML shows them all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from sparsebench.errors import ResultError
from sparsebench.reports.page import render
from sparsebench.reports.tables import Cell, Table
from sparsebench.reports.terminal import PARTS, USUAL, labels, shown, split
from sparsebench.results.analysis import analyse
from sparsebench.results.changes import Change, Changes, changes
from sparsebench.results.comparison import KEYS, Comparison
from sparsebench.results.formatting import (
    duration,
    estimate,
    kernel,
    listed,
    percent,
    rounded,
    significant,
)
from sparsebench.results.provenance import device_name, flat
from sparsebench.results.store import Run

LINES = 30
FACTS_SHOWN = 8
ADDED = ("× baseline {}", "{} / A", "{} is", "of bound A, {}", "time A, {}", "why {}")
WORDS = ("{} is", "why {}")
SPARE = ("time A, {}", "of bound A, {}", "× baseline {}", "why {}")  # dropped in this order
STYLES = {
    Change.BROKEN: "bad",
    Change.SLOWER: "bad",
    Change.FASTER: "good",
    Change.UNCLEAR: "unsure",
}
STYLES |= {Change.EQUAL: "quiet", Change.GONE: "unsure", Change.NEW: "good"}
RANKS = {Change.EQUAL: 0, Change.UNCLEAR: 1, Change.NEW: 2, Change.GONE: 2}
RANKS |= {Change.FASTER: 3, Change.SLOWER: 3, Change.BROKEN: 4}


@dataclass(frozen=True)
class Compared:
    """Runs by their letters; `others` holds the changes of every run except the first."""

    runs: Mapping[str, Run]
    others: Mapping[str, Changes]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the runs, the summary and the largest changes."""
        yield from (Text(line) for line in runs(self))
        yield Text()
        warned = warning(self)
        yield from (Text(line, style="red") for line in warned)
        yield from (Text(line, style="" if warned else "bold") for line in sentences(self))
        yield summary(self)
        yield from (Text(line) for line in notes(self))
        yield Text()
        yield table(self).shortened(LINES, "smaller changes are in --html and --markdown")


def compared(given: Sequence[Run]) -> Compared:
    """Compare every run with the first; ResultError if two runs share no case."""
    if not 2 <= len(given) <= len(ascii_uppercase):
        raise ResultError(f"compare: expected 2 to 26 runs, found {len(given)}")
    named = dict(zip(ascii_uppercase, given, strict=False))
    others = {name: changes(given[0], named[name]) for name in [*named][1:]}
    for name, change in others.items():
        if not change.counts:
            expected = "expected a shared case with a time that is not a baseline"
            raise ResultError(f"{given[0].path} and {named[name].path}: {expected}, found none")
    return Compared(named, others)


def runs(result: Compared) -> list[str]:
    """Return a line per run: its letter, path, device, commit and badges."""
    return [f"{name}: {_about(run)}" for name, run in result.runs.items()]


def warning(result: Compared) -> list[str]:
    """Return the sentence that precedes all results if runs are simulated."""
    simulated = [name for name, run in result.runs.items() if "sim" in run.environment]
    if not simulated:
        return []
    verb = "is" if len(simulated) == 1 else "are"
    sentence = f"{listed(simulated)} {verb} simulated: a model computed these times, not a GPU."
    if len(simulated) < len(result.runs):
        sentence += " Differences from a measured run say nothing about a GPU."
    return [sentence]


def sentences(result: Compared) -> list[str]:
    """Return the result, one sentence per run."""
    return [f"{name} against A, {change.sentence}." for name, change in result.others.items()]


def summary(result: Compared) -> Table:
    """Return a line for each run except the first."""
    words = [w for w in Change if w and any(str(w) in c.counts for c in result.others.values())]
    lines: list[list[Cell]] = []
    for name, change in result.others.items():
        counted: list[Cell] = [
            (
                str(change.counts.get(str(word), 0)),
                STYLES[word] if str(word) in change.counts else "",
            )
            for word in words
        ]
        base = change.baseline_mean
        only = f"{len(change.comparison.only_a)} | {len(change.comparison.only_b)}"
        mean, base_mean = significant(change.mean, 4), significant(base, 4)
        lines.append(
            [f"{name} / A", str(sum(change.counts.values())), *counted, mean, base_mean, only]
        )
    means = ("geometric mean", "baselines, by time", "only in one")
    columns = ("", "cases", *map(str, words), *means)
    return Table(columns=columns, lines=lines, words=("",), spare=("only in one",))


def notes(result: Compared) -> list[str]:
    """Return the caveats of the table."""
    badges = {name: _badges(run) for name, run in result.runs.items()}
    notes = []
    looks = [name for name, texts in badges.items() if any(t.startswith("LOOK") for t in texts)]
    if looks:
        notes.append(
            f"{listed(looks)} {'is a look' if len(looks) == 1 else 'are looks'}, not a verdict. "
            "Ranges are compared, and a single slow process widens a range."
        )
    for name, change in result.others.items():
        if not change.same_device:
            devices = f"{change.comparison.name_a} and {change.comparison.name_b}"
            notes.append(
                f"{name} / A compares two devices, {devices}: it is a ratio of speedups over each "
                "device's own baseline. Times are not compared."
            )
        if change.differences:
            facts = ", ".join(
                f"{n} {a[:12]} > {b[:12]}" for n, a, b in change.differences[:FACTS_SHOWN]
            )
            more = len(change.differences) - FACTS_SHOWN
            rest = f", and {more} more" if more > 0 else ""
            notes.append(f"A and {name} differ in {facts}{rest}.")
    return notes


def table(result: Compared, folded: bool = False) -> Table:
    """Return all cases: first the broken ones, then the others by the size of their change.

    `folded` puts the fields of the problem into one column, for a page.
    """
    ordered = sorted(_joined(result), key=lambda case: -max(map(_size, case.values())))
    first = [next(iter(case.values())) for case in ordered]
    frame = pd.DataFrame(first)
    names = [n for n in ["op", *_fields(frame), "scope", "cache"] if n in frame]
    varying, constant = split(frame, names)
    columns = [*(["problem"] if folded else varying), "contender", "× baseline A"]
    cells: list[list[Cell]] = []
    for case, line in zip(ordered, first, strict=True):
        base = " (baseline)" if line["is_baseline"] else ""
        line_: list[Cell] = [shown(name, line[name]) for name in varying]
        line_ = [_problem(varying, line)] if folded else line_
        line_ += [kernel(line["label"]) + base, rounded(line["speedup_a"], line["uncertainty_a"])]
        for name in result.others:
            line_ += _of(case[name]) if name in case else [""] * len(ADDED)
        cells.append(line_)
    others = [*result.others]
    columns += [text.format(name) for name in others for text in ADDED]
    words = {"problem", "contender", "op", "pattern", "dtype"}
    words |= {text.format(name) for name in others for text in ADDED if text in WORDS}
    spare = [text.format(name) for text in SPARE for name in others]
    title = ": ".join(filter(None, ["Largest changes first", constant]))
    spare += ["× baseline A", *(f"{name} is" for name in others)]  # the ratio has a colour too
    return Table(title=title, columns=columns, lines=cells, words=words, spare=spare)


def markdown(result: Compared) -> str:
    """Return the comparison for a pull request: the summary and all cases folded away."""
    head = [f"- {line}" for line in runs(result)]
    parts = [
        *warning(result),
        "\n".join(sentences(result)),
        "\n".join(head),
        summary(result).markdown(),
        *notes(result),
    ]
    whole = table(result).markdown()
    parts.append(f"<details><summary>Every case</summary>\n\n{whole}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def html(result: Compared, root: str = "") -> str:
    """Return the comparison as one page that opens offline.

    In a site, `root` is the path from the page to the folder that contains the runs.
    """
    return render(
        "comparison.html",
        title=f"{len(result.runs)} runs compared",
        warning=warning(result),
        sentences=sentences(result),
        root=root,
        runs=[
            (line, f"{root}{run.path.as_posix()}/index.html" if root else "")
            for line, run in zip(runs(result), result.runs.values(), strict=True)
        ],
        summary=summary(result).html(),
        notes=notes(result),
        table=table(result, folded=True).html(),
    )


def disagreements(result: Comparison) -> Table:
    """Return the cells in which two runs disagree, with the speedup in each run."""
    apart = result.cases[result.cases.agree.eq(False).fillna(False)]
    names = [n for n in ["op", *_fields(result.cases), "scope", "cache"] if n in apart]
    varying, constant = split(apart, names)
    lines = [
        [
            *(shown(name, line[name]) for name in varying),
            kernel(line["label"]),
            *(_side(line, side) for side in ("a", "b")),
        ]
        for line in apart.to_dict("records")
    ]
    columns = (*varying, "contender", "× baseline there", "× baseline here")
    title = f"Cells that disagree: {constant}" if lines else "All cells agree"
    words = ("contender", "× baseline there", "× baseline here", "op")
    return Table(title=title, columns=columns if lines else (), lines=lines, words=words)


def to_json(result: Compared) -> dict[str, Any]:
    """Return everything for a script."""
    return {
        "runs": {name: str(run.path) for name, run in result.runs.items()},
        "changes": {
            name: {
                **change.counts,
                "geometric_mean": None if np.isnan(change.mean) else change.mean,
                "same_device": change.same_device,
                "baselines_mean": None if np.isnan(change.baseline_mean) else change.baseline_mean,
                "cases": json.loads(change.cases.to_json(orient="records")),
            }
            for name, change in result.others.items()
        },
    }


def _problem(names: Sequence[str], line: Mapping[Any, Any]) -> str:
    """Write the fields of a problem that vary: `linear, bf16, two_four, 50 %, m 16, n 4096`."""
    values = [(name, shown(name, line[name])) for name in names]
    values = [pair for pair in values if pair[1] != "-" and pair not in USUAL]
    plain = (*PARTS, "sparsity")
    first = [value for name, value in values if name in plain]
    return ", ".join([*first, *(f"{name} {value}" for name, value in values if name not in plain)])


def _about(run: Run) -> str:
    facts = flat(run.environment)
    commit = f"commit {facts['commit'][:7]}" if "commit" in facts else ""
    words = [str(run.path), device_name(run.environment), commit]
    return ", ".join(filter(None, [*words, *_badges(run)]))


def _badges(run: Run) -> list[str]:
    analysis = analyse(run)
    return [text for _, text in labels(run, analysis.cases, analysis.noise)]


def _joined(result: Compared) -> list[dict[str, dict[Any, Any]]]:
    """Return each case with a change: its lines by the letter of the run."""
    cases: dict[tuple[Any, ...], dict[str, dict[Any, Any]]] = {}
    for name, change in result.others.items():
        for line in change.cases.to_dict("records"):
            if line["word"]:
                cases.setdefault(tuple(line[key] for key in KEYS), {})[name] = line
    return list(cases.values())


def _fields(cases: pd.DataFrame) -> list[str]:
    """Return the names of the problems' fields in the cases of a comparison."""
    names = list(cases.columns)
    return names[names.index("op") + 1 : names.index("level")]


def _size(line: Mapping[Any, Any]) -> float:
    """Return the sort key of a change: broken, then decided, then undecided, each by size."""
    size = 0.0 if np.isnan(line["ratio"]) else abs(float(np.log(line["ratio"])))
    return 1e3 * RANKS[line["word"]] + size


def _of(line: Mapping[Any, Any]) -> list[Cell]:
    word = line["word"]
    bounds = [percent(round(line[f"of_bound_{s}"], 2)) for s in "ab" if line[f"of_bound_{s}"] > 0]
    times = [duration(line[f"median_us_{side}"]) for side in ("a", "b")]
    ratio = estimate(line["ratio"], line["low"], line["high"], line["uncertainty"])
    return [
        rounded(line["speedup_b"], line["uncertainty_b"]),
        (ratio, STYLES.get(word, "")),
        (str(word), STYLES.get(word, "")),
        ", ".join(bounds) or "-",
        ", ".join(times),
        line["why"],
    ]


def _side(line: Mapping[Any, Any], side: str) -> str:
    names = "speedup", "speedup_low", "speedup_high", "uncertainty"
    ends = [line[f"{name}_{side}"] for name in names]
    outcome = line[f"outcome_{side}"].replace("_", " ")
    if pd.isna(ends[0]):
        return f"{line[f'status_{side}']}: {line[f'detail_{side}']}"
    return f"{estimate(*ends)} {outcome}".rstrip()

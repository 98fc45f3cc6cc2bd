"""Runs compared: a summary first, then every case, the largest change first.

    A, B, C ...   the runs; each is held against A
    warning       first of all, where one of them is simulated
    summary       how many cases are faster, slower, equal; geometric mean; what else differs
    table         speed-ups over the local baseline, their ratio, parts of the local bound, times

A terminal shows the LINES largest changes, Markdown folds all cases away, HTML has them all.
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
SPARE = ("time A, {}", "of bound A, {}", "× baseline {}", "why {}")  # the first goes first
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
    """Runs by their letters; `others` are the changes of every run but the first."""

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
    """Hold every run against the first; ResultError where two have nothing in common."""
    if not 2 <= len(given) <= len(ascii_uppercase):
        raise ResultError(f"compare: expected 2 to 26 runs, found {len(given)}")
    named = dict(zip(ascii_uppercase, given, strict=False))
    others = {name: changes(given[0], named[name]) for name in [*named][1:]}
    for name, own in others.items():
        if not own.counts:
            expected = "expected a case in common that is no baseline and has a time"
            raise ResultError(f"{given[0].path} and {named[name].path}: {expected}, found none")
    return Compared(named, others)


def runs(found: Compared) -> list[str]:
    """Return a line a run: its letter, path, device, commit and badges."""
    return [f"{name}: {_about(run)}" for name, run in found.runs.items()]


def warning(found: Compared) -> list[str]:
    """Return what comes before any result where runs are simulated; else nothing."""
    simulated = [name for name, run in found.runs.items() if "sim" in run.environment]
    if not simulated:
        return []
    verb = "is" if len(simulated) == 1 else "are"
    said = f"{listed(simulated)} {verb} simulated: no GPU ran, a model of one made these times."
    if len(simulated) < len(found.runs):
        said += " What differs from a real run says nothing of a GPU."
    return [said]


def sentences(found: Compared) -> list[str]:
    """Return the result in a sentence a run."""
    return [f"{name} against A, {own.sentence}." for name, own in found.others.items()]


def summary(found: Compared) -> Table:
    """Return a line for each run but the first."""
    words = [w for w in Change if w and any(str(w) in c.counts for c in found.others.values())]
    lines: list[list[Cell]] = []
    for name, own in found.others.items():
        counted: list[Cell] = [
            (str(own.counts.get(str(word), 0)), STYLES[word] if str(word) in own.counts else "")
            for word in words
        ]
        base = own.baseline_mean
        only = f"{len(own.comparison.only_a)} | {len(own.comparison.only_b)}"
        mean, base_mean = significant(own.mean, 4), significant(base, 4)
        lines.append(
            [f"{name} / A", str(sum(own.counts.values())), *counted, mean, base_mean, only]
        )
    means = ("geometric mean", "baselines, by time", "only in one")
    columns = ("", "cases", *map(str, words), *means)
    return Table(columns=columns, lines=lines, words=("",), spare=("only in one",))


def notes(found: Compared) -> list[str]:
    """Return what a reader must know to believe the table."""
    told = {name: _badges(run) for name, run in found.runs.items()}
    said = []
    looks = [name for name, words in told.items() if any(word.startswith("LOOK") for word in words)]
    if looks:
        said.append(
            f"{', '.join(looks)}: a look, no verdict. Ranges are compared, and an unlucky process "
            "moves them."
        )
    for name, own in found.others.items():
        if not own.same_device:
            devices = f"{own.comparison.name_a} and {own.comparison.name_b}"
            said.append(
                f"{name} / A is between devices, {devices}: ratios are of speed-ups over each "
                "device's own baseline; times are not compared."
            )
        if own.differences:
            facts = ", ".join(
                f"{n} {a[:12]} > {b[:12]}" for n, a, b in own.differences[:FACTS_SHOWN]
            )
            more = len(own.differences) - FACTS_SHOWN
            rest = f", and {more} more" if more > 0 else ""
            said.append(f"Differs between A and {name}: {facts}{rest}.")
    return said


def table(found: Compared, folded: bool = False) -> Table:
    """Return all cases, the largest change first; broken ones before all others.

    `folded`: what varies of the problems is one column, for a page.
    """
    ordered = sorted(_joined(found), key=lambda case: -max(map(_size, case.values())))
    first = [next(iter(case.values())) for case in ordered]
    every = pd.DataFrame(first)
    names = [n for n in ["op", *_fields(every), "scope", "cache"] if n in every]
    varying, constant = split(every, names)
    columns = [*(["problem"] if folded else varying), "contender", "× baseline A"]
    cells: list[list[Cell]] = []
    for case, line in zip(ordered, first, strict=True):
        base = " (baseline)" if line["is_baseline"] else ""
        own: list[Cell] = [shown(name, line[name]) for name in varying]
        own = [_problem(varying, line)] if folded else own
        own += [kernel(line["label"]) + base, rounded(line["speedup_a"], line["uncertainty_a"])]
        for name in found.others:
            own += _of(case[name]) if name in case else [""] * len(ADDED)
        cells.append(own)
    others = [*found.others]
    columns += [text.format(name) for name in others for text in ADDED]
    words = {"problem", "contender", "op", "pattern", "dtype"}
    words |= {text.format(name) for name in others for text in ADDED if text in WORDS}
    spare = [text.format(name) for text in SPARE for name in others]
    title = ": ".join(filter(None, ["Largest changes first", constant]))
    spare += ["× baseline A", *(f"{name} is" for name in others)]  # a ratio also has a colour
    return Table(title=title, columns=columns, lines=cells, words=words, spare=spare)


def markdown(found: Compared) -> str:
    """Return the comparison for a pull request: the summary, and all cases folded away."""
    head = [f"- {line}" for line in runs(found)]
    parts = [
        *warning(found),
        "\n".join(sentences(found)),
        "\n".join(head),
        summary(found).markdown(),
        *notes(found),
    ]
    whole = table(found).markdown()
    parts.append(f"<details><summary>Every case</summary>\n\n{whole}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def html(found: Compared, root: str = "") -> str:
    """Return the comparison as one page that opens offline.

    In a site, `root` leads from the page to the folder that the runs' paths are relative to.
    """
    return render(
        "comparison.html",
        title=f"{len(found.runs)} runs compared",
        warning=warning(found),
        sentences=sentences(found),
        root=root,
        runs=[
            (line, f"{root}{run.path.as_posix()}/index.html" if root else "")
            for line, run in zip(runs(found), found.runs.values(), strict=True)
        ],
        summary=summary(found).html(),
        notes=notes(found),
        table=table(found, folded=True).html(),
    )


def agreement_sheet(found: Comparison) -> Table:
    """Return the cells of two runs that do not agree, and what each run says of them."""
    apart = found.cases[found.cases.agree.eq(False).fillna(False)]
    names = [n for n in ["op", *_fields(found.cases), "scope", "cache"] if n in apart]
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
    title = f"Cells that do not agree: {constant}" if lines else "No cell disagrees"
    words = ("contender", "× baseline there", "× baseline here", "op")
    return Table(title=title, columns=columns if lines else (), lines=lines, words=words)


def to_json(found: Compared) -> dict[str, Any]:
    """Return everything for a script."""
    return {
        "runs": {name: str(run.path) for name, run in found.runs.items()},
        "changes": {
            name: {
                **own.counts,
                "geometric_mean": None if np.isnan(own.mean) else own.mean,
                "same_device": own.same_device,
                "baselines_mean": None if np.isnan(own.baseline_mean) else own.baseline_mean,
                "cases": json.loads(own.cases.to_json(orient="records")),
            }
            for name, own in found.others.items()
        },
    }


def _problem(names: Sequence[str], line: Mapping[Any, Any]) -> str:
    """Write the fields of a problem that vary: `linear, bf16, two_four, 50 %, m 16, n 4096`."""
    told = [(name, shown(name, line[name])) for name in names]
    told = [each for each in told if each[1] != "-" and each not in USUAL]
    plain = (*PARTS, "sparsity")
    first = [value for name, value in told if name in plain]
    return ", ".join([*first, *(f"{name} {value}" for name, value in told if name not in plain)])


def _about(run: Run) -> str:
    facts = flat(run.environment)
    commit = f"commit {facts['commit'][:7]}" if "commit" in facts else ""
    words = [str(run.path), device_name(run.environment), commit]
    return ", ".join(filter(None, [*words, *_badges(run)]))


def _badges(run: Run) -> list[str]:
    found = analyse(run)
    return [text for _, text in labels(run, found.cases, found.noise)]


def _joined(found: Compared) -> list[dict[str, dict[Any, Any]]]:
    """Return each case that has a word: its lines by the letter of the run."""
    cases: dict[tuple[Any, ...], dict[str, dict[Any, Any]]] = {}
    for name, own in found.others.items():
        for line in own.cases.to_dict("records"):
            if line["word"]:
                cases.setdefault(tuple(line[key] for key in KEYS), {})[name] = line
    return list(cases.values())


def _fields(cases: pd.DataFrame) -> list[str]:
    """Name the fields of the problems in the cases of a comparison."""
    names = list(cases.columns)
    return names[names.index("op") + 1 : names.index("level")]


def _size(line: Mapping[Any, Any]) -> float:
    """Sort broken cases first, then what is decided, then what is not, each by its size."""
    known = 0.0 if np.isnan(line["ratio"]) else abs(float(np.log(line["ratio"])))
    return 1e3 * RANKS[line["word"]] + known


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
    said = line[f"outcome_{side}"].replace("_", " ")
    if pd.isna(ends[0]):
        return f"{line[f'status_{side}']}: {line[f'detail_{side}']}"
    return f"{estimate(*ends)} {said}".rstrip()

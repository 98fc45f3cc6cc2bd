"""The cells of a test in a run: a contest each, the fastest subject over the fastest baseline.

    cases of a run ─> those of a wanted problem, scope and cache state
                   ─> subjects and baselines that ran     none: the cell has a reason and no value
                   ─> log of (baseline / subject) in each process ─> interval ─> unit of the metric
    of a test with `over`: ─> each over the cell of that op at equal fields

A portfolio that chose a dense kernel is no subject where another one ran. Cells are plain data, so
that a site keeps them beside its runs.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.analysis import Analysis, chose_dense
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Chosen, Measure, Test
from sparsebench.results.formatting import between, percent, plain, significant
from sparsebench.results.frame import fields
from sparsebench.results.noise import Reliability
from sparsebench.results.provenance import Choices, choices_of, device_name
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST, IntervalKind, contest_logs, ratio
from sparsebench.results.store import Run

NAMED = ("op", "dtype", "pattern", "m", "n", "k", "level", "block", "sparsity")
Line = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One contest of one run, as a test sees it.

    fields     of the problem, with `level`, its sparsity
    logs       log(baseline / subject) of each process, of the metric's quantity
    value      of the metric in its unit, with low and high
    reason     why there is no value; "" where there is one
    kind       what low and high are (IntervalKind)
    bound      the largest ratio that the device allows: the baseline's time over the least that its
               ceilings leave for the non-zeros, and an empty launch; 0 where it is unknown
    confirms   whether the run was made for cells that a screening had chosen
    searched   whether the run chose its configurations: those of a run on another card may make a
               dense baseline slower, by up to 7 % between two H200s (harness/NOTES.md)
    case_ids   of the subject and the baselines: what measures the cell again
    """

    test: str
    problem: str
    run: str
    device: str
    fields: Mapping[str, Any]
    simulated: bool = False
    confirms: bool = False
    reliable: bool = True
    commit: str = ""
    case_ids: tuple[str, ...] = ()
    reason: str = ""
    subject: str = ""
    baseline: str = ""
    logs: tuple[float, ...] = ()
    value: float = 0.0
    low: float = 0.0
    high: float = 0.0
    kind: str = ""
    bound: float = 0.0
    searched: bool = True

    @property
    def processes(self) -> int:
        """Return how many processes have a ratio."""
        return len(self.logs)

    @property
    def weight(self) -> tuple[bool, int, float]:
        """Return what ranks equally reliable cells: a search, processes, a narrow interval."""
        return self.searched, self.processes, self.low - self.high

    @property
    def density(self) -> float:
        """Return the part of the weights that is not zero."""
        return 1 - float(self.fields.get("level") or 0.0)

    @property
    def label(self) -> str:
        """Name the cell by its fields: m 64, n × k 4096 × 4096, 90 %, blocks of 32."""
        known = self.fields
        parts = [str(known.get("op", "")), str(known.get("dtype", ""))]
        parts += [f"m {known['m']}"] if "m" in known else []
        parts += [f"{known['n']} × {known['k']}"] if {"n", "k"} <= known.keys() else []
        parts += [percent(known["level"])] if known.get("level") else []
        parts += [f"blocks of {known['block']}"] if known.get("block") not in (None, 1, "1") else []
        others = {n: v for n, v in known.items() if n not in NAMED and v != "iid"}
        parts += [f"{name} {plain(value)}" for name, value in others.items()]
        return ", ".join(filter(None, parts))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Cell":
        """Read what `to_json` wrote."""
        listed = {name: tuple(data[name]) for name in ("case_ids", "logs")}
        return cls(**{**data, **listed})


def cells(test: Test, wanted: Collection[str], run: Run, found: Analysis) -> list[Cell]:
    """Return the cells of a test in a run; `wanted` are the ids of its problems."""
    cases = found.cases
    here = cases[cases.problem_id.isin(list(wanted)) & ~cases.twin.astype(bool)]
    if run.state["flags"]["device"] != "cpu":  # it tells no scopes and caches apart
        here = here[(here.scope == test.scope) & (here.cache == test.cache)]
    here = here.assign(chose_dense=chose_dense(here) if len(here) else False)
    shared = {
        "test": test.name,
        "run": run.path.name,
        "device": device_name(run.environment),
        "simulated": run.state["flags"]["device"].partition(":")[0] == "sim",
        "confirms": "confirms" in run.state,
        "searched": choices_of(run.state) is not Choices.BUNDLE,
        "reliable": found.noise.reliability[0] is not Reliability.UNRELIABLE,
        "commit": str(run.environment.get("commit") or "")[:12],
    }
    known = run.environment.get("ceilings")
    least_us = Ceilings.from_json(known).launch_us if known else 0.0
    made = []
    for _, contest in here.groupby("problem_id", sort=False):
        lines: list[Line] = [*contest.to_dict("records")]  # type: ignore[list-item]
        named = {n: _plain(lines[0][n]) for n in ("op", *fields(cases), "level")}
        facts = {**shared, "fields": {n: v for n, v in named.items() if v is not None}}
        made += _cell(test, lines, facts, found.rows, least_us)
    return made


def about(test: Test, fields: Mapping[str, Any]) -> bool:
    """Say whether a problem with these fields is one of a test's: its values, and its levels."""
    for name, value in test.at.items():
        values = value if isinstance(value, list) else [value]
        if name not in fields or _text(fields[name]) not in map(_text, values):
            return False
    level = round(float(fields.get("sparsity") or 0.0), 2)
    return test.levels is None or test.levels[0] <= level <= test.levels[1]


def of_files(test: Test, measure: Measure | None, run: Run) -> set[str]:
    """Return the ids of a run's problems that a test is about, if they come of files below --data.

    Without the files nobody can plan them; so those that a run of the suite has are the test's.
    """
    if not (measure and measure.data and run.state["suite"] == measure.suite):
        return set()
    problems = {
        row.case.problem.id: row.case.problem for row in run.rows if row.case.problem.source
    }
    return {name for name, problem in problems.items() if about(test, problem.fields)}


def over(test: Test, known: Sequence[Cell]) -> list[Cell]:
    """Return cells over those of the op that a test names, at equal fields; as they are, else.

    Both are speed-ups over a dense product of as many operations, so this is a ratio of rates. Of
    several cells of that op it takes one of a reliable run, then of the same run, of one that
    searched, of most processes, and the one with the narrowest interval. Cells of different runs
    have different processes; the first goes with the first.
    """
    if test.over is None:
        return list(known)
    made = []
    for cell in (cell for cell in known if cell.fields["op"] != test.over):
        same = [
            other
            for other in known
            if other.fields["op"] == test.over and _place(other) == _place(cell)
        ]
        if same:
            best = max(same, key=lambda each: (each.reliable, each.run == cell.run, *each.weight))
            made.append(_over(test, cell, best))
    return made


def _over(test: Test, cell: Cell, other: Cell) -> Cell:
    ids = (*cell.case_ids, *other.case_ids)
    facts = {**cell.to_json(), "case_ids": ids, "bound": 0.0}
    facts |= {"baseline": f"{other.subject} of {test.over}"}
    facts |= {"run": cell.run if cell.run == other.run else f"{cell.run} over {other.run}"}
    facts |= {"reliable": cell.reliable and other.reliable}
    both = Cell.from_json(facts | {"reason": cell.reason or other.reason})
    if both.reason:
        return both
    logs = [np.array([a - b]) for a, b in zip(cell.logs, other.logs, strict=False)]
    return valued(test, both, logs)


def _place(cell: Cell) -> dict[str, Any]:
    """Return the fields that two ops share; a level as achieved may differ by a tile."""
    return {name: value for name, value in cell.fields.items() if name not in ("op", "level")}


def said(test: Test, cell: Cell, of: str = "{}") -> str:
    """Write a value with its interval, `1.106× [1.105, 1.107]`; `21.4 %, one process` has none."""
    unit = SIGNS[test.unit]
    if cell.processes > 1 and cell.high > cell.low:
        return of.format(between(cell.value, cell.low, cell.high, unit=unit))
    return of.format(f"{significant(cell.value)}{unit}") + ", one process" * (cell.processes == 1)


def most(test: Test, cell: Cell) -> float | None:
    """Return what a cell can reach at most on its device, in the unit; None where nothing tells."""
    return METRICS[test.metric].of(cell.bound, cell.density) if cell.bound else None


def judging(known: Mapping[str, Sequence[Cell]]) -> dict[str, list[Cell]]:
    """Return the cells that judge, by claim: simulated ones only where all cells are."""
    real = any(not cell.simulated for own in known.values() for cell in own)
    return {n: [c for c in own if not (real and c.simulated)] for n, own in known.items()}


def matches(chosen: Chosen, contender: Mapping[str, Any]) -> bool:
    """Say whether a contender, or a line of cases, is among the chosen.

    Options are compared as text, "tuned=True".
    """
    if chosen.format not in (None, contender["format"]):
        return False
    if chosen.kernels and contender["kernel"] not in chosen.kernels:
        return False
    given = contender["options"]
    words = given.split() if isinstance(given, str) else [f"{n}={v}" for n, v in given.items()]
    return all(f"{name}={value}" in words for name, value in chosen.options.items())


def united(known: Sequence[Cell], test: Test) -> Cell:
    """Return all cells, each with a value, as one: in each process the mean of their log-ratios.

    Cells of different runs have different processes; the first goes with the first, and so on.
    """
    count = min(cell.processes for cell in known)
    density = exp(float(np.mean([log(max(1e-9, cell.density)) for cell in known])))
    logs = tuple(float(np.mean([cell.logs[i] for cell in known])) for i in range(count))
    bounds = [cell.bound for cell in known if cell.bound]
    facts = {
        **known[0].to_json(),
        "fields": {"level": 1 - density},
        "bound": exp(float(np.mean(np.log(bounds)))) if len(bounds) == len(known) else 0.0,
        "reliable": all(cell.reliable for cell in known),
    }
    return valued(test, Cell.from_json(facts), [np.array([each]) for each in logs])


def valued(test: Test, cell: Cell, logs: Sequence[Any]) -> Cell:
    """Return a cell with its value and interval, from the log-ratios of each process by block."""
    metric, found = METRICS[test.metric], ratio(logs)
    ends = [metric.of(end, cell.density) for end in (found.value, found.low, found.high)]
    medians = tuple(float(np.median(each)) for each in logs)
    named = dict(zip(("value", "low", "high"), ends, strict=True))
    kind = found.interval_kind if len(medians) < FEWEST else IntervalKind.CONFIDENCE
    given = {**cell.to_json(), **named, "logs": medians, "kind": str(kind)}
    return Cell.from_json(given)


def _cell(
    test: Test, lines: list[Line], facts: Line, rows: pd.DataFrame, least_us: float
) -> list[Cell]:
    """Return the cell of a contest, in a list; [] where the suite had neither side."""
    subjects = [line for line in lines if matches(test.subject, line)]
    bases = [line for line in lines if matches(test.baseline, line)]
    if not subjects or not bases:
        return []
    problem = lines[0]["problem_id"]
    ids = tuple(dict.fromkeys(line["case_id"] for line in [*subjects, *bases]))
    blank = Cell(**facts, problem=problem, case_ids=ids, reason="")
    for who, side in (("subject", subjects), ("baseline", bases)):
        if not any(line["status"] == Status.OK for line in side):
            return [_without(blank, f"no {who} ran: {_reasons(side)}")]
    subject = _fastest(subjects)
    others = [line for line in bases if line["case_id"] != subject["case_id"]]
    if not any(line["status"] == Status.OK for line in others):
        return [_without(blank, "the subject is the only baseline")]
    base = _fastest(others)
    logs = _logs(test, subject, base, rows)
    if not logs:
        return []  # the run did not measure it, as energy without --energy
    sides = {"subject": subject["ran"], "baseline": base["ran"]}
    bound = {"bound": _bound(test, subject, base, least_us)}
    return [valued(test, Cell.from_json({**blank.to_json(), **sides, **bound}), logs)]


def _bound(test: Test, subject: Line, base: Line, least_us: float) -> float:
    """Return the largest ratio of times that the device allows; 0 where nothing tells."""
    timed = METRICS[test.metric].column == "time" and test.scope == "kernel"
    if not timed or not least_us or pd.isna(subject["bound_us"]):
        return 0.0
    return float(base["median_us"] / max(subject["bound_us"], least_us))


def _logs(test: Test, subject: Line, base: Line, rows: pd.DataFrame) -> list[Any]:
    """Return the log-ratios of each process: of times by block, else of one value a process."""
    column = METRICS[test.metric].column
    if column == "time":
        return list(contest_logs(subject["blocks"], base["blocks"]).values())
    sides = []
    for line in (base, subject):
        own = rows[(rows.case_id == line["case_id"]) & (rows.status == Status.OK)]
        own = own[(own.scope == line["scope"]) & (own.cache == line["cache"])]
        sides.append(own.set_index("replicate")[column].astype("float64").dropna())
    over, under = sides
    shared = [n for n in over.index if n in under.index and over[n] > 0 and under[n] > 0]
    return [np.array([log(over[number] / under[number])]) for number in shared]


def _fastest(lines: list[Line]) -> Line:
    """Return the line with the least time; one whose portfolio chose dense only if all did."""
    ran = [line for line in lines if line["status"] == Status.OK]
    return min(ran, key=lambda line: (line["chose_dense"], line["median_us"]))


def _reasons(lines: Iterable[Line]) -> str:
    found = Counter(f"{line['kernel']}: {line['detail'] or line['status']}" for line in lines)
    return "; ".join(reason for reason, _ in found.most_common(2))


def _without(cell: Cell, reason: str) -> Cell:
    return Cell.from_json({**cell.to_json(), "reason": reason})


def _text(value: Any) -> str:
    """Write a field so that equal ones are equal: 64, 0.9, 16x32."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _plain(value: Any) -> Any:
    """Return a field as JSON has it; None where a case has no such field."""
    if value is None or (not isinstance(value, str) and pd.isna(value)) or value == "":
        return None
    return value.item() if hasattr(value, "item") else value

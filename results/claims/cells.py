"""The cells of a test in a run: one per contest, the fastest subject over the fastest baseline.

    cases of a run ─> those of the test's problems, kernel time with a cold cache
                   ─> subjects and baselines that ran     none: the cell has a reason, no value
                   ─> log of (baseline / subject) in each process ─> interval ─> unit of the metric
    with `over`    ─> each cell over the cell of that op with equal fields

A dense side multiplies unpruned weights in contests that have such a contender. A portfolio that
chose a dense kernel is a subject only if no other one ran. Cells are plain data,
so that a site can store them beside its runs.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.ceilings import Ceilings
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Chosen, Measure, Test
from sparsebench.results.formatting import between, significant
from sparsebench.results.problem_names import problem_name
from sparsebench.results.record import Status
from sparsebench.results.run.provenance import Choices, choices_of, commit_of
from sparsebench.results.run.store import StoredRun
from sparsebench.results.statistics.ratio import FEWEST, IntervalKind, contest_logs, ratio
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.cases import dense_choice
from sparsebench.results.tables.frame import fields
from sparsebench.results.tables.noise import Reliability

Line = dict[str, Any]


@dataclass(frozen=True)
class ClaimCell:
    """One contest of one run, as a test sees it.

    fields     of the problem, with `level`, its sparsity
    confirms   whether the run was made for cells that a screening had chosen
    reliable   whether the A/A pairs of the run agree
    case_ids   of all subjects and baselines, to measure the cell again; with a value, the chosen
               subject and baseline come first
    reason     why there is no value; "" if there is one
    logs       log(baseline / subject) of the metric's quantity in each process
    value      of the metric in its unit, with low and high
    kind       of the interval (IntervalKind)
    bound      the largest ratio that the device allows: the baseline's time over the shortest time
               for the non-zeros by its ceilings, at least an empty launch; 0 if unknown
    searched   whether the run chose its configurations; those of a run on another unit may slow a
               dense baseline down, by up to 7 % between two H200s (harness/NOTES.md)
    between    half, in logs, that cards add to the interval of a speedup (between_cards.py)
    """

    test: str
    problem: str
    run: str
    device: str
    fields: Mapping[str, Any]
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
    between: float = 0.0

    @property
    def processes(self) -> int:
        return len(self.logs)

    @property
    def weight(self) -> tuple[bool, int, float]:
        """Return the order among equally reliable cells: search, processes, narrow interval."""
        return self.searched, self.processes, self.low - self.high

    @property
    def density(self) -> float:
        """Return the fraction of the weights that is not zero."""
        return 1 - float(self.fields.get("level") or 0.0)

    @property
    def label(self) -> str:
        """Describe the cell by its fields: linear, bf16, m 64, 4096 × 4096, 32 × 32 blocks."""
        return problem_name(self.fields, (name for name in self.fields if name != "sparsity"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ClaimCell":
        tuples = {name: tuple(data[name]) for name in ("case_ids", "logs")}
        return cls(**{**data, **tuples})


def cells(test: Test, problems: Collection[str], analysis: Analysis) -> list[ClaimCell]:
    """Return the cells of a test in a run; `problems` are the ids of its problems."""
    run, ids = analysis.run, {*problems}
    contests = {name: lines for name, lines in analysis.contests.items() if name in ids}
    if not contests:  # so for most pairs of a site
        return []
    ceilings = run.environment.get("ceilings")
    launch_us = Ceilings.from_json(ceilings).launch_us if ceilings else 0.0
    cells_of_test = []
    for problem, lines in contests.items():
        names = "op", *fields(analysis.estimates), "source", "level"
        named = {name: _plain(lines[0][name]) for name in names}
        at = {name: value for name, value in test.at.items() if name == "sparsity"}
        if not covers(test.model_copy(update={"at": at}), {"sparsity": lines[0]["sparsity"]}):
            continue  # its weights have another sparsity than the problem asks for
        blank = ClaimCell(
            test=test.name,
            problem=problem,
            run=run.path.name,
            device=analysis.device,
            fields={n: v for n, v in named.items() if v is not None},
            confirms="confirms" in run.state,
            reliable=analysis.noise.reliability[0] is not Reliability.UNRELIABLE,
            commit=commit_of(run.path, run.environment)[:12],
            searched=choices_of(run.state) is not Choices.BUNDLE,
        )
        cells_of_test += _cell(test, lines, blank, analysis.rows, launch_us)
    return cells_of_test


def covers(test: Test, fields: Mapping[str, Any]) -> bool:
    """Return whether a test includes a problem with these fields, by its values and levels."""
    for name, value in test.at.items():
        values = value if isinstance(value, list) else [value]
        if name not in fields or _text(fields[name]) not in map(_text, values):
            return False
    level = round(float(fields.get("sparsity") or 0.0), 2)
    return test.levels is None or test.levels[0] <= level <= test.levels[1]


def file_problems(test: Test, measure: Measure | None, run: StoredRun) -> set[str]:
    """Return the ids of a run's problems from files below --data that a test includes.

    Without the files they cannot be planned, so those that a run of the suite has count.
    """
    if not (measure and measure.data and run.state["suite"] == measure.suite):
        return set()
    problems = {
        row.case.problem.id: row.case.problem for row in run.rows if row.case.problem.source
    }
    return {name for name, problem in problems.items() if covers(test, problem.fields)}


def is_outdone(test: Test, cell: ClaimCell, others: Iterable[ClaimCell]) -> bool:
    """Return whether a run of the same problem has a faster subject or baseline, beyond the noise.

    This holds only for a contender that the cell's own run left out, as a run does that confirms
    another claim, and for intervals over enough processes. Only times tell what is faster.
    """
    if METRICS[test.metric].column != "time" or cell.reason:
        return False
    for other in others:
        if other.reason or other.processes < FEWEST or not (other.reliable and other.case_ids):
            continue
        subject, baseline = other.case_ids[:2]
        if other.low > cell.high and subject not in cell.case_ids:
            return True
        if other.high < cell.low and baseline not in cell.case_ids:
            return True
    return False


def over_op(test: Test, measured: Sequence[ClaimCell]) -> list[ClaimCell]:
    """Return cells over those of the test's op `over` with equal fields; unchanged without `over`.

    Both are speedups over a dense product with as many operations, so this is a ratio of rates.
    Among several cells of that op the order is: a reliable run, the same run, one that searched,
    most processes, the narrowest interval. Cells of different runs have different processes, which
    are paired in order.
    """
    if test.over is None:
        return list(measured)
    ratios = []
    bases = [cell for cell in measured if cell.fields["op"] == test.over]
    for cell in (cell for cell in measured if cell not in bases):
        same = [base for base in bases if _place(base) == _place(cell)]
        if same:
            best = max(same, key=lambda each: (each.reliable, each.run == cell.run, *each.weight))
            ratios.append(_over(test, cell, best))
    return ratios


def value_text(test: Test, cell: ClaimCell, template: str = "{}") -> str:
    """Write a value with its interval, if it has one: `1.106× [1.105, 1.107]`.

    The text names an interval that is no 95 % interval: `1.1× [1.0, 1.2], range over 3 processes`.
    """
    unit = SIGNS[test.unit]
    if cell.processes > 1 and cell.high > cell.low:
        text = template.format(between(cell.value, cell.low, cell.high, unit=unit))
        look = cell.kind == IntervalKind.RANGE
        return text + (f", range over {cell.processes} {test.samples}" if look else "")
    one = ", one process" if cell.processes == 1 else ""
    return template.format(f"{significant(cell.value)}{unit}") + one


def largest_value(test: Test, cell: ClaimCell) -> float | None:
    """Return the largest value that the device allows in a cell, in its unit; None if unknown."""
    return METRICS[test.metric].of(cell.bound, cell.density) if cell.bound else None


def matches(chosen: Chosen, contender: Mapping[str, Any]) -> bool:
    """Return whether a contender, or a line of cases, is among the chosen.

    Options are compared as text, such as "tuned=True".
    """
    if chosen.format not in (None, contender["format"]):
        return False
    if chosen.kernels and contender["kernel"] not in chosen.kernels:
        return False
    words = contender["options"]
    words = words.split() if isinstance(words, str) else [f"{n}={v}" for n, v in words.items()]
    return all(f"{name}={value}" in words for name, value in chosen.options.items())


def pool(members: Sequence[ClaimCell], test: Test) -> ClaimCell:
    """Return cells, each with a value, as one: the mean of their log-ratios in each process.

    Cells of different runs have different processes, which are paired in order.
    """
    every_log = zip(*(cell.logs for cell in members), strict=False)
    density, bound = (
        float(np.prod(values)) ** (1 / len(members))
        for values in ([cell.density for cell in members], [cell.bound for cell in members])
    )
    between = float(np.mean([cell.between for cell in members]))
    cell = replace(members[0], fields={"level": 1 - density}, bound=bound, between=between)
    return with_value(test, cell, [np.array([np.mean(logs)]) for logs in every_log])


def with_value(test: Test, cell: ClaimCell, logs: Sequence[Any]) -> ClaimCell:
    """Return a cell with its value and interval, from log-ratios by round, an array per process."""
    metric, estimate = METRICS[test.metric], ratio(logs, cell.between)
    ends = (estimate.value, estimate.low, estimate.high)
    value, low, high = (metric.of(end, cell.density) for end in ends)
    medians = tuple(float(np.median(each)) for each in logs)
    kind = estimate.interval_kind if len(medians) < FEWEST else IntervalKind.CONFIDENCE
    return replace(cell, logs=medians, value=value, low=low, high=high, kind=str(kind))


def _over(test: Test, cell: ClaimCell, other: ClaimCell) -> ClaimCell:
    both = replace(
        cell,
        case_ids=(*cell.case_ids, *other.case_ids),
        bound=0.0,
        baseline=f"{other.subject} of {test.over}",
        run=cell.run if cell.run == other.run else f"{cell.run} over {other.run}",
        reliable=cell.reliable and other.reliable,
        reason=cell.reason or other.reason,
        between=float(np.hypot(cell.between, other.between)),
    )
    if both.reason:
        return both
    logs = [np.array([a - b]) for a, b in zip(cell.logs, other.logs, strict=False)]
    return with_value(test, both, logs)


def _place(cell: ClaimCell) -> dict[str, Any]:
    """Return the fields that two ops share; levels as achieved may differ by a tile."""
    return {name: value for name, value in cell.fields.items() if name not in ("op", "level")}


def _cell(
    test: Test, lines: list[Line], blank: ClaimCell, rows: pd.DataFrame, launch_us: float
) -> list[ClaimCell]:
    """Return the cell of a contest in a list; [] if the suite lacks a side, or did not measure."""
    subjects = _unpruned_first([line for line in lines if matches(test.subject, line)])
    bases = _unpruned_first([line for line in lines if matches(test.baseline, line)])
    if not subjects or not bases:
        return []
    ids = tuple(dict.fromkeys(line["case_id"] for line in [*subjects, *bases]))
    blank = replace(blank, case_ids=ids)
    for name, side in (("subject", subjects), ("baseline", bases)):
        if not any(line["status"] == Status.OK for line in side):
            return [replace(blank, reason=f"no {name} ran: {_reasons(side)}")]
    subject = _fastest(subjects)
    others = [line for line in bases if line["case_id"] != subject["case_id"]]
    if not any(line["status"] == Status.OK for line in others):
        return [replace(blank, reason="the subject is the only baseline")]
    base = _fastest(others)
    logs = _logs(test, subject, base, rows)
    if not logs:
        return []  # such as energy without --energy
    ids = tuple(dict.fromkeys([subject["case_id"], base["case_id"], *ids]))
    bound = _largest_ratio(test, subject, base, launch_us)
    cards = float(subject["between"]) if METRICS[test.metric].column == "time" else 0.0
    cell = replace(
        blank,
        case_ids=ids,
        subject=subject["ran"],
        baseline=base["ran"],
        bound=bound,
        between=cards,
    )
    return [with_value(test, cell, logs)]


def _unpruned_first(side: list[Line]) -> list[Line]:
    """Return the contenders with unpruned weights if one ran: the layer that is replaced."""
    unpruned = [line for line in side if line["weights"] == "original"]
    return unpruned if any(line["status"] == Status.OK for line in unpruned) else side


def _largest_ratio(test: Test, subject: Line, base: Line, launch_us: float) -> float:
    """Return the largest ratio of times that the device allows; 0 if it is unknown."""
    timed = METRICS[test.metric].column == "time"
    if not timed or not launch_us or pd.isna(subject["bound_us"]):
        return 0.0
    return float(base["median_us"] / max(subject["bound_us"], launch_us))


def _logs(test: Test, subject: Line, base: Line, rows: pd.DataFrame) -> list[Any]:
    """Return the log-ratios of each process: of times by round, else of one value per process."""
    column = METRICS[test.metric].column
    if column == "time":
        return list(contest_logs(subject["blocks"], base["blocks"]).values())
    sides = []
    for line in (base, subject):
        ran = rows[(rows.case_id == line["case_id"]) & (rows.status == Status.OK)]
        ran = ran[(ran.scope == line["scope"]) & (ran.cache == line["cache"])]
        sides.append(ran.set_index("replicate")[column].astype("float64").dropna())
    over, under = sides
    shared = [n for n in over.index if n in under.index and over[n] > 0 and under[n] > 0]
    return [np.array([log(over[number] / under[number])]) for number in shared]


def _fastest(lines: list[Line]) -> Line:
    """Return the line with the shortest time; one whose portfolio chose dense only as a last."""
    ran = [line for line in lines if line["status"] == Status.OK]
    return min(ran, key=lambda line: (bool(dense_choice(line["chosen"])), line["median_us"]))


def _reasons(lines: Iterable[Line]) -> str:
    reasons = Counter(f"{line['kernel']}: {line['detail'] or line['status']}" for line in lines)
    return "; ".join(reason for reason, _ in reasons.most_common(2))


def _text(value: Any) -> str:
    """Write a field so that equal values have equal text: 64, 0.9, 16x32."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _plain(value: Any) -> Any:
    """Return a field as JSON data; None if a case has no such field."""
    if value is None or (not isinstance(value, str) and pd.isna(value)) or value == "":
        return None
    return value.item() if hasattr(value, "item") else value

"""Requests per second of servers, beside the same requests without the host's share.

    at once   contender   requests/s          over dense   on the device   device's share    ...
    8         2:4         21.4 [21.1, 21.7]   1.12×        1.20×           62 % [61, 63]

A sample of the op `serving` is the time of all requests; `steps` is the device's time of the steps,
and the other readings are those of harness/ops/serving.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from sparsebench.reports.figures._html import NOTHING, note
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import between, join_words, percent
from sparsebench.results.problem_names import problem_name
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import usual
from sparsebench.results.tables.frame import fields, records

TITLE = "Requests"
ORDER = 30

READ = (
    "All servers answer the same requests with the same logits, in turn. The time of the steps on "
    "the device leaves out the host's share: it shows what the model gains, and the requests per "
    "second show what the server gains. "
)
DECIDES = 0.5  # share of the time below which the device waits for the host more than it computes
HEADS = ["at once", "contender", ">requests per second", ">over dense", ">on the device"]
HEADS += [">device's share", ">first token, ms", ">between tokens, ms"]
HEADS += [">first token after the start, ms", ">over dense"]
READINGS = "first_token", "per_token", "cold"
Line = Mapping[str, Any]


def draw(analysis: Analysis) -> Markup:
    """Show a line for each server; NOTHING if the run has none."""
    timed = analysis.timed
    timed = timed[timed.op == "serving"] if len(timed) else timed
    if timed.empty:
        return NOTHING
    readings = {(line["case_id"], line["scope"]): line for line in records(timed)}
    servers = sorted(records(usual(timed)), key=lambda line: line["concurrency"])
    lines = [_cells(line, readings) for line in servers]
    common = [name for name in fields(timed) if name not in ("concurrency", "requests")]
    about = problem_name(servers[0], common)
    return note(f"{READ}{_who_decides(servers, readings)} {about}.") + html_table(HEADS, lines)


def _cells(line: Line, readings: Mapping[tuple[str, str], Line]) -> list[str]:
    case, steps = line["case_id"], readings.get((line["case_id"], "steps"))
    others = [readings.get((case, name)) for name in READINGS]
    return [
        str(line["concurrency"]),
        str(line["label"]),
        per_second(line),
        _gain(line),
        _gain(steps) if steps else "–",
        _share_text(line, steps) if steps else "–",
        *(_milliseconds(other) if other else "–" for other in others),
        _gain(others[-1]) if others[-1] else "–",
    ]


def per_second(line: Line) -> str:
    """Write requests per second with the range of the processes."""
    rate, low, high = (1e6 * line["requests"] / line[f"{n}_us"] for n in ("median", "high", "low"))
    return between(rate, low, high, unit="")


def _gain(line: Line) -> str:
    return between(line["speedup"], line["speedup_low"], line["speedup_high"], line["uncertainty"])


def _milliseconds(line: Line) -> str:
    """Write a reading with the range of the processes."""
    median, low, high = (line[f"{name}_us"] / 1e3 for name in ("median", "low", "high"))
    return between(median, low, high, unit="")


def _share_text(line: Line, steps: Line) -> str:
    """Write the device's share, with the widest range that the processes allow."""
    low, high = steps["low_us"] / line["high_us"], steps["high_us"] / line["low_us"]
    return between(100 * _share(line, steps), 100 * low, 100 * high, unit=" %")


def _share(line: Line, steps: Line) -> float:
    return float(steps["median_us"] / line["median_us"])


def _who_decides(servers: Sequence[Line], readings: Mapping[tuple[str, str], Line]) -> str:
    """Say at which numbers of requests the host decides, by the dense servers."""
    shares = {
        line["concurrency"]: _share(line, steps)
        for line in servers
        if line["format"] == "dense" and (steps := readings.get((line["case_id"], "steps")))
    }
    if not shares:
        return "The run has no dense server."
    waits = [str(count) for count, share in shares.items() if share < DECIDES]
    if not waits:
        least = percent(round(min(shares.values()), 2))
        return f"The host does not decide: dense, the device works for {least} of the time or more."
    counts = f"{join_words(waits)} {'request' if waits == ['1'] else 'requests'} at once"
    return f"With {counts} the host decides: dense steps take less than half of the time there."

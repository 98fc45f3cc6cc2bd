"""From which context length on does attention that selects its keys beat dense attention?

    gain      ┌── high  ┌── estimate
      |       |      ●──|────●         ●  a measured length: a case, with its interval
    1 ┼───────┼─────╱───┼──────        straight between two lengths, in logarithms of both
      |       |  ╱      |   └── low
      |       ●         from which on it is faster; the interval's ends cross 1 at the other two
      └──────── tokens

runs ─> curves ─> results/published/attention.json ─> `sparsebench advise --attention`, a page

A case counts if its kernel selects in the timed call. Then its choice has `selects`: the method.
The gain is over the fastest dense contender of the contest: kernel time with a cold cache, as in a
CUDA graph. The cases of a curve differ in their length alone, and keep the same share of the blocks
of keys that queries see, or the same number of keys. Nothing is extrapolated: a length is null if
dense attention still wins at the longest one, and the shortest one if it already loses there.

The interval of a length is the set of lengths at which the interval of the gain, widened by the
noise floor, holds 1. So it has the level of the gain's (Fieller 1954), if a curve is straight.

`attention.json` is an object of `schema`, `curves` (Curve) and `quality` (selection_files.py).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from math import exp, inf, isnan, log
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from sparsebench.results.advice.measured_layers import text_by_record
from sparsebench.results.files import read_model
from sparsebench.results.run.provenance import on_gpu
from sparsebench.results.selection_files import SelectionQuality, read_selection
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import method_of, with_gains
from sparsebench.results.tables.frame import records

SCHEMA: Final = "sparsebench/attention@1"
FILE = "attention.json"
NEVER = 1e-12  # an end that is unknown: below any gain

Line = Mapping[Any, Any]


@dataclass(frozen=True)
class CurvePoint:
    """A measured length: the gain over dense attention with its interval, and both times in µs.

    share   of the visible blocks of keys that is kept
    dense   the fastest dense kernel
    floor   of the noise: a gain within 1 ± floor is none
    """

    tokens: int
    share: float
    gain: float
    low: float | None
    high: float | None
    floor: float
    us: float
    dense: str
    dense_us: float
    run: str
    processes: int


@dataclass(frozen=True)
class SelectionCurve:
    """A method on a GPU over lengths: what an engine needs to choose between it and dense.

    phase       prompt: a query for each key; decode: one query for each sequence
    method      how blocks of keys are selected: `pooled`, `means`, `nsa`, ...
    contender   the kernel with its options
    sequences   number of sequences
    block       queries and keys of a block; when decoding, the second is the page
    share       of the visible blocks that is kept; null if `keys` is the same at each length
    keys        kept for each query; null if `share` is the same at each length
    faster_from  tokens from which on the estimate is above 1; null: not up to the longest length
    surely_from  the same for the lower end of the interval, so at least `faster_from`
    maybe_from   the same for the upper end, so at most `faster_from`
    points      by length. Each of the three lengths equals the first one if that is above 1
    """

    gpu: str
    phase: Literal["prompt", "decode"]
    method: str
    contender: str
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    block: tuple[int, int]
    causal: bool
    dtype: str
    share: float | None
    keys: int | None
    faster_from: int | None
    surely_from: int | None
    maybe_from: int | None
    points: Sequence[CurvePoint]


OF_CURVE = [field.name for field in fields(SelectionCurve)]


@dataclass(frozen=True)
class AttentionEvidence:
    """What attention.json holds."""

    curves: Sequence[SelectionCurve]
    quality: Sequence[SelectionQuality] = ()
    schema: Literal["sparsebench/attention@1"] = SCHEMA

    @property
    def text(self) -> str:
        """Return attention.json, with a line for each record."""
        return text_by_record(self)


def packaged_attention() -> AttentionEvidence:
    """Return the published curves. Raises ResultError."""
    file = files("sparsebench.results") / "published" / FILE
    return read_model(Path(str(file)), AttentionEvidence, SCHEMA)


def collect_attention(runs: Iterable[tuple[Analysis, str]], root: Path) -> AttentionEvidence:
    """Return the curves of published runs, and the qualities in the files of their folder."""
    qualities = [read_selection(file) for file in sorted(root.glob("selection/*.json"))]
    return AttentionEvidence(curves_of(runs), qualities)


def curves_of(runs: Iterable[tuple[Analysis, str]]) -> list[SelectionCurve]:
    """Return the curves through the cases of runs on GPUs, each with its name.

    If several runs measured a case, the one with the most processes counts, then the latest.
    """
    best: dict[tuple[str, str], dict[Any, Any]] = {}
    for analysis, name in sorted(runs, key=_rank, reverse=True):
        if on_gpu(analysis.run.environment):
            for line in _cases(analysis):
                best.setdefault((analysis.device, line["case_id"]), line | {"run": name})
    curves: dict[tuple[Any, ...], list[Line]] = {}
    for (gpu, _), line in best.items():
        for share, keys in ((round(1 - line["level"], 4), None), (None, _keys_of(line))):
            curves.setdefault((gpu, *_about(line), share, keys), []).append(line)
    every = [_curve(about, lines) for about, lines in curves.items()]
    long = [curve for curve in every if len(curve.points) > 1]
    through = {(point.run, point.us) for curve in long for point in curve.points}
    alone = [
        curve
        for curve in every
        if len(curve.points) == 1 and (curve.share is None) == _counts_keys(curve)
        if (curve.points[0].run, curve.points[0].us) not in through
    ]
    return sorted(long + alone, key=_order)


def _counts_keys(curve: SelectionCurve) -> bool:
    """Return whether a curve of one length has a number of keys: each query selects for itself."""
    return curve.phase == "decode" or curve.block[0] == 1


def crossing(values: Sequence[tuple[int, float]]) -> int | None:
    """Return the tokens from which on a curve through (tokens, gain), by tokens, is above 1."""
    last_below = max((i for i, (_, gain) in enumerate(values) if gain <= 1), default=-1)
    if last_below == len(values) - 1:
        return None
    if last_below < 0:
        return values[0][0]
    (left, below), (right, above) = values[last_below : last_below + 2]
    part = -log(below) / (log(above) - log(below)) if above < inf else 0.0
    return round(exp(log(left) + part * log(right / left)))


def _rank(item: tuple[Analysis, str]) -> tuple[int, str]:
    state = item[0].run.state
    return int(state["flags"]["replicates"]), str(state["started"])


def _cases(analysis: Analysis) -> Iterator[dict[Any, Any]]:
    """Yield the cases with a gain whose kernel selects; `selects` is the method."""
    cases = analysis.cases
    usual = (cases.op == "attention") & (cases.scope == "kernel") & (cases.cache == "cold")
    if not usual.any():
        return
    timed = with_gains(cases[usual])
    for line in records(timed[(timed.side != "dense") & timed.gain.notna()]):
        method = method_of(line["choice"])
        if method and line["m"] in (1, _length(line)):
            yield line | {"selects": method}


def _length(line: Line) -> int:
    context = line.get("context")
    return int(line["m"] if pd.isna(context) else context)


def _sides(line: Line) -> tuple[int, int]:
    queries, _, keys = str(line["block"]).partition("x")
    return int(queries), int(keys or queries)


def _about(line: Line) -> tuple[Any, ...]:
    """Return the fields of a curve from `phase` to `dtype`."""
    phase = "decode" if line["m"] == 1 else "prompt"
    contender = re.sub(r" selects=\S+", "", line["name"])
    sizes = (int(line[name]) for name in ("heads", "kv_heads", "head_dim", "batch"))
    about = phase, line["selects"], contender, *sizes, _sides(line)
    return *about, bool(line["causal"]), str(line["dtype"])


def _keys_of(line: Line) -> int:
    """Return the keys of a row of blocks, if all rows that see enough keep equally many."""
    side = _sides(line)[1]
    rows, share = -(-_length(line) // side), 1 - float(line["level"])
    if line["m"] == 1 or not line["causal"]:
        return side * round(rows * share)

    def excess(count: int) -> float:  # row r sees r + 1 blocks
        return count * rows - count * (count - 1) / 2 - share * rows * (rows + 1) / 2

    return side * min(range(1, rows + 1), key=lambda count: abs(excess(count)))


def _curve(about: tuple[Any, ...], lines: Sequence[Line]) -> SelectionCurve:
    """Return the curve through lines that share the fields `about`, the first of a curve."""
    points = sorted(map(_point, lines), key=lambda point: point.tokens)
    lengths = (
        [(p.tokens, p.gain) for p in points],
        [(p.tokens, (p.low or NEVER) / (1 + p.floor)) for p in points],
        [(p.tokens, (p.high or inf) * (1 + p.floor)) for p in points],
    )
    named = dict(zip(OF_CURVE, (*about, *map(crossing, lengths), points), strict=True))
    return SelectionCurve(**named)


def _point(line: Line) -> CurvePoint:
    def end(name: str) -> float | None:
        return None if isnan(line[name]) else round(float(line[name]), 4)

    share = 1 - (line["level"] if isnan(line["sparsity_achieved"]) else line["sparsity_achieved"])
    floor = 0.0 if isnan(line["floor"]) else round(float(line["floor"]), 4)
    gains = round(float(line["gain"]), 4), end("low"), end("high"), floor
    times = round(float(line["median_us"]), 3), line["dense_name"], round(line["dense_us"], 3)
    return CurvePoint(
        _length(line), round(float(share), 4), *gains, *times, line["run"], int(line["processes"])
    )


def _order(curve: SelectionCurve) -> tuple[Any, ...]:
    by_size = (curve.share is None, -(curve.share or 0), curve.keys or 0)
    shape = curve.heads, curve.kv_heads, curve.head_dim, curve.sequences, curve.causal
    about = curve.method, curve.contender, curve.block, curve.dtype
    return curve.gpu, curve.phase == "decode", *shape, *about, *by_size

"""The rows of the published runs, and the cases that every process of a run timed."""

import gzip
import hashlib
import json
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[2]
HOME = ROOT / "results/published"
FAMILIES = "attention", "bitmap", "bsr", "csr", "twell", "spense"
FILES = [file for name in FAMILIES for file in (ROOT / "kernels" / name).glob("*.py")]
OURS = {file.stem for file in FILES} | {"slide_gather"}  # which 0.4.0 removed
OURS -= {name for name in OURS if name.endswith(("_dense", "_paged"))}  # they leave out nothing
EDGES_US = 12, 50  # limits between the classes of times
LENGTHS = "below 12 µs", "12 to 50 µs", "above 50 µs"
OURS |= {f"{file.stem}_dgrad" for file in FILES if "\nDGRAD = " in file.read_text()}


class Timed(NamedTuple):
    """A row with times: medians of its blocks, all samples and their median, and what ran it."""

    clock: str
    process: int
    block_us: np.ndarray
    samples_us: list[float]
    median_us: float
    card: str
    limited: float


class Blocks(dict):
    """Times by block of a case, by process, and what its intervals need beside them.

    `logs` are its log speedups by process, `over_zeros` those over pruned weights, `cards` the GPU
    of each process, `stratum` its kernel and its class of times, and `compiled` has the digests of
    its kernels. `inherited` says whether its run took its configurations from another one. `loads`
    has the time of a call under each load, by process.
    """

    logs: dict[int, float]
    over_zeros: dict[int, float]
    cards: dict[int, str]
    compiled: set[str]
    stratum: str
    op: str
    scope: str
    inherited: bool
    loads: dict[str, dict[int, float]]
    __hash__ = object.__hash__  # each case has one, so that its ratios can be kept


@cache
def runs() -> list[str]:
    """Name every published run: GPU/NAME."""
    return sorted(f"{file.parts[-3]}/{file.parts[-2]}" for file in HOME.glob("*/*/run.json"))


@cache
def earlier() -> list[str]:
    """Name every published run that a newer one replaced: GPU/earlier/VERSION/NAME."""
    files = HOME.glob("*/earlier/*/*/run.json")
    return sorted(file.parent.relative_to(HOME).as_posix() for file in files)


def digest(run: str) -> str:
    """Return the SHA-256 of a run's manifest, whose start is part of its folder in a site."""
    return hashlib.sha256((HOME / run / "manifest.json").read_bytes()).hexdigest()


@cache
def device(run: str) -> str:
    """Return the name of the GPU, or of the CPU, that a run was measured on."""
    facts = json.loads((HOME / run / "environment.json").read_text())
    return (facts["gpu"] or facts["cpu"])["name"]


def rows(run: str) -> Iterator[tuple[dict, dict, dict]]:
    """Yield the rows of a suite's own cases, each with its problem and its contender."""
    text = gzip.decompress((HOME / run / "rows.jsonl.gz").read_bytes())
    for line in text.splitlines()[1:]:
        row = json.loads(line)
        if not row["reference"] and not row["case"]["contender"]["twin"]:
            yield row, row["case"]["problem"], row["case"]["contender"]


def by_block(row: dict) -> np.ndarray:
    """Return the median time of each whole block of samples."""
    size = min(row["samples_per_block"], len(row["samples_us"]))
    samples = np.array(row["samples_us"][: len(row["samples_us"]) // size * size])
    return np.median(samples.reshape(-1, size), 1)


def label_of(contender: dict) -> str:
    """Return a contender as pages name it: bsr/torch_bsr tuned=True."""
    options = " ".join(f"{k}={v}" for k, v in sorted(contender["options"].items()))
    unpruned = ", unpruned weights" * (contender.get("weights") == "original")
    return f"{contender['format']}/{contender['kernel']} {options}".strip() + unpruned


def key_of(row: dict) -> str:
    """Return what two runs share of a case: no field with its default, and no format.

    Rows up to 0.2.0 call kernels of sparse activations dense. Only `default` has several formats.
    """
    problem, contender = row["case"]["problem"], row["case"]["contender"]
    usual = problem.get("defaults", {}).items()
    fields = {
        name: value for name, value in problem["fields"].items() if (name, value) not in usual
    }
    of_problem = [problem["op"], fields, problem["seed"], problem["source"]]
    name = contender["format"] if contender["kernel"] == "default" else ""
    contender = {**contender, "format": name}
    if contender.get("weights") == "pruned":  # rows up to 0.4 do not say so
        del contender["weights"]
    contender.pop("error", None)  # what the judge allows does not change what runs
    case = [of_problem, contender, row["scope"], row["cache"]]
    return json.dumps(case, sort_keys=True)


@cache
def cases(run: str) -> pd.DataFrame:
    """Return the cases that every process of a run timed, with their samples by process."""
    by_case: dict[tuple[str, ...], dict] = {}
    for row, problem, contender in rows(run):
        if row["status"] != "ok" or not row["samples_us"]:
            continue
        key = key_of(row)
        place = json.dumps([run, problem, row["scope"], row["cache"]])
        case = by_case.setdefault(key, {"place": place, "key": key, "timed": [], "peaks": Blocks()})
        share = limited(row["telemetry"] or {})
        case["timed"].append(
            Timed(
                row["clock"],
                row["replicate"],
                by_block(row),
                row["samples_us"],
                statistics.median(row["samples_us"]),
                row["device"],
                share,
            )
        )
        case.setdefault("compiled", set()).update({row.get("code")} - {None})
        for load, facts in (row.get("loads") or {}).items():
            loads = case.setdefault("loads", {}).setdefault(load, {})
            loads[row["replicate"]] = facts["us_per_call"]
        case["peaks"][row["replicate"]] = np.array([row["peak_bytes"] or 1.0])
        fields = problem["fields"]
        case |= {
            **{"skew": "iid", "pattern": "dense", "active": None, "weights": "pruned"},
            **{**fields, **contender},
            **{"op": problem["op"], "scope": row["scope"], "cache": row["cache"]},
            "label": label_of(contender),
            "chose_dense": (row["choice"] or {}).get("way") == "dense",  # a portfolio
            "fields": sorted(fields.items()),
            "tokens": str(fields.get("m", "")),
            "n × k": f"{fields['n']} × {fields['k']}" if "n" in fields else "",
            "zeros": fields.get("sparsity"),
            "sweep": json.dumps([run, {n: v for n, v in fields.items() if n != "sparsity"}]),
            "sparsity": f"{round(100 * fields.get('sparsity', 0), 2):g} %",
            "source": (problem["source"] or {}).get("path"),
            "achieved": f"{round(100 * (row['sparsity'] or 0), 2):g} %",
        }
    most = max(len(case["timed"]) for case in by_case.values())
    whole = [case for case in by_case.values() if len(case["timed"]) == most]
    for case in whole:
        clocks = [timed.clock for timed in case["timed"]]
        same = [timed for timed in case["timed"] if timed.clock == max(clocks, key=clocks.count)]
        case["blocks"] = Blocks({timed.process: timed.block_us for timed in same})
        case["blocks"].compiled, case["blocks"].loads = case["compiled"], case.pop("loads", {})
        case["blocks"].cards = {timed.process: timed.card for timed in same}
        medians = [timed.median_us for timed in same]
        case["median_us"] = np.median(medians)
        case["ends_us"] = [min(medians), max(medians)]  # as pages show them beside a time
        if len(same) == 1:
            case["ends_us"] = [*np.quantile(same[0].samples_us, [0.25, 0.75])]
        shares = [timed.limited for timed in same if not np.isnan(timed.limited)]
        case["limited"] = f"{sum(share > 0.2 for share in shares)} of {len(same)}"
        case["device"] = device(run)
    bases = [case for case in reversed(whole) if case["baseline"]]
    bases.sort(key=lambda case: case["weights"] == "original")  # the last one counts
    pruned = {case["place"]: case for case in bases if case["weights"] != "original"}
    bases = {case["place"]: case for case in bases}
    inherited = json.loads((HOME / run / "run.json").read_text()).get("choices") == "bundle"
    for case in whole:
        blocks, base = case["blocks"], bases.get(case["place"], case)
        length = LENGTHS[int(np.searchsorted(EDGES_US, case["median_us"], side="right"))]
        blocks.stratum, blocks.inherited = f"{case['kernel']}, {length}", inherited
        blocks.op, blocks.scope = case["op"], case["scope"]
        both = blocks.keys() & base["blocks"].keys()
        blocks.logs = dict(zip(both, logs_of(blocks, base["blocks"]), strict=True))
        case["base"] = base["label"]
        on_same = pruned.get(case["place"], {"label": None, "blocks": Blocks()})
        case["pruned_base"], both = on_same["label"], blocks.keys() & on_same["blocks"].keys()
        over_zeros = logs_of(blocks, on_same["blocks"])
        blocks.over_zeros = dict(zip(both, over_zeros, strict=True))
    return pd.DataFrame(whole, dtype=object)


@cache
def keys(run: str) -> frozenset[str]:
    """Return the keys of a run's cases."""
    return frozenset(cases(run).key)


@cache
def every_case() -> pd.DataFrame:
    """Return the cases of all runs; `level` is the share of zeros or of inactive units: 95 %."""
    table = pd.concat([cases(run) for run in runs()], ignore_index=True)
    inactive = 1 - (table.active / table.n).astype(float)
    zeros = table.zeros.astype(float).where(table.zeros > 0, inactive)
    return table.assign(level=[f"{100 * part:.0f} %" for part in zeros])


def limited(sensors: dict) -> float:
    """Return the share of time in which power, heat or the board lowered the clock."""
    counters = [sensors.get(f"{name}_us") for name in ("power_capped", "thermal", "hardware")]
    slow_us = [counter for counter in counters if counter is not None]
    timed = slow_us and sensors.get("seconds")
    return max(slow_us) / (1e6 * sensors["seconds"]) if timed else np.nan


def logs_of(ours: dict, other: dict) -> np.ndarray:
    """Return the log of the speedup of each process that both sides have."""
    pairs = [(ours[process], other[process]) for process in ours.keys() & other.keys()]
    return np.array([np.median(np.log(b[: len(a)] / a[: len(b)])) for a, b in pairs])


def dense(contest: pd.DataFrame) -> pd.Series:
    """Return the dense contenders that gains are over; a portfolio is if it chose a dense kernel.

    Those with unpruned weights stand for all, if the contest has one.
    """
    stored = (contest.format == "dense") & ~contest.kernel.isin(OURS)
    return (stored | contest.chose_dense.astype(bool)) & ~on_zeros(contest)


def on_zeros(contest: pd.DataFrame) -> pd.Series:
    """Return which dense contenders multiply zeros beside one that has none."""
    unpruned = contest.weights == "original"
    beside = unpruned.groupby(contest.place).transform("any")
    is_dense = (contest.format == "dense") | contest.chose_dense.astype(bool)
    return is_dense & beside & ~unpruned


def usual(chosen: pd.DataFrame, scope: str = "kernel") -> pd.DataFrame:
    """Keep times of a scope with a cold cache and evenly spread active units, if there are any."""
    for name, value in {"scope": scope, "cache": "cold", "skew": "iid"}.items():
        chosen = chosen[chosen[name] == value] if (chosen[name] == value).any() else chosen
    return chosen

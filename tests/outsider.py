"""Compute the published figures again from rows.jsonl.gz, without importing the project.

    python tests/outsider.py [ROOT [SITE]]    print each figure that the rows do not give; exit 1

The pages are README.md and results/published/README.md of a checkout (headline, caption, terminal,
list of runs, digests). In a site they are the index, the answer at the top of each run, the grids
of formats and kernels, and the cells of claims. A figure must agree to its last digit:

    T_b = median of the samples of block b      d_p = median over b of log(T_b other / T_b ours)
    ratio = exp(d_p)                             1 process; brackets: quartiles of its blocks
          = exp(mean of d_p)                     2 to 5 processes; brackets: least and greatest
          = exp(median of the Walsh averages)    6 and more; brackets: 95 % signed-rank interval,
                                                 to which the variation between cards is added
                                                 in squares
    break-even = the measured levels between which the ratio rises above 1 for good
"""

import gzip
import hashlib
import html
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

ROOT = Path(sys.argv[1] if __name__ == "__main__" and sys.argv[1:] else Path(__file__).parents[1])
HOME = ROOT / "results/published"
FAMILIES = "bitmap", "bsr", "csr", "twell", "spense"
FILES = [file for name in FAMILIES for file in (ROOT / "kernels" / name).glob("*.py")]
OURS = {file.stem for file in FILES}
OURS |= {f"{file.stem}_dgrad" for file in FILES if "\nDGRAD = " in file.read_text()}
FORMATS = {"BSR": "bsr", "CSR": "csr", "2:4": "spense", "bitmap": "bitmap"}
METRICS = {  # the values of claims, from a ratio and the density
    "speedup, ×": lambda ratio, density: ratio,
    "of_ideal, %": lambda ratio, density: 100 * ratio * density,
    "memory_saved, %": lambda ratio, density: 100 * (1 - 1 / ratio),
}
FIGURE = re.compile(r"(-?[\d.]+)(?:×| %)?(?: \[(-?[\d.]+), (-?[\d.]+)\])?")
CAPTION = r"At \d+ % sparsity: .*\(|```\n[^`]*×[^`]*```|dense cuBLAS \(.*?µs\)|runs \*\*.*? as fast"


class Timed(NamedTuple):
    """A row with times: the medians of its blocks and of its samples, and what ran it."""

    clock: str
    process: int
    block_us: np.ndarray
    median_us: float
    card: str
    limited: float


class Blocks(dict):
    """Times by block of a case, by process, and what its intervals need beside them.

    `logs` are its log speedups by process, `cards` the GPU of each process, `state` is free,
    limited or inherited.
    """

    logs: dict[int, float]
    cards: dict[int, str]
    state: str
    __hash__ = object.__hash__  # each case has one, so that its ratios can be kept


def runs() -> list[str]:
    """Name every published run: GPU/NAME."""
    return sorted(f"{file.parts[-3]}/{file.parts[-2]}" for file in HOME.glob("*/*/run.json"))


def digest(run: str) -> str:
    """Return the SHA-256 of a run's manifest, whose start is part of its folder in a site."""
    return hashlib.sha256((HOME / run / "manifest.json").read_bytes()).hexdigest()


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
    return f"{contender['format']}/{contender['kernel']} {options}".strip()


@cache
def cases(run: str) -> pd.DataFrame:
    """Return the cases that every process of a run timed, with their samples by process."""
    found: dict[tuple[str, ...], dict] = {}
    for row, problem, contender in rows(run):
        if row["status"] != "ok" or not row["samples_us"]:
            continue
        key = json.dumps([problem, contender, row["scope"], row["cache"]])
        place = json.dumps([run, problem, row["scope"], row["cache"]])
        case = found.setdefault(key, {"place": place, "key": key, "timed": [], "peaks": Blocks()})
        share = limited(row["telemetry"] or {})
        case["timed"].append(
            Timed(
                row["clock"],
                row["replicate"],
                by_block(row),
                float(np.median(row["samples_us"])),
                row["device"],
                share,
            )
        )
        case["peaks"][row["replicate"]] = np.array([row["peak_bytes"] or 1.0])
        fields = problem["fields"]
        case |= {
            **{"skew": "iid", "pattern": "dense", "active": None, **fields, **contender},
            **{"op": problem["op"], "scope": row["scope"], "cache": row["cache"]},
            "label": label_of(contender),
            "chose_dense": (row["choice"] or {}).get("way") == "dense",  # a portfolio
            "fields": sorted(fields.items()),
            "tokens": str(fields["m"]),
            "n × k": f"{fields['n']} × {fields['k']}" if "n" in fields else "",
            "zeros": fields.get("sparsity"),
            "sweep": json.dumps([run, {n: v for n, v in fields.items() if n != "sparsity"}]),
            "sparsity": f"{round(100 * fields.get('sparsity', 0), 2):g} %",
            "source": (problem["source"] or {}).get("path"),
        }
    most = max(len(case["timed"]) for case in found.values())
    whole = [case for case in found.values() if len(case["timed"]) == most]
    for case in whole:
        clocks = [timed.clock for timed in case["timed"]]
        same = [timed for timed in case["timed"] if timed.clock == max(clocks, key=clocks.count)]
        case["blocks"] = Blocks({timed.process: timed.block_us for timed in same})
        case["blocks"].cards = {timed.process: timed.card for timed in same}
        case["median_us"] = np.median([timed.median_us for timed in same])
        shares = [timed.limited for timed in same if not np.isnan(timed.limited)]
        case["limited"] = np.median(shares) if shares else np.nan
        case["device"] = device(run)
    bases = {case["place"]: case for case in reversed(whole) if case["baseline"]}
    inherited = json.loads((HOME / run / "run.json").read_text()).get("choices") == "bundle"
    for case in whole:
        blocks, base = case["blocks"], bases.get(case["place"], case)
        of_board = "limited" if case["limited"] > 0.2 else "free"
        blocks.state = "inherited" if inherited else of_board
        both = blocks.keys() & base["blocks"].keys()
        blocks.logs = dict(zip(both, logs_of(blocks, base["blocks"]), strict=True))
        case["base"] = base["label"]
    return pd.DataFrame(whole, dtype=object)


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


@cache
def verdicts(run: str) -> dict[str, tuple[str, Blocks]]:
    """Return the baseline and the times of each case that 6 processes or more timed on GPUs."""
    lines = cases(run)
    lines = lines[(lines.label != lines.base) & ~lines.twin.astype(bool)]
    return {
        key: (base, blocks)
        for key, base, blocks in zip(lines.key, lines.base, lines.blocks, strict=True)
        if len(blocks.logs) >= 6 and all(card.startswith("GPU-") for card in blocks.cards.values())
    }


def build_of(run: str) -> list:
    """Return the code and the libraries of a run, and its kind of GPU."""
    facts = json.loads((HOME / run / "environment.json").read_text())
    names = [facts["versions"].get(name) for name in ("torch", "cuda", "triton")]
    return [device(run), facts["code_sha256"], *names]


@cache
def repeats() -> pd.DataFrame:
    """Return the cases that two runs with one code measured on different cards, the older first."""
    started = {run: json.loads((HOME / run / "run.json").read_text())["started"] for run in runs()}
    lines = []
    for pair in combinations(sorted(runs(), key=started.get), 2):
        if build_of(pair[0]) != build_of(pair[1]):
            continue
        a, b = map(verdicts, pair)
        for key in a.keys() & b.keys():
            (base, one), (other_base, two) = a[key], b[key]
            cards = [{*one.cards.values()}, {*two.cards.values()}]
            if base != other_base or cards[0] & cards[1] or one.state == "inherited":
                continue
            logs = [np.array([*side.logs.values()]) for side in (one, two)]
            parts = np.array([side.var(ddof=1) / len(side) for side in logs])
            d, counts = logs[1].mean() - logs[0].mean(), [1 / len(side) for side in cards]
            freedom = parts.sum() ** 2 / (parts**2 / [len(side) - 1 for side in logs]).sum()
            half = student(freedom) * parts.sum() ** 0.5
            lines.append((pair, *logs, one.state, two.state, *counts, d**2 - parts.sum(), d, half))
    names = "pair", "one", "two", "a", "b", "of_a", "of_b", "excess", "d", "half"
    return pd.DataFrame(lines, columns=names)


@cache
def variation(without: tuple[str, str] | None = None) -> dict[str, tuple[float, float]]:
    """Return the standard deviation over cards and its degrees of freedom, by state."""
    lines = repeats()
    lines = lines[lines.pair != without]
    inherited, slow = lines.b == "inherited", (lines[["a", "b"]] == "limited").any(axis=1)
    by_state: dict[str, tuple[float, float]] = {}
    for state, chosen in (
        ("free", ~inherited & ~slow),
        ("limited", ~inherited & slow),
        ("inherited", inherited),
    ):
        same = lines[chosen] if lines[chosen].pair.nunique() > 1 else lines[~inherited]
        weight, excess = same.of_a + same.of_b, same.excess
        if state == "inherited":
            of_first = same.a.map(lambda first: by_state[first][0] ** 2)
            weight, excess = same.of_b, excess - of_first * same.of_a
        variance = max(0.0, excess.sum() / weight.sum())
        scatter = (excess - variance * weight).groupby(same.pair).sum()
        error = (scatter**2).sum() / weight.sum() ** 2 * len(scatter) / (len(scatter) - 1)
        estimate = variance**0.5, max(1.0, 2 * variance**2 / error)
        by_state[state] = max(
            [estimate, *by_state.values()], key=lambda entry: entry[0] * student(entry[1])
        )
    return {state: (round(sd, 6), round(freedom, 3)) for state, (sd, freedom) in by_state.items()}


def agreement(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the table of two cards that the runs do not give."""
    for line in lines:
        both = repeats()
        of_kind = (both.b == "inherited") == line[2].startswith("the second")
        names = both.pair.map(lambda pair: " ".join(run.rpartition("/")[2] for run in pair))
        both = both[of_kind & ((names == " ".join(line[:2])) | (line[0] == "all"))]
        checks = [agreements(repeat) for repeat in both.itertuples()]
        expected = [f"{count} of {len(both)}" for count in np.sum(checks, axis=0)]
        if line[3:] != [str(len(both)), *expected]:
            yield f"{line}: found {expected}"


def agreements(repeat: tuple) -> list[bool]:
    """Return whether the second value is inside, and the difference covers 0; then with cards."""
    checks = []
    for by_state in ({}, variation(repeat.pair)):
        cards = [
            student(by_state[state][1]) * by_state[state][0] * count**0.5 if by_state else 0.0
            for state, count in ((repeat.a, repeat.of_a), (repeat.b, repeat.of_b))
        ]
        (first, low, high), (second, *_) = (walsh(logs) for logs in (repeat.one, repeat.two))
        low, high = (
            first - np.hypot(first - low, cards[0]),
            first + np.hypot(high - first, cards[0]),
        )
        checks += [low <= second <= high, abs(repeat.d) <= np.hypot(repeat.half, np.hypot(*cards))]
    return checks


@cache
def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t: its tangent is spread as a power of a cosine."""
    angle = np.linspace(0, np.pi / 2, 100001)
    density = np.cos(angle) ** (freedom - 1)
    share = np.append(0, np.cumsum((density[1:] + density[:-1]) / 2))
    return float(freedom**0.5 * np.tan(np.interp(0.95, share / share[-1], angle)))


def between(ours: dict) -> float:
    """Return the half that cards add to the logarithm of a ratio."""
    cards = [*getattr(ours, "cards", {}).values()]
    if len(cards) < 6 or not all(card.startswith("GPU-") for card in cards):
        return 0.0
    (sd, freedom), count = variation()[ours.state], len({*cards})
    if count > 1:  # they also measured it themselves
        logs = pd.Series(ours.logs).groupby(pd.Series(ours.cards))
        noise = logs.apply(lambda card: ((card - card.mean()) ** 2).sum()).sum()
        noise *= (1 / logs.size()).mean() / max(1, len(ours.logs) - count)
        of_run = max(0.0, logs.mean().var(ddof=1) - noise)
        variance = (freedom * sd**2 + (count - 1) * of_run) / (freedom + count - 1)
        sd, freedom = variance**0.5, freedom + count - 1
    return student(freedom) * sd / count**0.5


@cache
def every_case() -> pd.DataFrame:
    """Return the cases of all runs; `level` is the share of zeros or of inactive units: 95 %."""
    found = pd.concat([cases(run) for run in runs()], ignore_index=True)
    inactive = 1 - (found.active / found.n).astype(float)
    zeros = found.zeros.astype(float).where(found.zeros > 0, inactive)
    return found.assign(level=[f"{100 * part:.0f} %" for part in zeros])


@cache
def ratio(ours: Blocks, other: Blocks) -> tuple[float, float, float]:
    """Return how many times as fast `ours` is, and the ends of the interval."""
    d = logs_of(ours, other)
    n = len(d)
    if n == 1:
        (process,) = ours.keys() & other.keys()
        both = min(len(ours[process]), len(other[process]))
        logs = np.log(other[process][:both] / ours[process][:both])
        return tuple(np.exp([d[0], *np.quantile(logs, [0.25, 0.75])]))
    if n < 6:
        return tuple(np.exp([d.mean(), d.min(), d.max()]))
    (middle, low, high), cards = walsh(d), between(ours)
    low, high = np.hypot(middle - low, cards), np.hypot(high - middle, cards)
    return tuple(np.exp([middle, middle - low, middle + high]))


def walsh(d: np.ndarray) -> tuple[float, float, float]:
    """Return the median of the Walsh averages, and the ends of the signed-rank interval."""
    n = len(d)
    averages = np.sort([(d[i] + d[j]) / 2 for i in range(n) for j in range(i, n)])
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    k = np.searchsorted(np.cumsum(ways / 2.0**n), 0.025, side="right")
    return np.median(averages), averages[k - 1], averages[-k]


def agrees(shown: str, value: float) -> bool:
    """Return whether a number is a value to the last digit shown; closing zeros do not count."""
    after = len(shown.partition(".")[2])
    unit = 10.0**-after if after else 10.0 ** (len(shown) - len(shown.rstrip("0")))
    return abs(float(shown) - value) <= unit * 0.5000001


def shows(text: str, values: tuple[float, ...]) -> bool:
    """Return whether a text starts with a value, with or without the ends of its interval."""
    shown = FIGURE.match(text)
    pairs = zip(shown.groups() if shown else (), values, strict=False)
    return bool(shown) and all(agrees(text, value) for text, value in pairs if text)


def fastest(contest: pd.DataFrame, eligible: pd.Series) -> pd.Series | None:
    """Return the eligible contender with the largest ratio over the contest's baseline."""
    base, some = contest[contest.baseline], contest[eligible]
    if base.empty or some.empty:
        return None
    gains = [ratio(blocks, base.blocks.iloc[0])[0] for blocks in some.blocks]
    return some.assign(gain=gains).sort_values(["gain", "label"], ascending=[False, True]).iloc[0]


def dense(contest: pd.DataFrame) -> pd.Series:
    """Return which contenders are dense; a portfolio is if it chose a dense kernel."""
    stored = (contest.format == "dense") & ~contest.kernel.isin(OURS)
    return stored | contest.chose_dense.astype(bool)


def usual(found: pd.DataFrame, scope: str = "kernel") -> pd.DataFrame:
    """Keep times of a scope with a cold cache and evenly spread active units, if there are any."""
    for name, value in {"scope": scope, "cache": "cold", "skew": "iid"}.items():
        found = found[found[name] == value] if (found[name] == value).any() else found
    return found


def table(page: str, start: str) -> list[list[str]]:
    """Return the lines of the Markdown table whose header starts so."""
    lines = page[page.index(f"| {start}") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def published(page: str) -> Iterator[str]:
    """Yield each figure of results/published/README.md that the bundles do not give."""
    yield from headline(table(page, "question"))
    file = json.loads((ROOT / "results/between_cards.json").read_text())["variation"]
    for state, (sd, freedom) in variation().items():
        if (file[state]["sd"], file[state]["freedom"]) != (sd, freedom):
            yield f"between_cards.json, {state}: found {sd}, {freedom}"
    yield from listed(table(page, "run | suite"))
    yield from agreement(table(page, "first run"))
    expected = {f"{digest(run)}  {run}/manifest.json" for run in runs()}
    yield from expected ^ {*re.findall(r"^[0-9a-f]{64}  .*$", page, re.MULTILINE)}


def headline(lines: list[list[str]]) -> Iterator[str]:
    """Yield each speedup of the headline that its run, or the run that confirms it, lacks."""
    for line in lines:
        (run,) = re.findall(r"\((.*?)\)", line[13])
        inside, _, single = line[8].partition(" inside a chain; isolated ")
        scope = "chain" if single else "kernel"
        contest = same_problem(usual(cases(run), scope), line)
        confirmed = [
            same_problem(usual(cases(other), scope), line)
            for other in runs()
            if confirms(other, run)
        ]
        isolated = [same_problem(usual(cases(run)), line)]
        shown = [(inside, [contest]), (line[10], confirmed)]
        shown += [(single, isolated)] if single else []
        for cell, contests in shown:
            if cell != "not yet" and not any(over_baseline(cell, c, line) for c in contests):
                yield f"{line[0]} {cell}"
        share = re.search(r"heat for (\d+) %", line[14])
        ours = contest[contest.kernel == line[7].split("`")[1]].limited
        if not any(agrees(share[1] if share else "0", 100 * case) for case in ours):
            yield f"{line[0]} {line[14]}"
        peer, gain = line[11].replace("`", "").split()
        best = fastest(contest, ~contest.kernel.isin(OURS))
        if best is None or best.kernel != peer or not shows(gain, (best.gain,)):
            yield f"{line[0]} {line[11]}"


def same_problem(found: pd.DataFrame, line: list[str]) -> pd.DataFrame:
    """Keep the cases of the problem that a line of the headline names."""
    _, _, op, shape, dtype, tokens, level, *_ = line
    for name, value in {"op": op, "n × k": shape, "dtype": dtype, "tokens": tokens}.items():
        found = found[found[name] == value]
    if level.endswith("active"):
        return found[found.active == float(level.split()[0])]
    level, _, block = level.partition(", ")
    found = found[found.sparsity == level]
    return found[found.block.astype(str) == side(block)] if block else found


def side(blocks: str) -> str:
    """Return a block as rows name it: 64 for `64 × 64 blocks`, 16x32 for `16 × 32 blocks`."""
    rows, columns = blocks.removesuffix(" blocks").split(" × ")
    return rows if rows == columns else f"{rows}x{columns}"


def over_baseline(cell: str, contest: pd.DataFrame, line: list[str]) -> bool:
    """Return whether our kernel of a line has this speedup over its baseline in a contest."""
    kernel, base = line[7].split("`")[1], contest[contest.label == line[9]]
    ours = contest[contest.kernel == kernel]
    return any(shows(cell, ratio(blocks, base.blocks.iloc[0])) for blocks in ours.blocks)


def confirms(run: str, screened: str) -> bool:
    """Return whether a run measured chosen cases of another one alone."""
    state = json.loads((HOME / run / "run.json").read_text())
    return (state.get("confirms") or {}).get("manifest_sha256") == digest(screened)


@cache
def with_factors() -> pd.DataFrame:
    """Return all cases with `factor`: the time over the least of any run of the same case."""
    every = every_case()
    what = [every[name].map(json.dumps) for name in ("fields", "params", "options")]
    keys = ["device", "op", "source", "kernel", "scope", "cache", *what]
    least = every.groupby(keys, dropna=False).median_us.transform("min")
    return every.assign(factor=every.median_us / least)


@cache
def counted(run: str) -> tuple[set[str], set[int], dict[str, bool]]:
    """Return a run's problems, its processes, and whether each case was ever power-limited."""
    problems, processes, limited = set(), set(), {}
    for row, problem, contender in rows(run):
        key = json.dumps([problem, contender, row["scope"], row["cache"]])
        problems.add(json.dumps(problem))
        sensors = row["telemetry"] or {}
        share = sensors.get("power_capped_us", 0) / (1e6 * sensors.get("seconds", np.inf))
        limited[key] = limited.get(key, False) or share > 0.2
        processes.add(row["replicate"])
    return problems, processes, limited


def listed(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the list of runs that its bundle does not give."""
    every = with_factors()
    for line in lines:
        (run,) = re.findall(r"\((.*?)\)", line[0])
        problems, processes, limited = counted(run)
        found = cases(run)
        slow = every[every.place.isin(found.place) & ~every.kernel.isin(OURS)].factor
        slow = slow[slow > 1.1]
        facts = (HOME / run / "environment.json").read_text()
        cards = sorted({uuid[:8] for uuid in re.findall(r'"uuid": "(?:GPU-)?(.*?)"', facts)})
        expected = [", ".join(cards), *(str(len(each)) for each in (problems, limited, processes))]
        expected += [f"{sum(limited[key] for key in found.key)} of {len(found)}"]
        expected += [f"{len(slow)}, to {max(slow):.2f}" if len(slow) else "0"]
        if [*line[4:8], *line[-2:]] != expected:
            yield f"{line}: found {expected}"


def stated(text: str, found: pd.DataFrame) -> Iterator[str]:
    """Yield each number of a text that no case gives: 4.85×, [4.83, 4.86], 33.9 µs."""
    gains = []
    for _, contest in found.groupby("place"):
        for base in contest.blocks[contest.baseline | dense(contest)]:
            gains += [ratio(blocks, base) for blocks in contest.blocks]
    times = [time * unit for time in found.median_us for unit in (1, 1e-3)]
    leads = [
        ratio(ours, next_one)[0]
        for _, contest in found.groupby("place")
        for ours in contest.blocks
        for next_one in contest.blocks
    ]
    for number in re.findall(r"([\d.]+)× faster than", text):
        if not any(agrees(number, lead) for lead in leads):
            yield f"{number}× faster"
    for number in re.findall(r"([\d.]+)(?:×(?! faster than)| \[)", text):
        if not any(agrees(number, gain[0]) for gain in gains):
            yield number
    for low, high in re.findall(r"\[([\d.]+), ([\d.]+)\]", text):
        if not any(agrees(low, gain[1]) and agrees(high, gain[2]) for gain in gains):
            yield f"[{low}, {high}]"
    for number in re.findall(r"([\d.]+)(?= [µm]s| to \d+ µs)", text):
        if not any(agrees(number, time) for time in times):
            yield f"{number} µs or ms"


def captions(page: str) -> Iterator[str]:
    """Yield each number of the finding, the caption and the terminal that no case gives."""
    (swept,) = (run for run in runs() if run.endswith("/sparsity-4096"))
    for text in re.findall(CAPTION, page):
        yield from stated(text, cases(swept))


def listed_runs(page: str) -> Iterator[str]:
    """Yield each figure of a site's list of runs that the runs do not give."""
    row = r'<tr id="[^"]*"><td class="wrap"><a href="(.*?)/index.html">(.*?)</tr>'
    for name, line in re.findall(row, page):
        run = at_address(name)
        text = re.sub(r"<[^>]*>", " ", line)
        yield from (f"{run} {each}" for each in stated(html.unescape(text), cases(run)))


def at_address(address: str) -> str:
    """Return the run at an address of a site, such as h200/sparsity-4096; a name is enough."""
    name = address.rpartition("/")[2]
    (run,) = (run for run in runs() if run.endswith(f"/{name}"))
    return run


def answer(file: Path) -> Iterator[str]:
    """Yield each figure of the answer at the top of a run's page that the run does not give."""
    run = at_address(file.parent.name)
    page = re.sub(r"<(style|script).*?</\1>", "", file.read_text(), flags=re.DOTALL)
    top = page.partition('<p class="headline">')[2].partition("</p>")[0]
    answer = page.partition('<section id="answer">')[2].partition('<section id="measured">')[0]
    answer = re.sub(r"<svg.*?</svg>", "", answer, flags=re.DOTALL)
    yield from stated(html.unescape(re.sub(r"<[^>]*>", " ", top + answer)), cases(run))


def grids(page: str) -> Iterator[str]:
    """Yield each gain of a page's grids, by tokens and sparsity, that no run gives."""
    every = every_case()
    names = " ".join(f'data-{name}="([^"]*)"' for name in ("gpu", "op", "dtype", "tokens"))
    found = re.findall(f'data-grid="gains" {names}>(.*?)</table>', page, re.DOTALL)
    for gpu, op, dtype, tokens, grid in found:
        own = every[(every.device == html.unescape(gpu)) & (every.op == op)]
        own = own[(own.dtype == dtype) & (own.tokens == tokens)]
        for head, level, lines in re.findall(r'title="([^"]*?) at (.*?): (.*?)"', grid):
            for shape, name, gain in re.findall(r"n × k (.*?): (.*?), (.*?)(?:;|$)", lines):
                here = own[(own.sparsity == level) | (own.level == level)]  # 94.68 % is 95 %
                here = usual(here[(here["n × k"] == shape)])
                here = here[here.label.str.partition("/")[2] == name]
                block = head.rpartition("blocks of ")[2] if "blocks of " in head else ""
                here = here[[str(params.get("block", "")) == block for params in here.params]]
                if not any(over_dense(gain, case, every) for _, case in here.iterrows()):
                    yield f"m {tokens} {level} {shape} {head} {name} {gain}"


def over_dense(text: str, case: pd.Series, found: pd.DataFrame) -> bool:
    """Return whether a case has this speedup over the fastest dense contender of its contest."""
    contest = found[found.place == case.place]
    base = fastest(contest, dense(contest))
    return base is not None and shows(text, ratio(case.blocks, base.blocks))


def claimed(page: str) -> Iterator[str]:
    """Yield each cell of a claim's page whose value its run or its file does not give."""
    for text in re.findall(r"<thead><tr><th[^>]*>cell<.*?</table>", page, re.DOTALL):
        header, *lines = [
            [html.unescape(each) for each in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)]
            for line in re.split(r"<tr[^>]*>", text)[1:]
        ]
        for line in lines:
            shown = re.match(r"-?[\d.]+(?:×| %)", line[1]) and header[1] in METRICS
            if shown and not holds(header[1], line):
                yield " | ".join(line)


def holds(metric: str, line: list[str]) -> bool:
    """Return whether a cell's subject has its value over its baseline, in as many processes."""
    label, shown, _, subject, baseline, *_, source = line
    name, _, processes = source.rpartition(", ")
    if " of " in baseline:
        return beside_op(line)
    files = [file for kind in ("training", "whole") for file in HOME.glob(f"{kind}/{name}.json")]
    if files:
        return in_file(metric, json.loads(files[0].read_text()), line)
    run = at_address(name)
    found = labelled(cases(run), label)
    found = found[found.cache == "cold"]
    subject, baseline = (
        re.sub(r".*\(chosen by (.*)\)| \(.*", r"\1", who) for who in (subject, baseline)
    )
    column = "peaks" if metric.startswith("memory") else "blocks"
    for _, ours in found[named(found, subject)].iterrows():
        for other in found[(found.place == ours.place) & (found.label == baseline)][column]:
            density = 1 - (ours.zeros or 0)
            values = tuple(METRICS[metric](r, density) for r in ratio(ours[column], other))
            count = len(ours[column].keys() & other.keys())
            if count == int(processes.split()[0]) and shows(shown, values):
                return True
    return False


def beside_op(line: list[str]) -> bool:
    """Return whether a speedup over dense, divided by that of another op, is the cell's value."""
    label, subject, (other, op) = line[0], line[3], line[4].split(" of ")
    names, _, processes = line[-1].rpartition(", ")
    places = [at_address(name) for name in names.split(" over ")]
    sides: list[list[Blocks]] = []
    for run, where, who in (
        (places[0], label, subject),
        (places[-1], f"{op}, {label.partition(', ')[2]}", other),
    ):
        found = labelled(cases(run), where)
        found, sides = found[(found.cache == "cold") & (found.scope == "kernel")], [*sides, []]
        for _, ours in found[named(found, who)].iterrows():
            contest = found[found.place == ours.place]
            base = fastest(contest, contest.format == "dense").blocks
            both = ours.blocks.keys() & base.keys()
            logs = {p: np.log(ours.blocks[p] / base[p]) for p in both}
            sides[-1].append(Blocks({p: np.exp([np.median(log)]) for p, log in logs.items()}))
    return any(
        len(own) == int(processes.split()[0]) and shows(line[1], ratio(own, beside))
        for own in sides[0]
        for beside in sides[1]
    )


def in_file(metric: str, data: dict, line: list[str]) -> bool:
    """Return whether a cell's value is that of a training, by seed, or of a whole model."""
    label, subject, baseline = line[0], *(re.sub(r" \(.*", "", who) for who in line[3:5])
    if "trained" not in data:
        ours, other = (
            next(w for w in data["ways"] if [w["what"], w["mlp"]] == [label.split(",")[0], who])
            for who in (subject, baseline)
        )
        column = "peak_bytes" if metric.startswith("memory") else "times_us"
        value = METRICS[metric](np.median(other[column]) / np.median(ours[column]), 1)
        return shows(line[1], (value,)) and "[" not in line[1]
    trained = pd.DataFrame(data["trained"])
    dense_ones, factors = trained[trained.pattern == "dense"], []
    for one in trained.itertuples():
        name = f"train-lm, {100 * one.sparsity:.2f} %, {one.block} × {one.block} blocks, "
        if f"{name}weights {one.pattern}, width {one.width}" == label:
            enough = dense_ones[
                (dense_ones.seed == one.seed) & (dense_ones.parameters >= one.parameters)
            ]
            if len(enough):
                factors.append(enough.loc[enough.parameters.idxmin()].step_us / one.step_us)
    return shows(line[1], (np.exp(np.log(factors).mean()), min(factors), max(factors)))


def named(found: pd.DataFrame, label: str) -> pd.Series:
    """Return which contenders have a name; older rows name the format of the weights, dense."""
    return found.label.str.partition("/")[2] == label.partition("/")[2]


def labelled(found: pd.DataFrame, label: str) -> pd.DataFrame:
    """Keep the cases that a cell names: linear, bf16, m 64, 4096 × 4096, active 29."""
    for part in label.split(", "):
        name, _, value = part.rpartition(" ")
        if part.endswith(" %"):
            found = found[found.sparsity == part]
        elif part.endswith(" blocks"):
            found = found[found.block.astype(str) == side(part)]
        elif " × " in part:
            found = found[found["n × k"] == part]
        elif not name:
            found = found[(found.op == part) | (found.dtype == part)]
        else:
            column = {"m": "tokens"}.get(name, name)
            own = found[column].map(lambda v: f"{v:g}" if isinstance(v, int | float) else str(v))
            found = found[own == value]
    return found


def main() -> int:
    """Print what the rows do not give, on the pages of a checkout and of a site."""
    page, readme = (HOME / "README.md").read_text(), (ROOT / "README.md").read_text()
    wrong = [*published(page), *captions(page), *captions(readme)]
    readers = {"index.html": grids, "runs.html": listed_runs, "formats/*": grids}
    readers |= {"kernels/*": grids, "claims/*.html": claimed, "*/*/index.html": answer}
    for site in map(Path, sys.argv[2:]):
        for pattern, reader in readers.items():
            for file in sorted(site.glob(pattern)):
                if file.parent.parent.name != "runs":  # these lead to the runs
                    given = file if reader is answer else file.read_text()
                    wrong += [f"{file.relative_to(site)}: {each}" for each in reader(given)]
    print("\n".join(wrong) or "every figure is found")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

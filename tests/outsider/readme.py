"""The figures of README.md and of results/published/README.md.

They are the headline and what changed, what users get, GPU time, the captions, the terminal, the
list of runs, the tables of two cards and the digests. Each function yields the figures that the
rows do not give.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest

import numpy as np
import pandas as pd

from tests.outsider.ratios import (
    agreements,
    agrees,
    chains,
    fastest,
    ratio,
    repeats,
    shows,
    unlikely,
    variation,
)
from tests.outsider.rows import (
    HOME,
    LENGTHS,
    OURS,
    ROOT,
    Blocks,
    cases,
    dense,
    digest,
    earlier,
    every_case,
    key_of,
    keys,
    on_zeros,
    rows,
    runs,
    usual,
)

TALLY: Counter[str] = Counter()
"""How many figures were looked up, by function."""

CAPTION = r"\*\*Faster than .*?\*\*|```\n[^`]*×[^`]*```|over dense[^()]*\([^()]* to [^()]*\)"


def published(page: str) -> Iterator[str]:
    """Yield each figure of results/published/README.md that the bundles do not give."""
    yield from headline(table(page, "question"))
    if "| question | before" in page:
        yield from changes(table(page, "question | before"), table(page, "question"))
    yield from users(page)
    yield from gpu_time(table(page, "page | runs"))
    file = json.loads((ROOT / "results/between_cards.json").read_text())
    shown = {**file["classes"], **file["strata"]}
    for name, (sd, freedom) in variation().items():
        entry = shown.pop(name, {"sd": np.nan, "freedom": np.nan})
        away = abs(entry["sd"] - sd), abs(entry["freedom"] - freedom)
        if not (away[0] <= 3e-6 and away[1] <= 0.01):  # which is of speedups rounded to 1e-6
            yield f"between_cards.json, {name}: found {sd}, {freedom}"
    if shown or {*file["chains"]} != chains():
        yield f"between_cards.json: found {[*variation()]}, {chains()}"
    yield from listed(table(page, "run | suite"))
    yield from strata(table(page, "stratum"))
    yield from agreement(table(page, "first run"))
    expected = {f"{digest(run)}  {run}/manifest.json" for run in [*runs(), *earlier()]}
    yield from expected ^ {*re.findall(r"^[0-9a-f]{64}  .*$", page, re.MULTILINE)}


def headline(lines: list[list[str]]) -> Iterator[str]:
    """Yield each speedup of the headline that its run, or the run that confirms it, lacks."""
    for question, problem, kernel, gain, over, peer, alone, everywhere, measured, place in lines:
        (run,) = re.findall(r"\((.*?)\)", place)
        inside, _, single = gain.partition(" inside a chain; isolated ")
        scope, confirming = "chain" if single else "kernel", [r for r in runs() if confirms(r, run)]
        contest = same_problem(usual(cases(run), scope), problem)
        shown = [(inside, [contest])]
        shown += [(alone, [same_problem(usual(cases(r), scope), problem) for r in confirming])]
        shown += [(single, [same_problem(usual(cases(run)), problem)])] if single else []
        for cell, contests in shown:
            if cell != "not yet" and not any(
                over_dense(cell, each, named(kernel)) for each in contests
            ):
                yield f"{question} {cell}"
        ours = contest[contest.kernel == named(kernel)]
        limited = re.search(r"heat in (\d+ of \d+) process", measured)
        counts = [*ours.limited] if limited else [each.partition(" ")[0] for each in ours.limited]
        if (limited[1] if limited else "0") not in counts:
            yield f"{question} {measured}"
        if not any(ranges(everywhere, key, run.partition("/")[0]) for key in ours.key):
            yield f"{question} {everywhere}"
        peers = ~contest.kernel.isin({*OURS, "default"}) & ~on_zeros(contest)
        best, times = fastest(contest, peers), peer.split()[-1]
        if (
            best is None
            or best.kernel != named(peer)
            or not over_dense(times, contest, best.kernel)
        ):
            yield f"{question} {peer}"
        if over.partition("(")[2].split(",")[0].split()[0] not in {*contest[dense(contest)].kernel}:
            yield f"{question} {over}"


def changes(lines: list[list[str]], headlines: list[list[str]]) -> Iterator[str]:
    """Yield each earlier headline that its run lacks, and each that differs from the one now."""
    current = {line[0]: line for line in headlines}
    for question, before, now, *_ in lines:
        (run,) = re.findall(r"\((.*?)\)", current[question][9])
        gpu, _, name = run.partition("/")
        replaced = [r for r in earlier() if r.startswith(f"{gpu}/") and r.endswith(f"/{name}")]
        scope = "chain" if "(inside a chain" in before else "kernel"
        contest = same_problem(usual(cases(replaced[-1]), scope), current[question][1])
        if before != "another problem" and not over_dense(before, contest, named(before)):
            yield f"{question} {before}"
        if not current[question][3].startswith(now.partition(" `")[0]):
            yield f"{question} {now}"


def users(page: str) -> Iterator[str]:
    """Yield what the rows do not give: in how many cells users get the best kernel, and the others.

    A cell has the cases of one weight in one format, as kernels with a cold cache.
    """
    of_ours, of_all, behind = cells_of_users()
    section = page.partition("## What do users get?")[2].partition("\n## ")[0]
    counts = [f"{sum(each)} of {len(each)}" for each in (of_ours, of_all)]
    if (shown := re.findall(r" in (\d+ of \d+)", section)) != counts:
        yield f"users get the best kernel in {shown}: found {counts}"
    lines = table(section, "run | problem") if behind else []
    if len(lines) != len(behind):
        yield f"{len(lines)} cells with a faster kernel: found {len(behind)}"
    for line in lines:
        (run,) = re.findall(r"\((.*?)\)", line[0])
        cell = run, line[5].split()[0]
        same = [
            each
            for each in behind
            if each[:2] == cell and takes(line[4], each[2]) and takes(line[6], each[3])
        ]
        if not same:
            yield f"{line}"
        behind = [each for each in behind if each not in same[:1]]


@cache
def cells_of_users() -> tuple[list[bool], list[bool], list[tuple[str, str, float, float]]]:
    """Return where users get the best kernel of ours and of all, and the cells where they do not.

    Of each: its run, the best kernel, the time of the default and the best time.
    """
    every = every_case()
    here = every[(every.scope == "kernel") & (every.cache == "cold")]
    of_ours, of_all, behind = [], [], []
    for (place, *_), cell in here.groupby(["place", "format", here.params.map(json.dumps)]):
        if "default" not in cell.kernel.array:  # most of 3,000: sorting them takes seconds
            continue
        times = cell.set_index("kernel").median_us.astype(float).sort_values()
        others = times.drop("default")
        if others.empty:
            continue
        within = times["default"] <= 1.03 * others + 0.5
        of_ours += [*within[within.index.isin(OURS)][:1]]
        of_all += [within.iloc[0]]
        if not within.iloc[0]:
            of_cell = others.index[0], times["default"], others.iloc[0]
            behind.append((json.loads(place)[0], *of_cell))
    return of_ours, of_all, behind


def takes(shown: str, us: float) -> bool:
    """Return whether a text such as 1.40 ms is a time in µs."""
    number, unit = shown.split()
    return agrees(number, us / {"µs": 1, "ms": 1e3}[unit])


def gpu_time(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the table of GPU time that the runs' own seconds do not give."""
    states = {run: json.loads((HOME / run / "run.json").read_text()) for run in runs()}
    minutes = {run: states[run]["seconds"] / 60 for run in runs() if not run.startswith("cpu/")}
    measured = json.loads((HOME / "advice.json").read_text())
    curves = json.loads((HOME / "attention.json").read_text())["curves"]
    cells = json.loads(gzip.decompress((HOME / "cells.json.gz").read_bytes()))["cells"]
    pages = [
        {each["run"] for name in ("measured", "steps") for each in measured[name]},
        {point["run"] for curve in curves for point in curve["points"]},
        {cell["run"] for cell in cells},
        {run for pair in repeats().pair for run in pair},
        {*runs()},
    ]
    for line, names in zip(lines[2:], pages, strict=True):
        times = [minutes[name] for name in names if name in minutes]
        if line[1] != str(len(times)) or not agrees(line[2], sum(times)):
            yield f"{line}: found {len(times)}, {sum(times)}"


def named(cell: str) -> str:
    """Return the kernel of a cell such as `torch_bsr tuned=True` 3.56×."""
    return cell.split("`")[1].split()[0].rstrip(",")


def same_problem(matches: pd.DataFrame, problem: str) -> pd.DataFrame:
    """Keep the cases of a problem: linear, bf16, m 64, 4096 × 4096, 90 %, 32 × 32 blocks."""
    op, dtype, *parts = problem.split(", ")
    facts = {"op": op, "dtype": dtype}
    for part in parts:
        if part.startswith("m "):
            facts["tokens"] = part[2:]
        elif part.endswith(" blocks"):
            facts["block"] = side(part)
        elif " × " in part:
            facts["n × k"] = part
        elif part.endswith(" %"):
            facts["sparsity"] = part
        elif part.endswith(" active"):
            facts["active"] = part.split()[0]
    for name, value in facts.items():
        column = matches[name].map("{:g}".format) if name == "active" else matches[name].astype(str)
        matches = matches[column == value]
    return matches


def side(blocks: str) -> str:
    """Return a block as rows name it: 64 for `64 × 64 blocks`, 16x32 for `16 × 32 blocks`."""
    rows, columns = blocks.removesuffix(" blocks").split(" × ")
    return rows if rows == columns else f"{rows}x{columns}"


def over_dense(cell: str, contest: pd.DataFrame, kernel: str) -> bool:
    """Return whether a kernel has this speedup over a dense kernel in a contest."""
    ours, bases = contest[contest.kernel == kernel], contest[dense(contest)]
    pairs = [(blocks, other) for blocks in ours.blocks for other in bases.blocks]
    return any(shows(cell, ratio(*pair)) for pair in pairs)


@cache
def gains_of(key: str, gpu: str) -> list[float]:
    """Return the speedups of a case over dense in all runs of 6 processes on a GPU.

    A run that was replaced counts if the one in its place has the case.
    """
    gains = []
    for run in [*runs(), *earlier()]:
        now = f"{run.partition('/')[0]}/{run.rpartition('/')[2]}"
        if run.startswith(f"{gpu}/") and now in runs() and key in keys(now):
            (ours,) = [*cases(run)[cases(run).key == key].itertuples()] or [None]
            if ours is None or len(ours.blocks) < 6:
                continue
            contest = cases(run)[cases(run).place == ours.place]
            contest = contest[contest.weights != "original"]
            base = fastest(contest, dense(contest))
            gains += [ratio(ours.blocks, base.blocks)[0]] if base is not None else []
    return gains


def ranges(cell: str, key: str, gpu: str) -> bool:
    """Return whether a cell has the range of these speedups."""
    gains = gains_of(key, gpu)
    ends, count = re.findall(r"([\d.]+)×", cell), re.findall(r"in (\d+) run", cell)
    if count != [str(len(gains))]:
        return False
    return agrees(ends[0], min(gains)) and agrees(ends[-1], max(gains))


def confirms(run: str, screened: str) -> bool:
    """Return whether a run measured chosen cases of another one alone."""
    state = json.loads((HOME / run / "run.json").read_text())
    return (state.get("confirms") or {}).get("manifest_sha256") == digest(screened)


def listed(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the list of runs that its bundle does not give."""
    every = with_factors()
    chosen = (every.kernel == "default") & (every.format != "dense")
    peers = every[~every.kernel.isin(OURS) & ~chosen]
    for line in lines:
        (run,) = re.findall(r"\((.*?)\)", line[0])
        problems, processes, limited = counted(run)
        matches = cases(run)
        slow = peers[peers.place.isin(matches.place)].factor
        slow = slow[slow > 1.1]
        facts = (HOME / run / "environment.json").read_text()
        cards = sorted({uuid[:8] for uuid in re.findall(r'"uuid": "(?:GPU-)?(.*?)"', facts)})
        expected = [", ".join(cards), *(str(len(each)) for each in (problems, limited, processes))]
        expected += [f"{sum(limited[key] for key in matches.key)} of {len(matches)}"]
        expected += [f"{len(slow)}, to {max(slow):.2f}" if len(slow) else "0"]
        if [*line[4:8], *line[-2:]] != expected:
            yield f"{line}: found {expected}"


@cache
def with_factors() -> pd.DataFrame:
    """Return all cases with `factor`: the time over the least of any run of the same case."""
    every = every_case()
    least = every.groupby(["device", "key"]).median_us.transform("min")
    return every.assign(factor=every.median_us / least)


@cache
def counted(run: str) -> tuple[set[str], set[int], dict[str, bool]]:
    """Return a run's problems, its processes, and whether each case was ever power-limited."""
    problems, processes, limited = set(), set(), {}
    for row, problem, _ in rows(run):
        key = key_of(row)
        problems.add(json.dumps(problem))
        sensors = row["telemetry"] or {}
        share = sensors.get("power_capped_us", 0) / (1e6 * sensors.get("seconds", np.inf))
        limited[key] = limited.get(key, False) or share > 0.2
        processes.add(row["replicate"])
    return problems, processes, limited


def strata(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the table of strata that the runs do not give."""
    every = pd.Series(True, repeats().index)
    length = repeats().stratum.str.partition(", ")[2]
    chosen = {"all": every, **{op: repeats().op == op for op in sorted({*repeats().op})}}
    chosen |= {name: length == name for name in LENGTHS if (length == name).any()}
    counts = [
        (int(agreements().inside[which].sum()), int(which.sum())) for which in chosen.values()
    ]
    p = ["", *(f"{value:.2f}" for value in unlikely(counts[1:]))]
    expected = [
        [name, *shares(agreed(which)), of]
        for (name, which), of in zip(chosen.items(), p, strict=True)
    ]
    both = zip_longest(lines, expected)
    yield from (f"{line}: found {values}" for line, values in both if line != values)


def agreement(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the table of two cards that the runs do not give."""
    names = repeats().pair.map(lambda pair: [*map(named_in_list, pair)])
    for line in lines:
        expected = agreed(names.map(lambda pair, line=line: pair == line[:2]))
        if line[2:] != expected:
            yield f"{line}: found {expected}"


def agreed(which: pd.Series) -> list[str]:
    """Return the number of chosen repeats, and how many of them pass each check."""
    counts = agreements()[which.to_numpy()].sum()
    return [str(which.sum()), *(f"{count} of {which.sum()}" for count in counts)]


def shares(counts: list[str]) -> list[str]:
    """Add its share to each count of cases: `456 of 503, 91 %`."""
    every, *passed = counts
    return [every, *(f"{n}, {100 * int(n.split()[0]) / int(every):.0f} %" for n in passed)]


def named_in_list(run: str) -> str:
    """Name a run as the page does: NAME for the GPU with most runs, GPU/NAME for others."""
    gpus = [other.partition("/")[0] for other in runs()]
    same = [
        other.partition("/")[0] for other in runs() if other.endswith(f"/{run.partition('/')[2]}")
    ]
    gpu, _, name = run.partition("/")
    return name if gpu == max(same, key=gpus.count) else run


def captions(page: str) -> Iterator[str]:
    """Yield each number of the finding, the caption and the terminal that no case gives.

    They are of the first run that a page links as `sparsity-4096`; another GPU may have one, too.
    """
    swept = re.search(r"\[sparsity-4096\]\(\S*?([^/(]+/sparsity-4096)\)", page)
    assert swept
    matches = cases(swept[1])
    for text in re.findall(CAPTION, page):
        block = re.search(r", block (\d+);", text)
        yield from stated(text, matches[matches.block == int(block[1])] if block else matches)


def stated(text: str, matches: pd.DataFrame) -> Iterator[str]:
    """Yield each number of a text that no case gives: 4.85×, [4.83, 4.86], 33.9 µs."""
    rate = r"requests per second: .*?\[[^]]*\](?:, dense .*?\[[^]]*\])?"
    for shown in re.findall(rate, text):
        yield from requests(shown, matches)
    text, gains = re.sub(rate, "", text), []
    for _, contest in matches.groupby("place"):
        for base in contest.blocks[contest.baseline | dense(contest) | on_zeros(contest)]:
            gains += [ratio(blocks, base) for blocks in contest.blocks]
            gains += [(gain, gain, gain) for b in contest.blocks for gain in under_load(b, base)]
    times = [time * unit for time in matches.median_us for unit in (1, 1e-3)]
    leads = [
        ratio(ours, next_one)
        for _, contest in matches.groupby("place")
        for ours in contest.blocks
        for next_one in contest.blocks
    ]
    lead = r"([\d.]+×(?: \[[\d.]+, [\d.]+\])?) as fast as"
    for shown in re.findall(lead, text):
        TALLY["stated"] += len(re.findall(r"[\d.]+", shown.replace(",", "")))
        if not any(shows(shown, values) for values in leads):
            yield f"{shown} as fast"
    text = re.sub(lead, "", text)
    for number in re.findall(r"([\d.]+)(?:×| \[)", text):
        TALLY["stated"] += 1
        if not any(agrees(number, gain[0]) for gain in gains):
            yield number
    for low, high in re.findall(r"\[([\d.]+), ([\d.]+)\]", text):
        TALLY["stated"] += 2
        if not any(agrees(low, gain[1]) and agrees(high, gain[2]) for gain in gains):
            yield f"[{low}, {high}]"
    for number in re.findall(r"([\d.]+)(?= [µm]s| to \d+ µs)", text):
        TALLY["stated"] += 1
        if not any(agrees(number, time) for time in times):
            yield f"{number} µs or ms"


def requests(text: str, matches: pd.DataFrame) -> Iterator[str]:
    """Yield each rate that no server gives: requests per second: 526 [522, 526], dense 394 […]."""
    servers = matches[matches.op == "serving"]
    times = zip(servers.requests, servers.median_us, servers.ends_us, strict=True)
    rates = [tuple(1e6 * n / us for us in (middle, *ends[::-1])) for n, middle, ends in times]
    for shown in re.findall(r"[\d.]+ \[[\d.]+, [\d.]+\]", text):
        TALLY["stated"] += 3
        if not any(shows(shown, rate) for rate in rates):
            yield f"{shown} requests per second"


def under_load(ours: Blocks, base: Blocks) -> Iterator[float]:
    """Yield the speedup under each load: the median over processes of a ratio of times."""
    for load, times in ours.loads.items():
        others = base.loads.get(load, {})
        if both := times.keys() & others.keys():
            yield float(np.median([others[process] / times[process] for process in both]))


def table(page: str, start: str) -> list[list[str]]:
    """Return the lines of the Markdown table whose header starts so."""
    lines = page[page.index(f"| {start}") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]

"""An outsider's look: every figure of the published pages again, from rows.jsonl.gz alone.

    python tests/outsider.py [ROOT [SITE]]    prints each figure that is not found; then exits 1

Of a site these are its index, the answer that heads each run, the grids of formats and kernels, and
the cells of claims. What pruning and training cost is held against its records (JSON). Nothing of
the project is imported. A table's caption names its runs, what all its figures share and whom they
are over; labels of rows and columns name the problem, the cell or its row the kernel. The figure is
computed at that problem from raw samples, and agrees to the last digit shown:

    d_p = median over blocks of log(T_other / T_ours), T the median of a block's samples
    break-even = the two measured levels between which the mean log ratio last turns positive
    ratio = exp of d_p in one process (quartiles of its blocks), of their mean (least, greatest)
    below 6, from 6 on of the median of Walsh averages (95 % interval of the signed-rank test)
"""

import gzip
import hashlib
import html
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(sys.argv[1] if __name__ == "__main__" and sys.argv[1:] else Path(__file__).parents[1])
HOME = ROOT / "results/published"
FAMILIES = "bitmap", "bsr", "csr", "twell", "spense"
FILES = [file for name in FAMILIES for file in (ROOT / "kernels" / name).glob("*.py")]
OURS = {file.stem for file in FILES}
OURS |= {f"{file.stem}_dgrad" for file in FILES if "\nDGRAD = " in file.read_text()}
OPS = {"forward": "linear", "dX": "linear_dgrad", "dW": "linear_wgrad"}
EAGER = ["cublas", "torch_compile", "torch_dense"]
SAID = {"tokens ": "tokens", "sparsity ": "sparsity", "units on ": "units on"}
SAID |= {"blocks of ": "block", "n × k = ": "n × k"}
OVER = {  # who is meant by the words after `over`
    "the fastest peer, dense included": lambda c: ~c.kernel.isin(OURS),
    "the fastest sparse peer": lambda c: ~c.kernel.isin(OURS) & (c.format != "dense"),
    "cuSPARSELt or its hybrid": lambda c: c.kernel.str.startswith("cusparselt"),
    "the faster of eager cuBLAS and torch.compile": lambda c: c.kernel.isin(EAGER),
    "dense": lambda c: (c.format == "dense") & ~c.kernel.isin(OURS) | c.chose_dense.astype(bool),
    "the fastest dense": lambda c: c.kernel.isin([*EAGER, "cublas_ffn", "ffn_dense_triton"]),
    "eager cuBLAS": lambda c: c.kernel == "cublas",
    "torch.compile": lambda c: c.kernel == "torch_compile",
    "cuSPARSE's CSR": lambda c: c.kernel == "cusparse_csr",
    "itself untuned": lambda c: c.label.str.contains("tuned=False"),
}


NAMES = {"BSR": "bsr", "CSR": "csr", "2:4": "spense", "bitmap": "bitmap"}  # of formats
METRICS = {  # of a ratio and the density: what a claim is about
    "speedup, ×": lambda r, density: r,
    "of_ideal, %": lambda r, density: 100 * r * density,
    "memory_saved, %": lambda r, density: 100 * (1 - 1 / r),
}
FIGURE = re.compile(r"([\d.]+)(?: \[([\d.]+), ([\d.]+)\])?(?: \((\d+) processes\))?(?: `(\w+)`)?")
DRAWN = r"At \d+ %: .*blocks of \d+\.|```\n[^`]*×[^`]*```|Baseline: .*µs\)"


def runs() -> list[str]:
    """Name every published run: GPU/NAME."""
    return sorted(f"{file.parts[-3]}/{file.parts[-2]}" for file in HOME.glob("*/*/run.json"))


def digest(run: str) -> str:
    """Return what a site's folders have of the SHA-256 that names a bundle."""
    return hashlib.sha256((HOME / run / "manifest.json").read_bytes()).hexdigest()[:10]


def device(run: str) -> str:
    """Return the name of the GPU, or of the CPU, that a run was measured on."""
    about = json.loads((HOME / run / "environment.json").read_text())
    return (about["gpu"] or about["cpu"])["name"]


def rows(run: str, timed: bool = True) -> Iterator[tuple[dict, dict, dict]]:
    """Yield the rows of a run, each with its problem and its contender: those that have times."""
    text = gzip.decompress((HOME / run / "rows.jsonl.gz").read_bytes())
    for line in text.splitlines()[1:]:
        row = json.loads(line)
        if not timed or (row["status"] == "ok" and row["samples_us"]):
            yield row, row["case"]["problem"], row["case"]["contender"]


def by_block(row: dict) -> np.ndarray:
    """Return the median time of each whole block of samples."""
    size = min(row["samples_per_block"], len(row["samples_us"]))
    samples = np.array(row["samples_us"][: len(row["samples_us"]) // size * size])
    return np.median(samples.reshape(-1, size), 1)


def label_of(who: dict) -> str:
    """Return a contender as pages name it: bsr/torch_bsr tuned=True."""
    given = " ".join(f"{k}={v}" for k, v in sorted(who["options"].items()))
    return f"{who['format']}/{who['kernel']} {given}".strip()


@cache
def cases(run: str) -> pd.DataFrame:
    """Return a line a case of a run: what labels may say of it, and its samples by process."""
    found: dict[tuple[str, ...], dict] = {}
    for row, problem, who in rows(run):
        if row["reference"] or who["twin"]:
            continue
        key = json.dumps([problem, who, row["scope"], row["cache"]])
        case = found.setdefault(
            key, {"place": json.dumps([run, problem, row["scope"], row["cache"]]), "key": key}
        )
        took = by_block(row), np.median(row["samples_us"])
        case.setdefault("taken", []).append((row["clock"], row["replicate"], *took))
        case.setdefault("peaks", {})[row["replicate"]] = np.array([row["peak_bytes"] or 1.0])
        fields = problem["fields"]
        case |= {
            **{"skew": "iid", "pattern": "dense", "active": None, **fields, **who},
            **{"op": problem["op"], "scope": row["scope"], "cache": row["cache"]},
            "label": label_of(who),
            "chose_dense": (row["choice"] or {}).get("way") == "dense",  # of a portfolio
            "asked": sorted(fields.items()),
            "tokens": str(fields["m"]),
            "n × k": f"{fields['n']} × {fields['k']}" if "n" in fields else "",
            "sparsity_asked": fields.get("sparsity"),
            "sweep": json.dumps([run, {n: v for n, v in fields.items() if n != "sparsity"}]),
            "sparsity": f"{round(100 * fields.get('sparsity', 0), 2):g} %",
            "units on": f"{fields['active']:g}" if fields.get("active") is not None else "",
            "source": (problem["source"] or {}).get("path"),
        }
    most = max(len(case["taken"]) for case in found.values())
    right = [case for case in found.values() if len(case["taken"]) == most]  # in every process
    for case in right:
        case["processes"], case["device"] = most, device(run)
        clocks = [clock for clock, *_ in case["taken"]]
        kept = [each for each in case["taken"] if each[0] == max(clocks, key=clocks.count)]
        case["blocks"] = {process: block_us for _, process, block_us, _ in kept}
        case["medians"] = [median_us for *_, median_us in kept]
    return pd.DataFrame(right, dtype=object)


def ratio(ours: dict, over: dict) -> tuple[float, float, float]:
    """Return how many times as fast, and between which ends."""
    logs = []
    for process in ours.keys() & over.keys():
        both = min(len(ours[process]), len(over[process]))
        logs.append(np.log(over[process][:both] / ours[process][:both]))
    d, n = np.array([np.median(each) for each in logs]), len(logs)
    if n < 6:
        ends = (d.min(), d.max()) if n > 1 else np.quantile(logs[0], [0.25, 0.75])
        return tuple(np.exp([d.mean(), *ends]))
    walsh = np.sort([(d[i] + d[j]) / 2 for i in range(n) for j in range(i, n)])
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    k = np.searchsorted(np.cumsum(ways / 2.0**n), 0.025, side="right")
    return tuple(np.exp([np.median(walsh), walsh[k - 1], walsh[-k]]))


def agrees(shown: str, value: float) -> bool:
    """Say whether a number is a value to the last digit shown; closing zeros count for none."""
    after = len(shown.partition(".")[2])
    unit = 10.0**-after if after else 10.0 ** (len(shown) - len(shown.rstrip("0")))
    return abs(float(shown) - value) <= unit * 0.5000001


def fastest(contest: pd.DataFrame, who: pd.Series) -> pd.Series | None:
    """Return the contender of these with the largest ratio over the contest's baseline."""
    base = contest[contest.baseline]
    some = contest[who]
    if base.empty or some.empty:
        return None
    gains = [ratio(blocks, base.blocks.iloc[0])[0] for blocks in some.blocks]
    return some.assign(gain=gains).sort_values(["gain", "label"], ascending=[False, True]).iloc[0]


def among(contest: pd.DataFrame, over: str) -> pd.Series:
    """Say which contenders of a contest are meant by the words after `over`."""
    for words, those in OVER.items():
        if over == words or (over.startswith(words) and " " in words):
            return those(contest)
    named = contest.label.isin(over.split(", ")) & contest.baseline
    return named | contest.kernel.eq(over.strip("`"))


def labelled(found: pd.DataFrame, names: list[str], label: str) -> pd.DataFrame:
    """Keep the cases that a label of these columns names."""
    said = [OPS.get(part.strip("` "), part.strip("` ")) for part in label.split(", ")]
    for name in names:
        own = found[name].astype(str)
        found = found[own.isin(said) | (own.map(label.__contains__) if name == "n × k" else False)]
    return found


def shared(found: pd.DataFrame, caption: str, names: list[str]) -> pd.DataFrame:
    """Keep the cases that have what a caption says all its figures have."""
    for part in caption.split("; "):
        for name in ("op", "dtype", "pattern", "skew"):
            if (found[name] == part).any():
                found = found[found[name] == part]
        for words, name in SAID.items():
            own = found[name].astype(str)
            if part.startswith(words) and (own == part.removeprefix(words)).any():
                found = found[own == part.removeprefix(words)]
    for name, usual in {"skew": "iid", "scope": "kernel"}.items():  # where nothing is said
        if name not in names and usual in set(found[name]):
            found = found[found[name] == usual]
    return found[found.cache == ("cold" if (found.cache == "cold").any() else "hot")]


def over_of(caption: str) -> str:
    """Return whom a caption says that its figures are over."""
    return next((p[5:] for p in caption.split("; ") if p.startswith("over ")), "")


def kernel_of(caption: str) -> str:
    """Return the kernel of all figures of a table."""
    return next((p.strip("`") for p in caption.split("; ") if re.fullmatch(r"`\w+`", p)), "")


def cells(
    caption: str, header: list[str], lines: list[list[str]], found: pd.DataFrame
) -> Iterator[str]:
    """Yield each cell of a table that no case of its kernel gives."""
    rows, _, columns = header[0].partition(" \\ ")
    rows, columns = rows.split(", "), columns.split(", ")
    asked = shared(found, caption, rows + columns)
    own = header[1] == "kernel" and lines[0][1].startswith("`")  # no scope
    for line in lines:
        here = labelled(asked, rows, line[0])
        for head, cell in zip(header[1 + own :], line[1 + own :], strict=True):
            if not (shown := FIGURE.match(cell)):
                continue
            kernel = shown[5] or (line[1].strip("`") if own else kernel_of(caption))
            told = labelled(here, columns, head)
            told = told[told.kernel == kernel] if kernel else told
            if not any(figure(shown, case, asked, over_of(caption)) for _, case in told.iterrows()):
                yield f"{line[0]} | {head}: {cell}"


def figure(
    shown: re.Match, case: pd.Series, found: pd.DataFrame, over: str, counted: bool = True
) -> bool:
    """Say whether a case gives what is shown: a time, or a ratio with its ends.

    `counted`: a ratio of fewer processes than its run has says so.
    """
    if not over:
        return agrees(shown[1], np.median(case.medians))
    contest = found[found.place == case.place]
    other = fastest(contest, among(contest, over))
    if other is None:
        return False
    values, both = ratio(case.blocks, other.blocks), case.blocks.keys() & other.blocks.keys()
    if counted and int(shown[4] or case.processes) != len(both):
        return False
    ends = zip(shown.groups()[:3], values, strict=True)
    return all(agrees(text, value) for text, value in ends if text)


def counts(
    caption: str, header: list[str], lines: list[list[str]], found: pd.DataFrame
) -> Iterator[str]:
    """Yield each line of counts, means and ends that the problems of its label do not give."""
    names, kernel, over = header[0].split(", "), kernel_of(caption), over_of(caption)
    asked = shared(found, caption, names)
    for line in lines:
        values = []
        for _, contest in labelled(asked, names, line[0]).groupby("place"):
            who = contest.kernel.isin([kernel] if kernel else OURS)
            them = among(contest, over)
            if over == "itself untuned":
                who, them = who & contest.label.str.contains("tuned=True"), who & them
            ours, other = fastest(contest, who), fastest(contest, them)
            if ours is not None and other is not None:
                values.append(ratio(ours.blocks, other.blocks)[0])
        v = np.array(values)
        told = (
            [len(v), (v > 1).sum(), np.exp(np.log(v).mean()), v.min(), v.max()] if len(v) else [0]
        )
        if len(told) != 5 or not all(map(agrees, line[1:], told)):
            yield f"{line}: found {told}"


def table(text: str) -> tuple[list[str], list[list[str]]]:
    """Split a table into its header and its lines."""
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines()]
    header, _, *lines = [[cell.strip() for cell in line] for line in split]
    return header, lines


def checked(page: str) -> list[str]:
    """Return the figures of a page that its runs do not give, and the tables that nobody reads."""
    wrong, left = [], set(re.findall(r"^(?:\|.*\n)+", page, re.MULTILINE))
    for title, caption, text in re.findall(r"\*\*(.+)\.\*\* (.+)\.\n\n((?:\|.*\n)+)", page):
        if file := re.search(r"\(((?:training|whole)/[^/)]+\.json)\)", caption):
            data = json.loads((HOME / file[1]).read_text())
            way = trainings if "trained" in data else models
            wrong += [f"{title}: {each}" for each in way(data, table(text)[1])]
            left.discard(text)
            continue
        runs = re.findall(r"([^/(]+/[^/]+)\)", caption)
        if not runs:
            continue
        left.discard(text)
        found = pd.concat([cases(run) for run in runs], ignore_index=True)
        header, lines = table(text)
        way = counts if "geometric mean" in header else cells
        missing = way(caption.partition("; [")[0], header, lines, found)
        wrong += [f"{title}: {each}" for each in missing]
    readers = {
        "| question ": headline,
        "| run | suite ": listed,
        "| GPU | verdicts ": twins,
        "| run | again ": elsewhere,
        "| op | dtype | tokens ": used,
    }
    for text in sorted(left):
        header, lines = table(text)
        reads = [read(lines) for start, read in readers.items() if text.startswith(start)]
        reads += [records(header, lines)] if header[0] in ("method", "L1 term") else []
        if not reads and re.search(r"\d", text):
            reads = [iter([f"nothing holds this table against rows: {text.splitlines()[0]}"])]
        wrong += [each for read in reads for each in read]
    return wrong


def beside(own: pd.DataFrame, found: pd.DataFrame) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Yield trainings, each with the dense one of its seed with the fewest parameters of no fewer.

    A training without such a dense one is left out.
    """
    dense = found[found.pattern == "dense"]
    for _, one in own.iterrows():
        enough = dense[(dense.seed == one.seed) & (dense.parameters >= one.parameters)]
        if len(enough):
            yield one, enough.loc[enough.parameters.idxmin()]


def trainings(data: dict, lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of a block-sparse model that its trainings do not give, and how many lack."""
    found = pd.DataFrame(data["trained"])
    expected = {}
    for key, own in found[found.pattern != "dense"].groupby(
        ["pattern", "block", "sparsity", "width"]
    ):
        both = [*beside(own, found)]
        saved = [100 * (1 - sparse.loss / other.loss) for sparse, other in both]
        faster = [other.step_us / sparse.step_us for sparse, other in both]
        label = key[0], str(key[1]), f"{100 * key[2]:.1f} %", str(key[3])
        expected[label] = [own.loss.mean(), *([both[0][1].width] if both else []), saved, faster]
    for line in lines:
        told = expected.pop(tuple(line[:4]), None)
        figures = [line[5], *re.findall(r"^\d+", line[6])]
        whole = told and [agrees(*each) for each in zip(figures, told[:-2], strict=True)]
        for shown, values in zip(line[7:9], told[-2:] if told else (), strict=False):
            ends = (np.mean(values), min(values), max(values)) if values else ()
            numbers = re.findall(r"-?[\d.]+", shown)
            whole += [f"{v:.2f}" == n for v, n in zip(ends, numbers, strict=True)]
        if not whole or not all(whole):
            yield f"{line}: found {told}"
    yield from (f"{label}: no line" for label in expected)


def models(data: dict, lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of a whole model whose times, memory or energy its file does not give."""
    for line, way in zip(lines, data["ways"], strict=True):
        figures = []
        if way["times_us"]:
            us = float(np.median(way["times_us"]))
            figures = [us / 1e3, 1e6 * way["tokens"] / us, way["peak_bytes"] / 2**30]
            figures += [1e3 * way["energy_j"] / way["tokens"]] if way["energy_j"] else []
        shown = [each for each in line[3:7] if each]
        names = [line[0], line[1].strip("`"), line[2]] == [
            way["what"],
            way["mlp"],
            str(way["tokens"]),
        ]
        if not names or len(shown) != len(figures) or not all(map(agrees, shown, figures)):
            yield f"{line}: found {figures}"


def headline(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the headline whose speed-up, or that of its best peer, is not found."""
    for line in lines:
        of = "units on" if line[6].endswith(" on") else "sparsity"
        block = re.findall(r"blocks of (\w+)", line[6])
        names = ["n × k", "dtype", "tokens", of, *["block"] * len(block)]
        label = [*line[3:6], re.split(" of |,", line[6])[0], *block]
        asked = shared(cases(re.findall(r"([^/(]+/[^/]+)\)", line[-1])[0]), line[2], [])
        told = labelled(asked, names, ", ".join(label))
        shown = FIGURE.match(line[8])
        ours = told[told.kernel == line[7].split("`")[1]]
        if not any(figure(shown, case, asked, line[9]) for _, case in ours.iterrows()):
            yield f"{line[0]} {line[8]}"
        if FIGURE.match(line[10]) and not any(again(line, told)):
            yield f"{line[0]} alone: {line[10]}"
        peer, gain = line[11].replace("`", "").split()
        contests = [contest for _, contest in told.groupby("place")]
        best = [fastest(contest, ~contest.kernel.isin(OURS)) for contest in contests]
        if not any(each.kernel == peer and agrees(gain, each.gain) for each in best):
            yield f"{line[0]} {line[11]}"


def again(line: list[str], told: pd.DataFrame) -> Iterator[bool]:
    """Say of each case of a headline in a run that confirms its own whether it is as shown."""
    screened = Path(HOME, re.findall(r"\(([^)]*)\)", line[-1])[0], "manifest.json").read_bytes()
    for run in runs():
        about = json.loads((HOME / run / "run.json").read_text()).get("confirms") or {}
        if about.get("manifest_sha256") == hashlib.sha256(screened).hexdigest():
            found = cases(run)
            problems = {json.dumps(json.loads(place)[1]) for place in told.place}
            same = [json.dumps(json.loads(place)[1]) in problems for place in found.place]
            for _, case in found[same][found[same].kernel == line[7].split("`")[1]].iterrows():
                yield figure(FIGURE.match(line[10]), case, found, line[9])


def twins(lines: list[list[str]]) -> Iterator[str]:
    """Yield each device whose verdicts have other A/A pairs than shown, or others that differ."""
    counted: dict[str, list[int]] = {}
    for run in runs():
        told: dict[str, tuple[dict, dict]] = {}
        for row, problem, who in rows(run):
            place = row["reference"], row["scope"], row["cache"]
            key = json.dumps([problem, {**who, "twin": 0, "baseline": 0}, *place])
            told.setdefault(key, ({}, {}))[who["twin"]][row["replicate"]] = by_block(row)
        pairs = [ratio(again, once) for once, again in told.values() if len(again) >= 6]
        if pairs:
            mine = counted.setdefault(device(run), [0, 0, 0])
            mine[0] += 1
            mine[1] += len(pairs)
            mine[2] += sum(low > 1 or high < 1 for _, low, high in pairs)
    for line in lines:
        runs_, pairs, found = counted.get(line[0], [0, 1, 0])
        shares = [runs_, pairs, found, 100 * found / pairs]
        if not all(map(agrees, [*line[1:4], line[4].removesuffix(" %")], shares)):
            yield f"{line}: found {shares}"


def elsewhere(lines: list[list[str]]) -> Iterator[str]:
    """Yield each pair of runs whose cells have other ratios of speed-ups than shown."""
    for line in lines:
        gains = []
        for cell in line[:2]:
            found = cases(re.findall(r"([^/(]+/[^/]+)\)", cell)[0])
            first = found[found.baseline].drop_duplicates("place")
            base = first.set_index("place").blocks
            rivals = found[~found.key.isin(first.key) & found.place.isin(base.index)]
            gains.append(
                {case.key: ratio(case.blocks, base[case.place])[0] for _, case in rivals.iterrows()}
            )
        first, second = gains
        v = np.array([second[key] / first[key] for key in first.keys() & second.keys()])
        told = len(v), np.exp(np.log(v).mean()), v.min(), v.max()
        if not all(map(agrees, line[4:8], told)):
            yield f"{line[:2]}: found {told}"


def used(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of energy that no case of its run gives."""
    for line in lines:
        contests: dict[str, dict[tuple[bool, str], dict[int, float]]] = {}
        (run,) = re.findall(r"([^/(]+/[^/]+)\)", line[-1])
        for row, problem, who in rows(run):
            fields = problem["fields"]
            n = fields.get("n")
            layer = f"{n} × {fields['k']}" if n else f"{fields['layers']} layers"
            about = [problem["op"], fields["dtype"], str(fields["m"]), layer]
            if row.get("energy_j") and not who["twin"] and about == line[:4]:
                contest = contests.setdefault(json.dumps(problem), {})
                case = contest.setdefault((who["baseline"], f"`{label_of(who)}`"), {})
                case[row["replicate"]] = 1e3 * row["energy_j"]
        expected = []
        for contest in contests.values():
            dense = [taken for (baseline, _), taken in contest.items() if baseline]
            least = min(dense, key=lambda taken: np.median([*taken.values()]), default={})
            for (baseline, label), taken in contest.items():
                both = [] if baseline else [p for p in taken if p in least]
                saved = [100 * (1 - taken[p] / least[p]) for p in both]
                told = [
                    f"{np.median(v):.4g} [{min(v):.4g}, {max(v):.4g}]" if v else ""
                    for v in ([*taken.values()], saved)
                ]
                expected += [told] if label == line[4] else []
        if line[5:7] not in expected:
            yield f"{line}: found {expected}"


def listed(lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of the list of runs that its bundle does not give."""
    every = every_case()
    every = every.assign(median=every.medians.map(np.median))
    what = [every[name].map(json.dumps) for name in ("asked", "params", "options")]
    same = every.groupby(
        ["device", "op", "source", "kernel", "scope", "cache", *what], dropna=False
    )
    every["times"] = every["median"] / same["median"].transform("min")
    for line in lines:
        (run,) = re.findall(r"\(([^)]+)\)", line[0])
        problems, asked, limited = set(), set(), {}
        for row, problem, who in rows(run, timed=False):
            key = json.dumps([problem, who, row["scope"], row["cache"]])
            if who["twin"] or row["reference"]:
                continue
            problems.add(json.dumps(problem))
            asked.add(key)
            told = row["telemetry"] or {}
            share = told.get("power_capped_us", 0) / (1e6 * told.get("seconds", np.inf))
            limited[key] = limited.get(key, False) or share > 0.2
        found = cases(run)
        own = every[every.place.isin(found.place) & ~every.kernel.isin(OURS)]
        slow = own[own.times > 1.1].times
        about = (HOME / run / "environment.json").read_text()
        cards = sorted({uuid[:8] for uuid in re.findall(r'"uuid": "(?:GPU-)?(.*?)"', about)})
        processes = {row["replicate"] for row, *_ in rows(run)}
        expected = [", ".join(cards), *(str(len(each)) for each in (problems, asked, processes))]
        expected += [f"{sum(limited[key] for key in found.key)} of {len(found)}"]
        expected += [f"{len(slow)}, to {max(slow):.2f}" if len(slow) else "0"]
        if [*line[4:8], *line[-2:]] != expected:
            yield f"{line}: found {expected}"


def records(header: list[str], lines: list[list[str]]) -> Iterator[str]:
    """Yield each line of what pruning or training cost that no record gives."""
    known = []
    for file in HOME.glob("pruning/*.json"):
        record = json.loads(file.read_text())
        known.append(["none", "", "", 100, 0, "", record["loss"]])
        for it in record["outcomes"]:
            shares = 100 * it["dense"], 100 * it["sparsity"], 100 * it["errors"]["output"]
            known.append(
                [it["method"], it.get("pattern", "2:4"), it["region"], *shares, it["loss"]]
            )
    for file in HOME.glob("sparsity/*.json"):
        record = json.loads(file.read_text())
        for it in record["trained"]:
            zeros, active, most, dead = (
                np.array([layer[name] for layer in it["layers"]])
                for name in ("zeros", "active", "most", "dead")
            )
            units = record["settings"]["sizes"]["hidden"]
            shares = 100 * zeros.mean(), 100 * zeros.min()
            rest = active.mean(), most.max(), 100 * dead.mean() / units
            known.append([it["l1"], it["loss"], *shares, *rest])
    for line in lines:
        shown = [
            part for cell in line for part in re.split(r" \(|\)", cell) if part or "(" not in cell
        ]
        if not any(len(each) == len(shown) and all(map(same, shown, each)) for each in known):
            yield f"{header[0]}: {line}"


def same(shown: str, value: object) -> bool:
    """Say whether a cell shows a value: a word, or a number to the last digit shown."""
    number = shown.removesuffix(" %")
    if isinstance(value, str) or value is None:
        return shown == (value or "")
    return bool(re.fullmatch(r"[\d.]+", number)) and agrees(number, float(value))


def even(gains: dict[float, float]) -> str:
    """Return between which measured levels a ratio rises above 1 for good, as the grid says it."""
    levels = sorted(gains)
    said = [f"{round(100 * level, 2):g} %" for level in levels]
    below = [i for i, level in enumerate(levels) if gains[level] < 1]
    if not below:
        return f"already faster at {said[0]}"
    if below[-1] == len(levels) - 1:
        return f"not faster up to {said[-1]}"
    return f"overtakes between {said[below[-1]]} and {said[below[-1] + 1]}"


def break_evens(page: str, every: pd.DataFrame) -> Iterator[str]:
    """Yield each cell of the grid of break-evens that no sweep of a run gives."""
    for text, about in re.findall(
        r'(<h2>A format is faster than dense.*?</table>).*?class="note">(\w+, \w+)', page, re.S
    ):
        name = re.findall(r'faster than dense on (.*?)"', html.unescape(text))[0]
        asked = shared(every[every.device == name], about.replace(", ", "; "), [])
        yield from grid_of(text, asked)


def grid_of(grid: str, asked: pd.DataFrame) -> Iterator[str]:
    """Yield each cell of a device's grid of break-evens that no sweep of these cases gives."""
    best: dict[tuple, dict[float, list[float]]] = {}  # several files of a level: their mean
    for _, contest in asked[asked.sparsity_asked.notna()].groupby("place"):
        dense = fastest(contest, contest.format == "dense")
        for kind in NAMES.values():
            top = fastest(contest, contest.format == kind)
            if dense is not None and top is not None:
                block = str(top.block) if kind == "bsr" else ""
                key = kind, block, top.tokens, top["n × k"], top.sweep
                gains = best.setdefault(key, {}).setdefault(top.sparsity_asked, [])
                gains.append(np.log(ratio(top.blocks, dense.blocks)[0]))
    found: dict[tuple, set[str]] = {}
    for (*key, _), gains in best.items():
        means = {level: float(np.exp(np.mean(logs))) for level, logs in gains.items()}
        if len(means) > 1:
            found.setdefault(tuple(key), set()).add(even(means))
    tokens = re.findall(r'scope="col">m (\d+)<', grid)
    for head, line in re.findall(r'scope="row">(.*?)</th>(.*?)</tr>', grid):
        name, _, block = head.partition(" ")
        for m, cell in zip(tokens, re.findall(r"<td>(.*?)</td>", line), strict=True):
            title, shown = (
                re.findall(r'title="(.*?)">(.*?)[ <]*(?:%| <small>|</a>)', html.unescape(cell))
                or [("", "")]
            )[0]
            for shape, text in re.findall(r"n × k (\d+ × \d+): (.*?), \d+ process", title):
                if text not in found.get((NAMES[name], block, m, shape), ()):
                    yield f"{head}, m {m}, {shape}: {text}"
            own = (those for key, those in found.items() if key[:3] == (NAMES[name], block, m))
            known = {each for text in set().union(*own) for each in re.findall(r"[\d.]+", text)}
            if not {*re.findall(r"[\d.]+", shown)} <= known:
                yield f"{head}, m {m}: {shown} %"


def claimed(page: str) -> Iterator[str]:
    """Yield each cell of a claim's page whose value its run does not give."""
    for text in re.findall(r"<thead><tr><th[^>]*>cell<.*?</table>", page, re.S):
        header, *lines = [
            [html.unescape(each) for each in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)]
            for line in text.split("<tr>")[1:]
        ]
        for line in lines:
            shown = re.match(r"(-?[\d.]+)(?:×| %)(?: \[(-?[\d.]+), (-?[\d.]+)\])?", line[1])
            if shown and header[1] in METRICS and not held(header[1], shown, line):
                yield " | ".join(line)


def held(metric: str, shown: re.Match, line: list[str]) -> bool:
    """Say whether a cell's subject gives its value over its baseline, in as many processes."""
    label, _, _, subject, baseline, *_, ran = line
    name, _, count = ran.rpartition(", ")
    if " of " in baseline:
        return beside_op(shown, line)
    files = [file for kind in ("training", "whole") for file in HOME.glob(f"{kind}/{name}.json")]
    if files:
        return of_file(metric, shown, json.loads(files[0].read_text()), line)
    (run,) = (each for each in runs() if each.split("/")[1] == name or digest(each) in name)
    found = of_label(cases(run), label)
    found = found[found.cache == "cold"]
    subject, baseline = (
        re.sub(r".*\(chosen by (.*)\)| \(.*", r"\1", who) for who in (subject, baseline)
    )
    column = "peaks" if metric.startswith("memory") else "blocks"
    for _, ours in found[found.label == subject].iterrows():
        others = found[(found.place == ours.place) & (found.label == baseline)]
        for over in others[column]:
            values = [
                METRICS[metric](r, 1 - (ours.sparsity_asked or 0))
                for r in ratio(ours[column], over)
            ]
            ends = zip(shown.groups(), values, strict=True)
            of = len(ours[column].keys() & over.keys())
            if of == int(count.split()[0]) and all(agrees(t, value) for t, value in ends if t):
                return True
    return False


def beside_op(shown: re.Match, line: list[str]) -> bool:
    """Say whether a speed-up over dense, over that of another op at equal fields, is the value."""
    label, subject, (over, op) = line[0], line[3], line[4].split(" of ")
    names, _, count = line[-1].rpartition(", ")
    places = [run for name in names.split(" over ") for run in runs() if digest(run) in name]
    asked = (places[0], label, subject), (places[-1], f"{op}, {label.partition(', ')[2]}", over)
    sides: list[list[dict[int, np.ndarray]]] = []
    for run, where, who in asked:
        found = of_label(cases(run), where)
        found, sides = found[(found.cache == "cold") & (found.scope == "kernel")], [*sides, []]
        for _, ours in found[found.label == who].iterrows():
            contest = found[found.place == ours.place]
            dense = fastest(contest, contest.format == "dense").blocks
            both = ours.blocks.keys() & dense.keys()
            took = {p: np.log(ours.blocks[p] / dense[p]) for p in both}
            sides[-1].append({p: np.exp([np.median(logs)]) for p, logs in took.items()})
    for own, other in ((own, other) for own in sides[0] for other in sides[1]):
        ends = zip(shown.groups(), ratio(own, other), strict=True)
        if len(own) == int(count.split()[0]) and all(agrees(t, value) for t, value in ends if t):
            return True
    return False


def of_file(metric: str, shown: re.Match, data: dict, line: list[str]) -> bool:
    """Say whether a cell's value is that of a training, by seed, or of a whole model."""
    label, subject, baseline = line[0], *(re.sub(r" \(.*", "", who) for who in line[3:5])
    if "trained" not in data:
        ours, other = (
            next(w for w in data["ways"] if [w["what"], w["mlp"]] == [label.split(",")[0], who])
            for who in (subject, baseline)
        )
        column = "peak_bytes" if metric.startswith("memory") else "times_us"
        value = METRICS[metric](np.median(other[column]) / np.median(ours[column]), 1)
        return shown[2] is None and agrees(shown[1], value)
    found = pd.DataFrame(data["trained"])
    named = [
        f"train-lm, {100 * one.sparsity:.2f} %, blocks of {one.block}, "
        f"weights {one.pattern}, width {one.width}" == label
        for one in found.itertuples()
    ]
    kept = [dense.step_us / one.step_us for one, dense in beside(found[named], found)]
    values = np.exp(np.log(kept).mean()), min(kept), max(kept)
    return all(agrees(*each) for each in zip(shown.groups(), values, strict=True))


def of_label(found: pd.DataFrame, label: str) -> pd.DataFrame:
    """Keep the cases that a cell is named after: linear, bf16, m 64, 4096 × 4096, active 29."""
    for part in label.split(", "):
        name, _, value = part.rpartition(" ")
        if part.endswith(" %"):
            found = found[found.sparsity == part]
        elif " × " in part:
            found = found[found["n × k"] == part]
        elif not name:
            found = found[(found.op == part) | (found.dtype == part)]
        else:
            column = {"m": "tokens", "blocks of": "block"}.get(name, name)
            own = found[column].map(lambda v: f"{v:g}" if isinstance(v, int | float) else str(v))
            found = found[own == value]
    return found


def told(text: str, found: pd.DataFrame) -> Iterator[str]:
    """Yield each number of a text that no case gives: 4.85×, [4.83, 4.86], 33.9 µs."""
    gains = []
    for _, contest in found.groupby("place"):
        for base in contest.blocks[contest.baseline | among(contest, "dense")]:
            gains += [ratio(blocks, base) for blocks in contest.blocks]
    times = [np.median(medians) * unit for medians in found.medians for unit in (1, 1e-3)]
    for number in re.findall(r"([\d.]+)(?:×| with blocks| ±)", text):
        if not any(agrees(number, gain[0]) for gain in gains):
            yield number
    for low, high in re.findall(r"\[([\d.]+), ([\d.]+)\]", text):
        if not any(agrees(low, gain[1]) and agrees(high, gain[2]) for gain in gains):
            yield f"[{low}, {high}]"
    for number in re.findall(r"([\d.]+)(?= [µm]s| to \d+ µs)", text):
        if not any(agrees(number, time) for time in times):
            yield f"{number} µs or ms"


@cache
def every_case() -> pd.DataFrame:
    """Return the cases of all runs; `whole` is their part of zeros, or of units off: 95 %."""
    found = pd.concat([cases(run) for run in runs()], ignore_index=True)
    off = 1 - (found.active / found.n).astype(float)  # where the weights are dense
    zeros = found.sparsity_asked.astype(float).where(found.sparsity_asked > 0, off)
    return found.assign(whole=[f"{100 * part:.0f} %" for part in zeros])


def tiles(page: str) -> Iterator[tuple[str, ...]]:
    """Yield what a site's grids hold: GPU, op, dtype, m, kind, level, n x k, kernel and gain."""
    for gpu, grid, op, dtype in re.findall(
        r"over dense on ([^<]*?)(?: at each[^<]*)?</caption>((?:(?!<caption).)*?)"
        r'<p class="note">(\w+), (\w+), kernel time',
        page,
        re.DOTALL,
    ):
        for tokens, line in re.findall(r'<th scope="row">m (\d+)</th>(.*?)</tr>', grid):
            for kind, level, those in re.findall(r'title="([^"]*?) at (.*?): (.*?)"', line):
                for each in re.findall(r"n × k (.*?): (.*?), (.*?)(?:;|$)", those):
                    yield html.unescape(gpu), op, dtype, tokens, kind, level, *each


def grids(page: str) -> Iterator[str]:
    """Yield each gain of a site's grids, by m and sparsity, that no run gives."""
    every = every_case()
    for gpu, op, dtype, tokens, kind, level, shape, who, text in tiles(page):
        block = kind.removeprefix("BSR ") if kind.startswith("BSR ") else ""
        near = (every.sparsity == level) | (every.whole == level)  # 94.68 % is 95 %
        own = every[near & (every.device == gpu) & (every.label.str.partition("/")[2] == who)]
        own = own[[str(params.get("block", "")) == block for params in own.params]]
        here = shared(own, f"{op}; {dtype}", ["skew"])
        here = labelled(here, ["tokens", "n × k"], f"{tokens}, {shape}")
        shown = FIGURE.match(text.replace("×", ""))
        if not any(figure(shown, case, every, "dense", False) for _, case in here.iterrows()):
            yield f"m {tokens} {level} {shape} {who} {text}"


def index(page: str) -> Iterator[str]:
    """Yield each figure of a site's index that no run gives: its grids, its list of runs."""
    yield from break_evens(page, every_case())
    yield from grids(page)
    for line in re.findall(r'<tr id="([^"]*"><td><a href="runs/.*?)</tr>', page):
        (run,) = (each for each in runs() if digest(each) in line)
        found = cases(run)
        yield from (
            f"{line[:20]} {each}" for each in told(line.partition("against dense")[2], found)
        )


def answer(file: Path) -> Iterator[str]:
    """Yield each figure of the answer that heads a run's page that the run does not give."""
    (run,) = (each for each in runs() if digest(each) in file.parent.name)
    page = re.sub(r"<(style|script).*?</\1>", "", file.read_text(), flags=re.DOTALL)
    first = html.unescape(re.sub(r"<[^>]*>", " ", page.partition("How it was measured")[0]))
    yield from told(first.partition("Which format wins")[2], cases(run))


def main() -> int:
    """Print what is not found, of both pages and of a site's index where one is given."""
    pages = [(HOME / "README.md").read_text(), (ROOT / "README.md").read_text()]
    wrong = [each for page in pages for each in checked(page)]
    for page in pages:
        for text in re.findall(DRAWN, page):
            (swept,) = (run for run in runs() if run.endswith("/sparsity-4096"))
            wrong += told(text, cases(swept))
    for site in sys.argv[2:]:
        wrong += index(Path(site, "index.html").read_text())
        for file in sorted(Path(site, "runs").glob("*/index.html")):
            wrong += [f"{file.parent.name}: {each}" for each in answer(file)]
        for file in sorted(
            file for of in ("formats", "kernels") for file in Path(site, of).glob("*")
        ):
            wrong += [f"{file.stem}: {each}" for each in grids(file.read_text())]
        for file in sorted(Path(site, "claims").glob("*.html")):
            wrong += [f"{file.stem}: {each}" for each in claimed(file.read_text())]
    print("\n".join(wrong) or "every figure is found")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

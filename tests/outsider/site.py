"""The figures of a site: its grids, its list of runs, the answer of each run, cells of claims.

Each function reads a file, and yields the figures that the rows do not give. `TALLY` counts all
that were looked up, by function.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.outsider.ratios import between, fastest, ratio, shows, walsh
from tests.outsider.readme import TALLY, stated
from tests.outsider.rows import (
    HOME,
    Blocks,
    cases,
    dense,
    digest,
    earlier,
    every_case,
    on_zeros,
    runs,
    usual,
)

METRICS = {  # the values of claims, from a ratio and the density
    "speedup, ×": lambda ratio, density: ratio,
    "of_ideal, %": lambda ratio, density: 100 * ratio * density,
    "memory_saved, %": lambda ratio, density: 100 * (1 - 1 / ratio),
}

TEXTS = {  # values with other names on pages
    "two_four": "2:4",
    "two_four_blocks": "2:4 in the best blocks",
    "six_eight": "6:8",
    "spense_rows": "half 2:4",
    "spense_hidden": "half 2:4",
    "spense_columns": "half 2:4 by columns",
    "holes": "half of the experts without tokens",
    "measured": "routing as uneven as DeepSeek-V3's",
    "skewed": "routing of one domain",
    "uniform": "uniform routing",
    "top_k_blocks": "the k best blocks of keys",
    "heads": "a list for each head",
    "kv_heads": "a list for each KV head",
    "one": "one list for all heads",
}
MODELS = {5120: "Qwen3-32B"}  # by the hidden size


def grids(file: Path) -> Iterator[str]:
    """Yield each gain of a page's grids, by tokens and sparsity, that no run gives."""
    every, page = every_case(), file.read_text("utf-8")
    names = " ".join(f'data-{name}="([^"]*)"' for name in ("gpu", "op", "dtype", "tokens"))
    grids = re.findall(f'data-grid="gains" {names}>(.*?)</table>', page, re.DOTALL)
    for gpu, op, dtype, tokens, grid in grids:
        rows = every[(every.device == html.unescape(gpu)) & (every.op == op)]
        rows = rows[(rows.dtype == dtype) & (rows.tokens == tokens)]
        for head, level, lines in re.findall(r'title="([^"]*?) at (.*?): (.*?)"', grid):
            for shape, name, gain in re.findall(r"n × k (.*?): (.*?), (.*?)(?:;|$)", lines):
                TALLY["grids"] += 1
                here = rows[(rows.sparsity == level) | (rows.level == level)]  # 94.68 % is 95 %
                here = usual(here[(here["n × k"] == shape)])
                name = "default" if name.endswith(" (by default)") else name
                here = here[np.array([n.partition("/")[2] == name for n in here.label], bool)]
                block = head.rpartition("blocks of ")[2] if "blocks of " in head else ""
                same = [str(params.get("block", "")) == block for params in here.params]
                here = here[np.array(same, bool)]
                if not any(over_dense(gain, case, every) for _, case in here.iterrows()):
                    yield f"m {tokens} {level} {shape} {head} {name} {gain}"


def over_dense(text: str, case: pd.Series, matches: pd.DataFrame) -> bool:
    """Return whether a case has this speedup over the fastest dense contender of its contest."""
    contest = matches[matches.place == case.place]
    base = fastest(contest, dense(contest))
    return base is not None and shows(text, ratio(case.blocks, base.blocks))


def listed_runs(file: Path) -> Iterator[str]:
    """Yield each figure of a site's list of runs that the runs do not give."""
    row = r'<tr id="[^"]*"><td class="wrap"><a href="(.*?)/index.html">(.*?)</tr>'
    for address, line in re.findall(row, file.read_text("utf-8")):
        run = at_address(address, file.parent)
        yield from (f"{run} {each}" for each in stated(without_tags(line), cases(run)))


def answer(file: Path) -> Iterator[str]:
    """Yield each figure of the answer at the top of a run's page that the run does not give."""
    run = at_address("/".join(file.parts[-3:-1]), file.parents[2])
    page = re.sub(r"<(style|script).*?</\1>", "", file.read_text("utf-8"), flags=re.DOTALL)
    top = page.partition('<p class="headline">')[2].partition("</p>")[0]
    answer = page.partition('<section id="answer">')[2].partition('<section id="measured">')[0]
    answer = re.sub(r"<svg.*?</svg>", "", answer, flags=re.DOTALL)
    several = r'(title="[^"]*; [^"]*"><b>.*?</b>)<span.*?</span>'  # their interval is of no case
    answer = re.sub(r"–([\d.]+×)</b>", r"× \1", re.sub(several, r"\1", answer))
    yield from stated(without_tags(top + answer), cases(run))


def without_tags(page: str) -> str:
    """Return the words of a page with one space between them, as `stated` expects."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def at_address(address: str, site: Path) -> str:
    """Return the run at an address of a site, such as h200/sparsity-4096-2, by its digest.

    Pages without a site name a run alone: that of the device with the most runs.
    """
    removed = site / address / "removed.json"
    if removed.exists():
        return by_digest()[json.loads(removed.read_text("utf-8"))["of"]]
    on_device = Counter(run.partition("/")[0] for run in runs())
    end = address if "/" in address else f"/{address}"
    matches = [run for run in runs() if run.endswith(end)]
    return max(matches, key=lambda run: on_device[run.partition("/")[0]])


@cache
def by_digest() -> dict[str, str]:
    """Return every published run, replaced ones too, by the SHA-256 of its manifest."""
    return {digest(run): run for run in [*earlier(), *runs()]}


def claimed(file: Path) -> Iterator[str]:
    """Yield each cell of a claim's page whose value its run or its file does not give."""
    page = file.read_text("utf-8")
    for text in re.findall(r"<thead><tr><th[^>]*>cell<.*?</table>", page, re.DOTALL):
        header, *lines = [
            [
                html.unescape(re.sub(r"<[^>]*>", "", each))
                for each in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)
            ]
            for line in re.split(r"<tr[^>]*>", text)[1:]
        ]
        for line in lines:
            shown = re.match(r"-?[\d.]+(?:×| %)", line[1]) and header[1] in METRICS
            TALLY["claimed"] += bool(shown)
            if shown and not holds(header[1], line, file.parent.parent):
                yield " | ".join(line)


def holds(metric: str, line: list[str], site: Path) -> bool:
    """Return whether a cell's subject has its value over its baseline, in as many processes."""
    label, shown, _, subject, baseline, *_, source = line
    name, _, processes = source.rpartition(", ")
    if " of " in baseline:
        return beside_op(line, site)
    files = [file for kind in ("training", "whole") for file in HOME.glob(f"{kind}/{name}.json")]
    if files:
        return in_file(metric, json.loads(files[0].read_text()), line)
    run = at_address(name, site)
    matches = labelled(cases(run), label)
    matches = matches[matches.cache == "cold"]
    subject, baseline = (
        re.sub(r".*\(chosen by (.*)\)| \(.*", r"\1", who) for who in (subject, baseline)
    )
    column = "peaks" if metric.startswith("memory") else "blocks"
    for _, ours in matches[named(matches, subject)].iterrows():
        for other in matches[(matches.place == ours.place) & (matches.label == baseline)][column]:
            density = 1 - (ours.zeros or 0)
            values = tuple(METRICS[metric](r, density) for r in ratio(ours[column], other))
            count = len(ours[column].keys() & other.keys())
            if count == int(processes.split()[0]) and shows(shown, values):
                return True
    return False


def beside_op(line: list[str], site: Path) -> bool:
    """Return whether a speedup over dense, divided by that of another op, is the cell's value."""
    label, subject, (other, op) = line[0], line[3], line[4].split(" of ")
    names, _, processes = line[-1].rpartition(", ")
    places = [at_address(name, site) for name in names.split(" over ")]
    sides: list[list[tuple[Blocks, float]]] = []
    for run, where, who in (
        (places[0], label, subject),
        (places[-1], f"{op}, {label.partition(', ')[2]}", other),
    ):
        matches = labelled(cases(run), where)
        matches = matches[(matches.cache == "cold") & (matches.scope == "kernel")]
        sides.append([])
        for _, ours in matches[named(matches, who)].iterrows():
            contest = matches[matches.place == ours.place]
            base = fastest(contest, (contest.format == "dense") & ~on_zeros(contest)).blocks
            both = ours.blocks.keys() & base.keys()
            logs = {p: np.log(ours.blocks[p] / base[p]) for p in both}
            gains = Blocks({p: np.exp([np.median(log)]) for p, log in logs.items()})
            sides[-1].append((gains, between(ours.blocks)))
    return any(
        len(side) == int(processes.split()[0])
        and shows(line[1], ratio(side, beside, float(np.hypot(cards, other_cards))))
        for side, cards in sides[0]
        for beside, other_cards in sides[1]
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
        shape = f"{100 * one.sparsity:.2f} %", f"{one.block} × {one.block} blocks"
        data = f"data {one.data}" if "data" in trained else shape[0]
        name = {*shape, data, one.pattern.replace("_", " "), f"width {one.width}"}
        if name <= {*label.split(", ")}:
            enough = dense_ones[
                (dense_ones.seed == one.seed) & (dense_ones.parameters >= one.parameters)
            ]
            if len(enough):
                factors.append(enough.loc[enough.parameters.idxmin()].step_us / one.step_us)
    middle = walsh(np.log(factors))[0] if len(factors) >= 6 else np.log(factors).mean()
    return shows(line[1], (np.exp(middle), min(factors), max(factors)))


def named(matches: pd.DataFrame, label: str) -> pd.Series:
    """Return which contenders have a name; older rows name the format of the weights, dense."""
    return matches.label.map(lambda name: name.partition("/")[2] == label.partition("/")[2])


def labelled(matches: pd.DataFrame, label: str) -> pd.DataFrame:
    """Keep the cases that a cell names: linear, bf16, m 64, 4096 × 4096, 2:4, active 29."""
    parts = label.split(", ")
    keep = [
        all(part in words(case) or str(case.source).endswith(f"/{part}") for part in parts)
        for case in matches.itertuples()
    ]
    return matches[np.array(keep, bool)]


def words(case: Any) -> set[str]:
    """Return the texts that a label may have for a case: of every field, and of its value."""
    fields = {name: value for name, value in case.fields if value is not None}
    texts = {case.op, case.sparsity, case.achieved}
    for name, value in fields.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        texts |= {f"{name} {shown}", f"{shown} {name.replace('kv_', 'KV ')}"}
        texts |= {shown.replace("_", " "), TEXTS.get(shown, "")}
        if isinstance(value, list):
            texts.add(f"{name} {' × '.join(map(str, value))}")
    block = fields.get("block")
    sides = block if isinstance(block, list) else [block, block]
    texts |= {f"{sides[0]} × {sides[1]} blocks", f"{fields.get('n')} × {fields.get('k')}"}
    texts |= {"causal" if fields.get("causal") else "not causal"}
    texts |= {f"values of {fields.get('weight_bits')} bits"}
    texts |= {"all tokens to the same experts"} if fields.get("routing") == "one" else set()
    return texts | {f"head size {fields.get('head_dim')}", MODELS.get(fields.get("hidden"), "")}

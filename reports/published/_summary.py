"""What is no pivot of cases: the list of runs, the headline, the figure's caption, four records.

runs       a line a published run: what, where, how long, by which commit, verdict or look
digests    a line a published run: the SHA-256 that names its bundle
headline   a line a question that the project answers, with its best peer beside it
figure     the picture of a sweep and what it shows at 90 %
pruning    results/published/pruning/*.json     trained    results/published/sparsity/*.json
widened    results/published/training/*.json    modelled   results/published/whole/*.json
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from sparsebench.reports.picture import drawn
from sparsebench.reports.published._again import alone
from sparsebench.reports.published._runs import Published
from sparsebench.reports.published._table import (
    PROBLEM,
    Table,
    fastest,
    markdown,
    matched,
)
from sparsebench.reports.terminal import Answer
from sparsebench.results import bundle, model_files
from sparsebench.results.analysis import Analysis
from sparsebench.results.formatting import FORMATS, amount, rounded, selection, significant
from sparsebench.results.model_files import OUTPUT
from sparsebench.results.tuning_doubts import APART, KEY

LEVEL = 0.9  # that the caption names
BLOCK, COLUMNS = "64", 72  # of the example of a terminal
PICTURE, PICTURED = "results/published/speedup.svg", "sparsity-4096"


@dataclass(frozen=True)
class Question:
    """A question of the headline: `where` names one problem, `ours` our contenders in it."""

    text: str
    run: str
    where: str
    ours: str = "ours"


def list_of_runs(runs: Mapping[str, Published]) -> str:
    """Return a line a published run."""
    header = ["run", "suite", "part (`--only`)", "GPU", "card", "problems", "cases", "processes"]
    header += ["time", "date", "commit", "is a", "A/A pairs", "power-limited", "slow peers"]
    slow = _slow_peers(runs)
    return markdown(header, [[*_of_run(run), slow[run.name]] for run in runs.values()])


def _slow_peers(runs: Mapping[str, Published]) -> dict[str, str]:
    """Say of each run how many cases of peers another run of that GPU timed faster: 3, to 1.9."""
    every = pd.concat([run.cases.assign(gpu=run.gpu) for run in runs.values()], ignore_index=True)
    peers = every[(every.status == "ok") & ~every.ours & ~every.twin.astype(bool)]
    times = peers.median_us / peers.groupby(["gpu", *KEY]).median_us.transform("min")
    slow = times[times > APART].groupby(peers.run)
    told = {name: f"{len(found)}, to {found.max():.2f}" for name, found in slow}
    return {name: told.get(name, "0") for name in runs}


def digests(runs: Mapping[str, Published]) -> str:
    """Return the SHA-256 of each bundle's manifest, as sha256sum writes and checks it."""
    home = Path("results/published")
    places = {Path(run.home).relative_to(home) / bundle.MANIFEST: run for run in runs.values()}
    lines = [f"{bundle.identity(run.run.path)}  {place}" for place, run in places.items()]
    return "\n".join(["```", *lines, "```"])


def _of_run(run: Published) -> list[str]:
    cases, state = run.cases[~run.cases.twin.astype(bool)], run.run.state
    timed = cases[cases.status == "ok"]
    limited = timed.mark.str.contains("power-limited").sum()
    minutes, seconds = divmod(round(state["seconds"]), 60)
    took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    chosen = selection(state["flags"]["only"]).replace("|", "\\|")
    counted = [cases.problem_id.nunique(), len(cases), run.processes]
    commit = run.facts["commit"][:7] + (" +" if run.facts.get("dirty") == "True" else "")
    return [
        f"[{run.name}](/{run.home})",
        state["suite"],
        f"`{chosen}`" if chosen else "",
        run.gpu,
        ", ".join(run.cards),
        *map(str, counted),
        took,
        state["started"][:10],
        commit,
        run.weight,
        run.noise.reliability[0],
        f"{limited} of {len(timed)}",
    ]


def headline(questions: list[Question], runs: Mapping[str, Published]) -> str:
    """Return a line a question: our fastest contender, and the fastest peer, dense ones too."""
    header = ["question", "format", "op", "n × k", "dtype", "tokens", "sparsity or units on"]
    header += ["our kernel", "speed-up", "baseline", "measured alone", "best peer", "GPU", "run"]
    return markdown(header, [_answer(question, runs) for question in questions])


def _answer(question: Question, runs: Mapping[str, Published]) -> list[str]:
    title = question.text
    table = Table(title, title, (question.run,), question.ours, (), (), question.where)
    (line,) = matched(table, runs).to_dict("records")
    run = runs[question.run]
    cases = run.cases[(run.cases.status == "ok") & run.cases.speedup.notna()]
    here = np.logical_and.reduce([cases[name] == line[name] for name in PROBLEM])
    peers = fastest(cases[here & ~cases.ours & ~cases.twin.astype(bool)])
    peer = "none" if peers.empty else f"`{peers.kernel.iloc[0]}` {_said(peers.iloc[0])}"
    active = line.get("active")
    level = line["asked"] if pd.isna(active) else f"{active:g} of {line['n']} on"
    number = line["fewer"] or run.processes
    count = f"{amount(number, 'process')}, a {run.weight}"
    ran = " (dense)" if line["dense"] else ""
    block = f", blocks of {line['block']}" if line["format"] == "bsr" else ""
    return [
        question.text,
        FORMATS.get(line["format"], line["format"]),
        line["op"],
        line["shape"],
        line["dtype"],
        str(line["m"]),
        level + block,
        f"`{line['kernel']}`{ran}",
        str(line["figure"]),
        line["opponent"],
        alone(line, runs) or "not yet",
        peer,
        run.gpu,
        f"[{run.name}](/{run.home}), {count}",
    ]


def _said(line: "pd.Series[Any]") -> str:
    return rounded(line.speedup, line.uncertainty)


def figure(runs: Mapping[str, Published]) -> str:
    """Return the picture of the sweep with its caption."""
    run = runs[PICTURED]
    cases, level = drawn(run.cases), f"{100 * LEVEL:g} %"
    ours = cases[cases.ours & (cases.level == LEVEL)].sort_values("block", key=lambda b: b.map(int))
    said = ", ".join(f"{_said(line)} with blocks of {line.block}" for _, line in ours.iterrows())
    base = run.cases[run.cases.baseline.astype(bool) & (run.cases.status == "ok")].median_us
    first = run.cases.iloc[0]
    return "\n\n".join(
        [
            f"![Speed-up over cuBLAS against sparsity, {run.gpu}](/{PICTURE})",
            f"Uniform random blocks, m = {first.m}, n × k = {first['shape']}, {first['dtype']}, "
            f"one {run.gpu}, cold L2, device time.\n"
            f"Baseline: dense cuBLAS in the same contests ({base.min():.0f} to {base.max():.0f} "
            f"µs). Points are means of {run.processes} processes, bands their range; the dotted "
            f"line is 1 / (1 - sparsity).\nAt {level}: {said}. "
            f"From the published run [{run.name}](/{run.home}), by `sparsebench.reports.picture`.",
        ]
    )


def terminal(runs: Mapping[str, Published]) -> str:
    """Return how the answer of `sparsebench run` begins, of one block of the pictured run."""
    run = runs[PICTURED]
    cases = run.cases[run.cases.block == BLOCK]
    text = StringIO()
    console = Console(file=text, width=COLUMNS, color_system=None, force_terminal=False)
    console.print(Answer(run.run, Analysis(pd.DataFrame(), run.noise, cases)))
    lines = text.getvalue().partition("\nFastest")[0].rstrip().splitlines()
    return "\n".join(["```", *(line.rstrip() for line in lines), "```"])


def pruned(path: Path) -> str:
    """Return what pruning cost, a line a recipe."""
    found = model_files.read_pruning(path)
    header = ["method", "pattern", "dense region", "dense", "pruned", "error of the output"]
    header.append("loss, nats")
    loss = f"{found.loss:.3f}" if found.loss is not None else ""
    lines = [["none", "", "", "100 %", "0 %", "", loss]]
    least = sorted(found.outcomes, key=lambda it: it.errors[OUTPUT], reverse=True)
    for it in sorted(least, key=lambda it: (it.sparsity, it.pattern)):
        shares = f"{100 * it.dense:g} %", f"{100 * it.sparsity:g} %"
        cost = f"{100 * it.errors[OUTPUT]:.1f} %", "" if it.loss is None else f"{it.loss:.3f}"
        lines.append([it.method, it.pattern, it.region, *shares, *cost])
    about = f"**{found.weights}**, calibrated on {found.calibration} tokens of "
    about += f"{found.tokens_from}, {found.held_out} later ones held out. Errors are relative, "
    about += "means over layers. One model, one text."
    return f"{about}\n\n{markdown(header, lines)}"


def trained(path: Path) -> str:
    """Return what an L1 term left on in small language models, a line a coefficient."""
    found = json.loads(path.read_text())
    sizes = found["settings"]["sizes"]
    header = ["L1 term", "loss, nats a byte", "zeros (layer with the fewest)", "units on"]
    header += ["most of any token", "dead units"]
    lines = []
    for model in found["trained"]:
        layers = model["layers"]
        zeros, active, dead = (
            np.array([layer[name] for layer in layers]) for name in ("zeros", "active", "dead")
        )
        most = max(layer["most"] for layer in layers)
        counted = [f"{100 * zeros.mean():.2f} % ({100 * zeros.min():.2f})"]
        counted += [
            significant(active.mean()),
            str(most),
            f"{100 * dead.mean() / sizes['hidden']:.0f} %",
        ]
        lines.append([f"{model['l1']:g}", f"{model['loss']:.3f}", *counted])
    about = (
        f"**{found['text']}**, {found['bytes']} bytes, of which {found['held_out']} are counted "
    )
    about += f"over: {sizes['layers']} layers of {sizes['width']} with {sizes['hidden']} hidden "
    about += f"units, {found['settings']['steps']} steps, one seed, {found['device']}. Means over "
    about += "layers."
    return f"{about}\n\n{markdown(header, lines)}"


def widened(path: Path) -> str:
    """Return what block-sparse weights cost in training, a line a model, beside dense ones."""
    found = model_files.read_widths(path)
    header = ["weights", "block", "sparsity", "width", "parameters", "loss, nats a byte"]
    header += ["dense of as many parameters", "loss saved, %", "step, times as fast"]
    lines = []
    for model in dict.fromkeys(
        one.model for one in found.trained if one.pattern != model_files.DENSE
    ):
        own = [one for one in found.trained if one.model == model]
        pairs = [(one, found.dense_match(one, "parameters")) for one in own]
        both = [(sparse, dense) for sparse, dense in pairs if dense]
        saved = [100 * (1 - sparse.loss / dense.loss) for sparse, dense in both]
        faster = [dense.step_us / sparse.step_us for sparse, dense in both]
        first, beside = own[0], both[0][1] if both else None
        shown = f"{beside.width} wide, {beside.parameters / 1e6:.1f} M" if beside else ""
        lines.append(
            [
                *(first.pattern, str(first.block), f"{100 * first.sparsity:.1f} %"),
                *(str(first.width), f"{first.parameters / 1e6:.1f} M"),
                f"{np.mean([one.loss for one in own]):.4f}",
                *(shown, _ends(saved), _ends(faster)),
            ]
        )
    asked = found.settings
    title = f"**Block-sparse weights, beside dense ones of as many parameters.** {found.text}"
    about = (
        f"{title}; {asked['steps']} steps of {asked['batch']} contexts; {asked['seeds']} seeds: "
    )
    about += f"mean, least and greatest; {found.device}; [{path.stem}](training/{path.name})."
    return f"{about}\n\n{markdown(header, lines)}"


def _ends(values: Sequence[float]) -> str:
    """Write a mean with its least and greatest value: 0.41 [0.35, 0.48]."""
    if not values:
        return ""
    return f"{np.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def modelled(path: Path) -> str:
    """Return what kernels save in a whole model, a line a way."""
    found = model_files.read_whole(path)
    header = ["what", "MLP", "tokens", "ms", "tokens a second", "GiB", "mJ a token", ""]
    lines = []
    for way in found.ways:
        numbers = [""] * 4
        if way.times_us:
            joule = f"{1e3 * way.energy_j / way.tokens:.2f}" if way.energy_j else ""
            rate = 1e6 * way.tokens / way.time_us
            numbers = [f"{way.time_us / 1e3:.0f}", f"{rate:.0f}", f"{way.peak_bytes / 2**30:.1f}"]
            numbers.append(joule)
        lines.append([way.what, f"`{way.mlp}`", str(way.tokens), *numbers, way.detail])
    model = found.model
    about = f"**A model of {model['layers']} layers, whole.** {model['width']} wide, "
    about += f"{model['hidden']} hidden units a layer, {found.active_units} of {model['active']:g} "
    about += f"asked for; one process; {found.device}; [{path.stem}](whole/{path.name})."
    return f"{about}\n\n{markdown(header, lines)}"

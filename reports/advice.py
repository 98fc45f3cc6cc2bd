"""An advice (results/advice/pruning.py) as one table: for the terminal, Markdown and the page.

Also collects the evidence that advice.json holds from the published runs and files.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Group
from rich.text import Text

from sparsebench.reports.tables import Cell, Table
from sparsebench.results.advice import measured_layers
from sparsebench.results.advice.layer_estimates import TWO_FOUR, Layer
from sparsebench.results.advice.measured_layers import Evidence
from sparsebench.results.advice.pruning import MOST_LOSS, TRY, WORTH, Answer, advise, commands
from sparsebench.results.advice.step_model import ACTIVE, BOUND, Gain
from sparsebench.results.files import read_model
from sparsebench.results.formatting import amount, duration, percent, significant
from sparsebench.results.model_files import (
    SPARSITY_SCHEMA,
    L1Trainings,
    read_pruning,
    read_whole,
    read_widths,
)
from sparsebench.results.model_shapes import read_shapes
from sparsebench.results.tables.analysis import Analysis

COLUMNS = ["kind of sparsity", "MLPs", "model", "weights", "loss", "how sure"]
WORDS = {"kind of sparsity", "loss", "how sure"}


def table(answer: Answer) -> Table:
    """Return a line for each kind; a gain is good if all of its interval is worth it."""
    lines: list[list[Cell]] = [
        [
            each.kind,
            *((gain.cell, style(gain)) for gain in (each.layers, each.step)),
            f"{significant(each.gigabytes)} GB",
            (each.quality, loss_style(each.nats)),
            each.sure,
        ]
        for each in answer.kinds
    ]
    return Table(columns=COLUMNS, lines=lines, title=title(answer), words=WORDS)


def layer_text(layer: Layer) -> str:
    """Return a kind of sparsity, its level and its tokens: `2:4, 25 % zeros, 16 tokens, fp8`."""
    level = f"{percent(layer.sparsity)} zeros" if layer.sparsity else f"{layer.active:.0f} units"
    dtype = "" if layer.element == 2 else f", {layer.dtype}"
    way = "half 2:4" if (layer.way, layer.sparsity) == (TWO_FOUR, 0.25) else layer.way
    return f"{way}, {level}, {amount(layer.m, 'token')}{dtype}"


def title(answer: Answer) -> str:
    """Return the model, GPU and tokens, with the size and the time of the dense model."""
    dense = f"dense: {significant(answer.dense_gigabytes)} GB"
    if answer.dense_us is not None:
        dense += f", about {duration(answer.dense_us)}"
    return (
        f"{answer.model.name} on {answer.gpu}, {amount(answer.tokens, 'token')} at once ({dense})"
    )


def terminal(answer: Answer) -> Group:
    """Return the answer for a console, without the commands, which must not be wrapped."""
    notes = (Text(note, "dim") for note in _notes(answer))
    return Group(Text(answer.verdict, "bold"), Text(), table(answer), Text(), *notes)


def to_measure(answer: Answer) -> list[str]:
    """Return a line that introduces the commands, and a line for each of them."""
    return ["To measure:", *(f"  {command}" for command in commands(answer))]


def markdown(answer: Answer) -> str:
    parts = [f"**{answer.verdict}**", table(answer).markdown(), *_notes(answer)]
    first, *lines = to_measure(answer)  # two more spaces make the commands a block of code
    return "\n\n".join([*parts, first, *(f"  {line}" for line in lines)]) + "\n"


BRIEF = ("Qwen3-32B", "Llama-3-8B", "Gemma-3-270m"), 16  # models and tokens of short answers


def in_brief(evidence: Evidence, gpu: str) -> str:
    """Return the answers for some models in one sentence, for the README and the first page."""
    texts, (models, tokens) = [], BRIEF
    for answer in (advise(evidence, read_shapes(name), gpu, tokens) for name in models):
        best, name = answer.best, answer.model.name
        if best is None:
            texts.append(f"{name} is not worth pruning")
        else:
            try_it = answer.word == TRY
            verdict = "may be worth pruning" if try_it else "needs training with its zeros"
            caveat = f", {best.step.caveat}" if best.step.caveat else ""
            texts.append(f"{name} {verdict} ({best.step.text} as fast with {best.kind}{caveat})")
    return f"With {tokens} tokens at once in bf16 on an {gpu}: {'; '.join(texts)}."


def sources(answer: Answer) -> list[str]:
    """Return the runs and files that an answer rests on, each once."""
    return list(dict.fromkeys(run for each in answer.kinds for run in each.runs))


def collect_evidence(runs: Iterable[tuple[Analysis, str]], root: Path) -> Evidence:
    """Return the evidence of published runs, and of the models' files in their folder."""
    evidence = measured_layers.of_runs(runs)
    steps, losses, costs = [*evidence.steps], [*evidence.losses], [*evidence.costs]
    for file in sorted(root.glob("*/*.json")):
        source = file.relative_to(root).as_posix()
        match file.parent.name:
            case "pruning":
                pruning = read_pruning(file)
                losses += measured_layers.of_pruning(pruning, source)
                costs += measured_layers.costs_of_pruning(pruning, source)
            case "training":
                losses += measured_layers.of_trainings(read_widths(file), source)
            case "sparsity":
                trained = read_model(file, L1Trainings, SPARSITY_SCHEMA)
                losses.append(measured_layers.of_l1(trained, ACTIVE, source))
                costs.append(measured_layers.cost_of_l1(trained, ACTIVE, source))
            case "whole":
                steps += measured_layers.of_whole(read_whole(file), source.removesuffix(".json"))
    return replace(evidence, steps=steps, losses=losses, costs=costs)


def text_of(evidence: Evidence) -> str:
    """Return advice.json, with a line for each record."""
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, records)) + "\n]"
        for name, records in asdict(evidence).items()
        if name != "schema"
    ]
    return ",\n".join(['{"schema": ' + json.dumps(evidence.schema), *parts]) + "}\n"


def _notes(answer: Answer) -> list[str]:
    rows = [f"Published runs: {', '.join(sources(answer))}."] if sources(answer) else []
    return [*answer.notes, *rows]


def loss_style(nats: float | None) -> str:
    """Return the style of a loss in nats per token."""
    if nats is None:
        return "quiet"
    return "good" if nats <= MOST_LOSS else "bad" if nats > 10 * MOST_LOSS else "unsure"


def style(gain: Gain) -> str:
    """Return the style of a gain's cell: good if all of its interval is worth it."""
    if gain.basis == BOUND:
        return "quiet"
    return "good" if gain.low >= WORTH else "bad" if gain.high < 1 else "unsure"

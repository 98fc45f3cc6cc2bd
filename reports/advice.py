"""An advice (results/advice/pruning.py) as one table: for the terminal, Markdown and the page."""

from rich.console import Group
from rich.text import Text

from sparsebench.reports.tables import Cell, Table, escape_markdown
from sparsebench.results.advice.measured_layers import Evidence
from sparsebench.results.advice.pruning import MOST_LOSS, TRY, WORTH, Answer, advise, commands
from sparsebench.results.advice.step_model import BOUND, Gain
from sparsebench.results.formatting import amount, duration, significant
from sparsebench.results.model_shapes import read_shapes

COLUMNS = ["kind of sparsity", "MLPs", "model", "weights", "loss", "how sure"]
WORDS = {"kind of sparsity", "loss", "how sure"}
BRIEF = ("Qwen3-32B", "Llama-3-8B", "Gemma-3-270m"), 16  # models and tokens of short answers


def table(answer: Answer) -> Table:
    """Return a line for each kind, below the model, GPU and tokens and the dense model."""
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
    dense = f"dense: {significant(answer.dense_gigabytes)} GB"
    if answer.dense_us is not None:
        dense += f", about {duration(answer.dense_us)}"
    where = f"{answer.model.name} on {answer.gpu}, {amount(answer.tokens, 'token')} at once"
    return Table(columns=COLUMNS, lines=lines, title=f"{where} ({dense})", words=WORDS)


def terminal(answer: Answer) -> Group:
    """Return the answer for a console, without the commands, which must not be wrapped."""
    notes = (Text(note, "dim") for note in _notes(answer))
    return Group(Text(answer.verdict, "bold"), Text(), table(answer), Text(), *notes)


def to_measure(answer: Answer) -> list[str]:
    """Return a line that introduces the commands, and a line for each of them."""
    return ["To measure:", *(f"  {command}" for command in commands(answer))]


def markdown(answer: Answer) -> str:
    notes = map(escape_markdown, _notes(answer))
    parts = [f"**{escape_markdown(answer.verdict)}**", table(answer).markdown(), *notes]
    first, *lines = to_measure(answer)  # two more spaces make the commands a block of code
    return "\n\n".join([*parts, first, *(f"  {line}" for line in lines)]) + "\n"


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
    """Return the runs that an answer rests on, each once."""
    return list(dict.fromkeys(run for each in answer.kinds for run in each.runs))


def _notes(answer: Answer) -> list[str]:
    rows = [f"Published runs: {', '.join(sources(answer))}."] if sources(answer) else []
    return [*answer.about, *answer.basis, *rows]


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

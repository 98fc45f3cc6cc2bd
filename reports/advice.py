"""An advice (results/advice/pruning.py): for the terminal, Markdown and the page.

Worth trying: Qwen3-8B is 1.13× [1.11, 1.14] as fast with half of each MLP 2:4 ...
perplexity × │  ● 2:4                      a dot per kind, against the speedup of the model;
           1 │ ● half of each MLP 2:4      kinds that are unusable without training have none
table          the numbers of the kinds
commands       prune, load, measure
"""

from math import exp
from pathlib import Path
from shlex import quote

from markupsafe import Markup
from rich.console import Group
from rich.text import Text

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._svg import ROLES, Look
from sparsebench.reports.tables import Cell, Table, escape_markdown
from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    ANYWHERE,
    BITMAP_TOKENS,
    TWO_FOUR,
)
from sparsebench.results.advice.measured_layers import TRAINED, Evidence, Loss
from sparsebench.results.advice.pruning import (
    CONTEXT,
    HALF,
    KINDS,
    MOST_LOSS,
    TRY,
    WORTH,
    Advice,
    Answer,
    advise,
)
from sparsebench.results.advice.step_model import (
    BOUND,
    DECODED,
    ESTIMATE,
    LOOK,
    MEASURED,
    REST,
    Gain,
)
from sparsebench.results.formatting import amount, duration, percent, significant
from sparsebench.results.model_shapes import read_shapes

SURVEY = "runs/survey"  # where the commands put the survey of a GPU without published runs
COLUMNS = ["kind of sparsity", "model", "MLPs", "weights", "quality", "how sure"]
WORDS = {"kind of sparsity", "quality", "how sure"}
BRIEF = ("Qwen3-32B", "Llama-3-8B", "Gemma-3-270m"), 16  # models and tokens of short answers
HOW = {MEASURED: "measured", LOOK: "a look", ESTIMATE: "estimate", BOUND: "upper limit"}
CHART = (470, 210)
DASHED = Look(dash="3 3", width=0.8, alpha=0.5)
PATTERNS = {  # of `sparsebench try`, with a kernel of an MLP, or of one of its products
    HALF: "spense_ffn pattern=spense_hidden",
    "2:4": "spense_ffn pattern=two_four",
    "zeros anywhere, 50 %": "default format=bitmap op=linear pattern=unstructured",
    "zeros anywhere, 70 %": "default format=bitmap op=linear pattern=unstructured",
}


def shown(answer: Answer) -> list[Advice]:
    """Return the kinds that are usable without training, the fastest first."""
    return sorted((k for k in answer.kinds if k.usable), key=lambda each: -each.step.value)


def unusable(answer: Answer) -> list[str]:
    """Return a sentence on the other kinds, if there are any."""
    others = [each for each in answer.kinds if not each.usable]
    texts = [f"{each.kind} ({each.step.text}, {each.quality})" for each in others]
    return [f"Unusable without training: {'; '.join(texts)}."] if texts else []


def chart(answer: Answer) -> Markup:
    """Draw the speedup of the model against its quality, with a dot for each kind of `shown`."""
    drawing = Chart(CHART, "speedup of the model, ×", "perplexity, × (lower is better)", log="xy")
    drawing.rule("x", 1.0)
    drawing.rule("x", WORTH, DASHED)
    drawing.rule("y", 1.0)
    drawing.rule("y", exp(MOST_LOSS), DASHED)
    for each in shown(answer):
        if each.nats is not None:
            place, gain, look = exp(each.nats), each.step, ROLES["peer"].but(marker="o", dash=None)
            if answer.best and each.kind == answer.best.kind:
                look = ROLES["ours"].but(size=8)
            if gain.basis != BOUND:
                drawing.spans([place], [gain.low], [gain.high], look.but(dash=""), across=True)
            title = f"{each.kind}: {gain.text}, {each.quality}"
            name = f"{each.kind} (at most)" if gain.basis == BOUND else each.kind
            drawing.line([gain.value], [place], look, [title], name)
    return drawing.svg(f"Speed and quality of {answer.model.name} by kind of sparsity")


def table(answer: Answer) -> Table:
    """Return a line for each kind of `shown`, below the model, GPU and tokens."""
    lines: list[list[Cell]] = [
        [
            each.kind,
            *((gain.cell, style(gain)) for gain in (each.step, each.layers)),
            f"{significant(each.gigabytes)} GB",
            (each.quality, loss_style(each.nats)),
            sure(each),
        ]
        for each in shown(answer)
    ]
    dense = f"dense: {significant(answer.dense_gigabytes)} GB"
    if answer.dense_us is not None:
        dense += f", about {duration(answer.dense_us)}"
    where = f"{answer.model.name} on {answer.gpu}, {amount(answer.tokens, 'token')} at once"
    return Table(columns=COLUMNS, lines=lines, title=f"{where} ({dense})", words=WORDS)


def sure(advice: Advice) -> str:
    """Say how the gains of the model and of its MLPs are known."""
    part = advice.step.part or "model"
    texts = [f"{name}: {HOW[g.basis]}" for name, g in ((part, advice.step), ("MLP", advice.layers))]
    same = advice.step.basis == advice.layers.basis and advice.step.basis in (ESTIMATE, BOUND)
    return HOW[advice.step.basis] if same else "; ".join(texts)


def commands(answer: Answer) -> dict[str, str]:
    """Return what to type next, each line with its purpose."""
    model, best = answer.model, answer.best
    file = Path(model.source)
    folder = quote(str(file.parent if file.is_file() else model.name))
    if answer.dense_us is None:
        name = model.source if file.exists() else model.name
        arguments = f"{quote(name)} --gpu {quote(answer.gpu)} --batch {answer.tokens}"
        return {
            "measure this GPU": f"sparsebench new-gpu --budget 10m --out {SURVEY}",
            "ask again": f"sparsebench advise {arguments} --run {SURVEY}/screen",
        }
    kind = best.kind if best and best.kind in PATTERNS else HALF
    way, sparsity = KINDS[kind]
    sizes = f"m={answer.tokens} n={model.intermediate} k={model.hidden} dtype=bf16"
    kernel, *options = PATTERNS[kind].split()
    options = [kernel, *options[:-1], sizes, options[-1], f"sparsity={sparsity:g}"]
    lines = {"measure": f"sparsebench try {' '.join(options)}"}
    if best is None:
        return lines
    pattern = f"2:4 --dense {1 - 2 * sparsity:g}" if way == TWO_FOUR else f"{sparsity:g} --dense 0"
    load = 'model = AutoModelForCausalLM.from_pretrained("pruned")'
    load = f"import sparsebench.nn; from transformers import AutoModelForCausalLM; {load}"
    if way == ANYWHERE:
        load += f"; sparsebench.nn.sparsify_(model, sparsebench.nn.Unstructured({sparsity:g}))"
    prune = f"sparsebench prune {folder} --pattern {pattern} --out pruned"
    return {"prune": prune, "load, in Python": load, **lines}


def terminal(answer: Answer) -> Group:
    """Return the answer for a console, without the commands, which must not be wrapped."""
    notes = (Text(note, "dim") for note in [*about(answer), *_runs(answer)])
    return Group(Text(answer.verdict, "bold"), Text(), table(answer), Text(), *notes)


def next_steps(answer: Answer) -> list[str]:
    """Return a line for each command, below its purpose."""
    return [line for step in commands(answer).items() for line in (f"{step[0]}:", f"  {step[1]}")]


def markdown(answer: Answer, evidence: Evidence) -> str:
    """Return the answer with every note."""
    steps = "\n".join(f"    {line}" for line in next_steps(answer))  # four spaces: a block of code
    notes = map(escape_markdown, [*about(answer), *basis(evidence, answer.gpu), *_runs(answer)])
    parts = [f"**{escape_markdown(answer.verdict)}**", table(answer).markdown(), steps, *notes]
    return "\n\n".join(parts) + "\n"


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
    return list(dict.fromkeys(run for each in shown(answer) for run in each.runs))


def _runs(answer: Answer) -> list[str]:
    return [f"Published runs: {', '.join(sources(answer))}."] if sources(answer) else []


def about(answer: Answer) -> list[str]:
    """Return what is assumed about a model, and whose losses the answer shows."""
    model = answer.model
    load = f"prompts of {CONTEXT} tokens, of which only the last one passes the head"
    if answer.tokens <= DECODED:
        load = f"{amount(answer.tokens, 'sequence')} with a KV cache of {CONTEXT} tokens"
        load += " each" * (answer.tokens > 1)
    share = percent(round(model.layers * model.mlp / model.weights, 2))
    first = f"The model runs {load}, in one pass. The MLPs hold {share} of the weights."
    losses = dict.fromkeys(of_loss(each.loss) for each in answer.kinds if each.loss)
    return [first, *unusable(answer), *losses]


def of_loss(loss: Loss) -> str:
    """Say how a loss was measured."""
    if loss.method == TRAINED:
        return (
            "Sparse activations come from training with ReLU and an L1 term, not from pruning: "
            f"the term changed the loss of {loss.model} by {loss.rise:+.2f} nats per {loss.unit}."
        )
    return (
        f"Quality was measured on {loss.subject}, with pruned MLPs, over {loss.held_out:,} "
        f"held-out {loss.unit}s, with the best method that was measured."
    )


def basis(evidence: Evidence, gpu: str) -> list[str]:
    """Return what all answers on a GPU assume, and what their marks mean."""
    inside, predicted = evidence.layers.coverage if gpu in evidence.layers.gpus else (0, 0)
    estimated = (
        "An estimate (≈), with its interval in brackets, comes from the bytes and FLOPs of the "
        "nearest measured layers, against the measured ceilings of each GPU; layers of other "
        "GPUs count less. "
        "To test the intervals, each measured layer was estimated from layers of other shapes: "
        f"{inside} of {predicted} intervals held the measured value. "
        f"The time of the dense rest may be wrong by a factor of {REST:g}."
    )
    layers = [row for row in evidence.measured if row.layer.way != ACTIVATIONS]
    unpruned = sum(row.over == "original" for row in layers)
    over = "Gains are over dense on the same zeros: it multiplies the pruned weights, too."
    if unpruned:
        over = (
            f"In {unpruned} of {amount(len(layers), 'layer')} that were measured, those bound by "
            "FLOPs, the gain is over dense with unpruned weights; in the others, over dense on the "
            "same zeros."
        )
    return [
        *([estimated] if predicted else []),
        over,
        "Weights, activations and cache have 16 bits. Only the MLPs are sparse. Attention, norms, "
        "the cache, the embedding and the head stay dense.",
        "Brackets of a measured gain: the 95 % interval over processes, plus variation between "
        "runs. A look has fewer than 6 processes, and no brackets.",
        "An extrapolated gain was measured on a model with fewer of these layers, whose head "
        "takes the same share of the step. It is assumed to hold for all layers.",
        "A gain is a curve over the tokens at once: straight, in logarithms, between two batches "
        "of the same model that were measured. Beyond those, and for other models, its points are "
        "estimates. The verdict follows the curve, not its interval.",
        "“At most” is the ratio of bytes or of FLOPs, whichever is larger: no layer that was "
        "measured is similar enough for an estimate.",
        f"With more than {BITMAP_TOKENS} tokens, a layer with zeros anywhere multiplies a "
        "dense copy of its weights, and keeps both.",
    ]


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

"""An advice (results/advice/pruning.py): for the terminal, Markdown and the page.

Worth trying: Qwen3-8B is 1.13× [1.11, 1.14] as fast with half of each MLP 2:4 ...
perplexity × │  ● 2:4                      a dot per kind, against the speedup of the model;
           1 │ ● half of each MLP 2:4      kinds that are unusable without training have none
table          the numbers of the kinds
commands       prune, load, measure
"""

from collections.abc import Sequence
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
    BLOCKS,
    FOUR_BITS,
    FP8,
    SIX_EIGHT,
    TWO_FOUR,
    TWO_FOUR_BITS,
    TWO_FOUR_FP8,
    Measured,
)
from sparsebench.results.advice.measured_layers import TRAINED, Evidence, Loss
from sparsebench.results.advice.pruning import (
    CONTEXT,
    HALF,
    KINDS,
    MOST_LOSS,
    QUANTIZE,
    TRAIN,
    TRY,
    UNMEASURED,
    WORTH,
    Advice,
    Answer,
    advise,
)
from sparsebench.results.advice.step_model import (
    BOUND,
    DECODED,
    REST,
    Gain,
)
from sparsebench.results.formatting import amount, duration, join_words, percent, significant
from sparsebench.results.model_shapes import Mixture, read_shapes

FROM = "AutoModelForCausalLM.from_pretrained"
SURVEY = "runs/survey"  # where the commands put the survey of a GPU without published runs
WORDS = {"kind", "quality"}
BRIEF = ("Qwen3-32B", "Llama-3-8B", "Gemma-3-270m"), 16  # models and tokens of short answers
IN_BRIEF = {TRY: "may be worth pruning", TRAIN: "needs training with its zeros"}
IN_BRIEF |= {UNMEASURED: "was not measured", QUANTIZE: "should be quantized, not pruned"}
CHART = (400, 220)
SPEEDS = 0.5, 4.0  # at the ends of the chart's intervals: an estimate from one layer may have 0.06
TRAINED_LOOK = ROLES["peer"].but(marker="s", dash=None, hollow=True)
DASHED = Look(dash="3 3", width=0.8, alpha=0.5)
MEASURING = {  # what `sparsebench try` runs for a kind: an MLP, or one of its products
    TWO_FOUR: "spense_ffn dtype=bf16",
    SIX_EIGHT: "slide_wgmma op=linear dtype=bf16 pattern=six_eight",
    BLOCKS: "default format=bsr op=ffn dtype=bf16 pattern=blocks block=64",
    ANYWHERE: "default format=bitmap op=linear dtype=bf16 pattern=unstructured",
    FP8: "cublas op=ffn dtype=fp8",
    TWO_FOUR_FP8: "spense_ffn dtype=fp8",
    FOUR_BITS: "torch_int4 op=linear dtype=bf16 weight_bits=4",
    TWO_FOUR_BITS: "sparse_marlin op=linear dtype=fp16 weight_bits=4 pattern=two_four",
}
TORCHAO = {  # how torch loads a model with these weights
    FP8: "Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor())",
    FOUR_BITS: "Int4WeightOnlyConfig(group_size=128)",
}
QUANTIZED_HOW = (
    "Fewer bits are those of every product of a layer: fp8 with a scale per tensor, inputs too; 4 "
    "bits by GPTQ, with a scale per 128 weights. SpenseGPT pruned before. The weights came in 4 "
    "bits of another kind, so their loss in 4 bits is that of two roundings."
)


def shown(answer: Answer) -> list[Advice]:
    """Return the kinds that are usable without training, those that keep the quality first."""
    return sorted((k for k in answer.kinds if k.usable), key=_rank)


def _rank(kind: Advice) -> tuple[bool, bool, bool, float]:
    """Order kinds by quality: kept, lower, not measured; then by the speed of the model."""
    lower, bound = (kind.nats or 0.0) > MOST_LOSS, kind.step.basis == BOUND
    return kind.nats is None, lower, bound, -kind.step.value


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
            if gain.basis != BOUND and not gain.rough:
                ends = [min(max(end, SPEEDS[0]), SPEEDS[1]) for end in (gain.low, gain.high)]
                drawing.spans([place], ends[:1], ends[1:], look.but(dash=""), across=True)
            title = f"{each.kind}: {gain.text}, {each.quality}"
            name = f"{each.kind} (at most)" if gain.basis == BOUND else each.kind
            drawing.line([gain.value], [place], look, [title], name)
    for each in answer.kinds:
        if each.recovery:
            title = f"{each.kind}, after training: {each.step.text}, {each.quality}"
            at, rise = [each.step.value], [exp(each.recovery.rise)]
            drawing.line(at, rise, TRAINED_LOOK, [title], f"{each.kind}, trained")
    return drawing.svg(f"Speed and quality of {answer.model.name} by kind of sparsity")


def table(*answers: Answer, every: bool = False) -> Table:
    """Return lines of a model's kinds, those of `shown` or every one, with two cells per answer."""
    first = answers[0]
    kinds = sorted(first.kinds, key=lambda each: (not each.usable, _rank(each)))
    dense = [cell for answer in answers for cell in (_time(answer), "1×")]
    lines: list[list[Cell]] = [["dense", *dense, f"{significant(first.dense_gigabytes)} GB", "–"]]
    for kind in kinds if every else shown(first):
        gains = [e.step for answer in answers for e in answer.kinds if e.kind == kind.kind]
        steps = [
            cell
            for answer, gain in zip(answers, gains, strict=True)
            for cell in (_time(answer, gain), (gain.cell, style(gain)))
        ]
        quality = kind.quality, loss_style(kind.nats)
        lines.append([kind.kind, *steps, f"{significant(kind.gigabytes)} GB", quality])
    heads = [head for answer in answers for head in (of_load(answer), f"gain at {answer.tokens:,}")]
    title = f"{first.model.name} on {first.gpu}"
    columns = ["kind", *heads, "weights", "quality"]
    return Table(columns=columns, lines=lines, title=title, words=WORDS)


def of_load(answer: Answer) -> str:
    """Name what a step does: `decoding, 16 tokens` or `prompts, 4096 tokens`."""
    what = "decoding" if answer.tokens <= DECODED else "prompts"
    return f"{what}, {answer.tokens:,} token{'s' * (answer.tokens > 1)}"


def _time(answer: Answer, gain: Gain | None = None) -> Cell:
    """Return about how long a step takes with this gain, or in dense."""
    if answer.dense_us is None or (gain and gain.basis == BOUND):
        return "not measured", "quiet"
    return duration(answer.dense_us / (gain.value if gain else 1.0))


def commands(answer: Answer) -> dict[str, str]:
    """Return what to type next, each line with its purpose."""
    model, best = answer.model, answer.best
    file = Path(model.source)
    folder = str(file.parent if file.is_file() else model.name)
    if isinstance(model, Mixture):
        find = "sparsebench find 'experts 2:4'"
        return {"published layers of experts": find, "measure some": "sparsebench run experts"}
    if answer.dense_us is None:
        name = model.source if file.exists() else model.name
        arguments = f"{quote(name)} --gpu {quote(answer.gpu)} --batch {answer.tokens}"
        return {
            "measure this GPU": f"sparsebench new-gpu --budget 10m --out {SURVEY}",
            "ask again": f"sparsebench advise {arguments} --run {SURVEY}/screen",
        }
    lines = {"measure": command_of(answer, best.kind if best else HALF)}
    if best is None or answer.word == UNMEASURED:
        return lines
    (way, sparsity), load = KINDS[best.kind], "from transformers import AutoModelForCausalLM"
    if way in TORCHAO:
        load += f", TorchAoConfig; from torchao.quantization import *; model = {FROM}("
        repository = model.source.partition("huggingface.co/")[2].partition("/blob/")[0] or folder
        load += f"{repository!r}, quantization_config=TorchAoConfig({TORCHAO[way]}))"
        return {"load, in Python, with torchao": load, **lines}
    pattern = f"2:4 --dense {1 - 2 * sparsity:g}" if way == TWO_FOUR else f"{sparsity:g} --dense 0"
    load = f'import sparsebench.nn; {load}; model = {FROM}("pruned")'
    if way == ANYWHERE:
        load += f"; sparsebench.nn.sparsify_(model, sparsebench.nn.Unstructured({sparsity:g}))"
    prune = f"sparsebench prune {quote(folder)} --pattern {pattern} --out pruned"
    return {"prune": prune, "load, in Python": load, **lines}


def command_of(answer: Answer, kind: str) -> str:
    """Return the command that measures a layer of the model of one of MEASURING."""
    (way, sparsity), model = KINDS[kind], answer.model
    words = [MEASURING[way], f"m={answer.tokens} n={model.intermediate} k={model.hidden}"]
    if way in (TWO_FOUR, TWO_FOUR_FP8):
        words += ["pattern=spense_hidden" if sparsity < 0.5 else "pattern=two_four"]
    words += [f"sparsity={sparsity:g}"] * (sparsity > 0)
    return f"sparsebench try {' '.join(words)}"


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
            verdict = IN_BRIEF[answer.word]
            caveat = f", {best.step.caveat}" if best.step.caveat else ""
            texts.append(f"{name} {verdict} ({best.step.text} as fast with {best.kind}{caveat})")
    return f"With {tokens} tokens at once in bf16 on an {gpu}: {'; '.join(texts)}."


def sources(*answers: Answer) -> list[str]:
    """Return the runs that answers rest on, each once."""
    kinds = [kind for answer in answers for kind in shown(answer)]
    return list(dict.fromkeys(run for each in kinds for run in each.runs))


def _runs(answer: Answer) -> list[str]:
    return [f"Published runs: {', '.join(sources(answer))}."] if sources(answer) else []


def about(answer: Answer) -> list[str]:
    """Return what is assumed about a model, and what its answer rests on."""
    model = answer.model
    load = f"prompts of {CONTEXT} tokens, of which only the last one passes the head"
    if answer.tokens <= DECODED:
        load = f"{amount(answer.tokens, 'sequence')} with a KV cache of {CONTEXT} tokens"
        load += " each" * (answer.tokens > 1)
    share = percent(round(model.layers * model.mlp / model.weights, 2))
    first = f"The model runs {load}, in one pass. The MLPs hold {share} of the weights."
    if isinstance(model, Mixture):
        hit = model.experts_hit(answer.tokens)
        first += (
            f" A step reads {hit} of {model.experts} experts in each layer, if all are equally "
            f"likely: E (1 − (1 − k/E)^m) with E = {model.experts}, k = {model.top_k} and "
            f"m = {answer.tokens}. Real routing is skewed, and reads fewer."
        )
    return [first, *unusable(answer), *rests_on(answer)]


def rests_on(answer: Answer) -> list[str]:
    """Return what rough estimates rest on, and whose losses an answer shows."""
    losses = [each.loss for each in answer.kinds if each.loss]
    with_l1 = [_of_l1(loss) for loss in losses if loss.method == TRAINED]
    pruned = [loss for loss in losses if loss.method != TRAINED]
    return [*_rough(answer), *_of_recoveries(answer), *_of_losses(pruned), *with_l1]


def _rough(answer: Answer) -> list[str]:
    """Say what rough estimates rest on, in one sentence if there are any."""
    texts: dict[str, list[str]] = {}
    for each in answer.kinds:
        if each.step.rough:
            texts.setdefault(each.step.rough, []).append(each.kind)
    rests = "; ".join(f"for {join_words(kinds)}, on {rows}" for rows, kinds in texts.items())
    why = "Rough estimates have no interval, because they rest on few layers"
    return [f"{why}: {rests}."] if rests else []


def _of_recoveries(answer: Answer) -> list[str]:
    """Say what training brought back, for all kinds of a model together."""
    texts: dict[str, list[str]] = {}
    for each in answer.kinds:
        if after := each.recovery:
            dense, trained = after.dense, after.dense + after.rise
            subject = f"{after.pruned.subject}, dense {dense:.2f}, trained on {after.text}"
            losses = f"{dense + after.pruned.rise:.2f}, then {trained:.2f}"
            ends = f"[{dense + after.low:.2f}, {dense + after.high:.2f}]"
            line = f"{each.kind} {losses} {ends} after {after.minutes:.1f} minutes"
            texts.setdefault(subject, []).append(line)
    return [
        f"Loss in nats per token of {subject} with zeros that stayed zeros: {'; '.join(lines)}."
        for subject, lines in texts.items()
    ]


def _of_losses(losses: Sequence[Loss]) -> list[str]:
    """Say how losses by pruning and quantizing were measured."""
    if not losses:
        return []
    subjects = dict.fromkeys(each.subject for each in losses)
    tokens = dict.fromkeys(f"{each.held_out:,}" for each in losses)
    most = "; each kind shows the model that lost most" if len(subjects) > 1 else ""
    most += "; losses over different numbers of tokens do not compare" if len(tokens) > 1 else ""
    return [
        f"Quality was measured on {join_words([*subjects])}, with pruned MLPs or fewer bits, over "
        f"{join_words([*tokens])} held-out tokens, with the best method that was measured{most}."
    ]


def _of_l1(loss: Loss) -> str:
    return (
        "Sparse activations come from training with ReLU and an L1 term, not from pruning: "
        f"the term changed the loss of {loss.model} by {loss.rise:+.2f} nats per {loss.unit}."
    )


def basis(evidence: Evidence, gpu: str) -> list[str]:
    """Return what all answers on a GPU assume, and what their marks mean."""
    inside, predicted = evidence.layers.coverage if gpu in evidence.layers.gpus else (0, 0)
    estimated = (
        "An estimate (≈) comes from the bytes and FLOPs of the nearest measured layers, against "
        "the ceilings of each GPU. Estimated from layers of other shapes, "
        f"{inside} of {predicted} measured layers lie in their intervals. "
        f"The time of the dense rest may be wrong by a factor of {REST:g}."
    )
    layers = evidence.measured
    unpruned = sum(r.over == "original" and r.layer.way != ACTIVATIONS for r in layers)
    return [
        *([estimated] if predicted else []),
        "Gains are over dense on the same zeros."
        + f" Those of {unpruned} layers, bound by FLOPs, are over unpruned weights."
        * (unpruned > 0),
        "Only the MLPs are sparse. Attention, norms, the cache, the embedding and the head stay "
        "dense, in 16 bits. Gains of fp8 are over 16 bits in another contest, in one process.",
        QUANTIZED_HOW + _in_four_bits(layers),
        "Brackets of a measured gain: the 95 % interval over processes, plus variation between "
        "runs. A look has fewer than 6 processes, and no brackets.",
        "An extrapolated gain was measured on a model with fewer of these layers, whose head "
        "takes the same share of the step. It is assumed to hold for all layers.",
        "A gain is a curve over the tokens at once, straight, in logarithms, between the batches "
        "of a model that were measured; its other points are estimates. The verdict follows it.",
        "“At most” is the ratio of bytes or of FLOPs: no measured layer is similar enough.",
        f"With more than {BITMAP_TOKENS} tokens, zeros anywhere multiply a dense copy and keep it.",
    ]


def _in_four_bits(layers: Sequence[Measured]) -> str:
    """Name the kernels of the layers in 4 bits, with their gains by tokens."""
    texts: dict[str, dict[int, str]] = {}
    for row in sorted(layers, key=lambda row: (row.layer.m, row.gain)):  # the largest is the last
        if row.layer.way in (FOUR_BITS, TWO_FOUR_BITS):
            texts.setdefault(row.kernel, {})[row.layer.m] = Gain.measured(row).short
    gains = [
        f"{kernel} {', '.join(f'{gain} at {m}' for m, gain in by_tokens.items())}"
        for kernel, by_tokens in texts.items()
    ]
    return f" Gains of layers in 4 bits, by tokens: {'; '.join(gains)}." * bool(gains)


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

"""From which context length on selecting keys pays off (results/advice/crossings.py).

method  block  kept  faster from       interval            at the longest length
pooled     64  10 %            3,100   2,800 to 3,500      8.1× [7.9, 8.3] at 65,536
means      16  2,048 keys      ≤ 2,048 ≤ 2,048             3.0× [2.9, 3.1] at 131,072
lists      64  10 %            ...                         last: they select nothing themselves

The column of intervals is left out if all of them repeat the column before.

For the terminal (`sparsebench advise --attention`), Markdown and the page (site/attention.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf, nan

from rich.console import RenderableType
from rich.text import Text

from sparsebench._gpus import gpus_with_advice, names_device, require_gpu
from sparsebench.errors import ResultError
from sparsebench.reports.tables import Cell, Table, escape_markdown
from sparsebench.results.advice.crossings import AttentionEvidence, CurvePoint, SelectionCurve
from sparsebench.results.formatting import amount, between, capital, join_words, percent
from sparsebench.results.model_shapes import ModelShapes
from sparsebench.results.selection_files import Passes, SelectionQuality
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.contests import PARTS

METHODS = {
    "pooled": "pooled top-k",
    "means": "means of pages",
    "bounds": "bounds of pages",
    "scores": "given scores",
    "lists": "given lists",
    "nsa": "NSA",
    "moba": "MoBA",
    "vsa": "VSA",
    "xattention": "XAttention",
}
"""The name of a method that a kernel calls otherwise; any other keeps the kernel's word."""

SUITES = {"prompt": "attention-select", "decode": "attention-decode-select"}
PHASES = {"prompt": "prompts", "decode": "decoding"}
COLUMNS = ["method", "block", "kept", "faster from", "interval", "at the longest length"]
NOTES = [
    "Faster from: the context length, in tokens, from which on the method is faster than the "
    "fastest dense kernel: device time of a call, as in a CUDA graph, with all that a call "
    "computes. A straight line in logarithms joins the measured lengths.",
    "≤: already faster at the shortest length that was measured. >: not faster at the longest. "
    "Nothing is extrapolated.",
    "Interval: the lengths at which the interval of the gain holds 1. It has that interval's "
    f"level: 95 % from {FEWEST} processes on. A look (†) has fewer, and shows their range.",
    "Kept: the share of the blocks of keys that a query sees, or a number of keys.",
    "A call with given scores or lists does not score blocks itself: a method that does takes "
    "longer with the same kernel. Pooled: mean query and mean key of two blocks. XAttention: "
    "strided antidiagonals. Means and bounds of pages: of the cached keys, kept beside them.",
]


def select_curves(
    evidence: AttentionEvidence, gpu: str | None = None, model: ModelShapes | None = None
) -> list[SelectionCurve]:
    """Return the curves of a GPU and of a model's heads. Raises ResultError if all are of others,
    or if there is no such GPU.

    Without any curve, none is returned, and `missing` says what to measure.
    """
    if gpu is not None and not evidence.curves:
        require_gpu(gpu, gpus_with_advice())
    curves = [c for c in evidence.curves if gpu is None or names_device(gpu, c.gpu)]
    if evidence.curves and not curves:
        names = join_words(sorted({curve.gpu for curve in evidence.curves}))
        raise ResultError(f"--gpu: expected a GPU with such rows: {names}; found {gpu!r}")
    if model is None:
        return curves
    of_model = [c for c in curves if shape_of(c) == (model.heads, model.kv_heads, model.head_dim)]
    if curves and not of_model:
        shapes = join_words(sorted({heads_text(*shape_of(curve)) for curve in curves}))
        actual = f"{heads_text(model.heads, model.kv_heads, model.head_dim)} of {model.name}"
        raise ResultError(f"MODEL: expected heads that were measured: {shapes}; found {actual}")
    return of_model


def shape_of(curve: SelectionCurve) -> tuple[int, int, int]:
    return curve.heads, curve.kv_heads, curve.head_dim


def heads_text(heads: int, kv_heads: int, head_dim: int) -> str:
    """Name a head shape: `32/8 heads of 128`."""
    return f"{heads}/{kv_heads} heads of {head_dim}"


def missing(curves: Iterable[SelectionCurve]) -> dict[str, dict[str, str]]:
    """Return a sentence for each phase without a row, and what to type, with its purpose."""
    phases = {curve.phase for curve in curves}
    return {
        f"Not measured: no row here has {PHASES[phase]} with selection.": {
            "measure": f"sparsebench run {suite} --replicates {FEWEST} --out runs/{suite}",
            "ask again": f"sparsebench advise --attention --run runs/{suite}",
        }
        for phase, suite in SUITES.items()
        if phase not in phases
    }


def groups(curves: Sequence[SelectionCurve]) -> list[tuple[tuple[str, ...], list[SelectionCurve]]]:
    """Return the phase, heads, dtype and GPU of each title, in words, with their curves.

    Curves that score no blocks are last.
    """
    every: dict[tuple[str, ...], list[SelectionCurve]] = {}
    for curve in curves:
        what = PHASES[curve.phase]
        what += f" of {amount(curve.sequences, 'sequence')}" * (curve.sequences > 1)
        what = f"causal {what}" if curve.causal and curve.phase == "prompt" else what
        words = capital(what), heads_text(*shape_of(curve)), curve.dtype, curve.gpu
        every.setdefault(words, []).append(curve)
    return [(words, sorted(of, key=lambda c: c.method in PARTS)) for words, of in every.items()]


def name_of(curve: SelectionCurve) -> str:
    """Name the method, and a kernel of others."""
    name = METHODS.get(curve.method, curve.method)
    ours = curve.contender.startswith(("attention_selected", "attention_decode"))
    return name if ours else f"{name} ({curve.contender})"


def block_of(curve: SelectionCurve) -> str:
    """Write the sides of a block; when decoding, the keys of a page."""
    queries, keys = curve.block
    square = curve.phase == "decode" or queries == keys
    return str(keys) if square else f"{queries} × {keys}"


def is_look(points: Sequence[CurvePoint]) -> bool:
    """Return whether one of the points has fewer processes than a verdict."""
    return min(each.processes for each in points) < FEWEST


def kept_of(curve: SelectionCurve) -> str:
    return f"{curve.keys:,} keys" if curve.share is None else percent(curve.share)


def table(title: str, curves: Sequence[SelectionCurve]) -> Table:
    """Return a line for each curve."""
    lines: list[list[Cell]] = []
    for curve in curves:
        point = curve.points[-1]
        gain = f"{_gain(point)} at {point.tokens:,}" + "†" * is_look([point])
        look = "†" * is_look(curve.points)
        style = "bad" if curve.faster_from is None else "good" if curve.surely_from else "unsure"
        place = _length(curve, curve.faster_from) + look, style
        what = [name_of(curve), block_of(curve), kept_of(curve)]
        lines.append([*what, place, _interval(curve), gain])
    columns = [*COLUMNS]
    if all(line[-2] == line[-3][0] for line in lines):
        columns.remove("interval")
        lines = [[*line[:-2], line[-1]] for line in lines]
    return Table(columns=columns, lines=lines, title=title, words=["method"])


def _gain(point: CurvePoint) -> str:
    low, high = (nan if end is None else end for end in (point.low, point.high))
    return between(point.gain, low, high)


def _length(curve: SelectionCurve, tokens: int | None) -> str:
    """Write a length; one at or beyond an end of what was measured has a sign."""
    first, last = curve.points[0].tokens, curve.points[-1].tokens
    if tokens is None:
        return f"> {last:,}"
    return f"≤ {first:,}" if tokens == first else f"{_rounded(tokens):,}"


def _rounded(tokens: int) -> int:
    """Return tokens with three digits: a length between two that were measured."""
    return int(float(f"{tokens:.3g}"))


def _interval(curve: SelectionCurve) -> str:
    ends = [_length(curve, each) for each in (curve.maybe_from, curve.surely_from)]
    return " to ".join(dict.fromkeys(ends))


def finding(curves: Sequence[SelectionCurve]) -> str:
    """Say from which length on each method that scores blocks itself pays off first."""
    earliest: dict[str, SelectionCurve] = {}
    for curve in sorted(curves, key=lambda curve: curve.faster_from or inf):
        if curve.method not in PARTS:
            earliest.setdefault(name_of(curve), curve)
    at_shortest, texts = list[str](), list[str]()
    for name, curve in earliest.items():
        if curve.faster_from == (first := curve.points[0]).tokens:
            how = _selection(curve, [first])
            at_shortest.append(f"with {name} {_gain(first)} at {first.tokens:,} tokens {how}")
        else:
            texts.append(f"with {name}, attention {when(curve)}")
    if at_shortest:
        start = "attention is faster already at the shortest length measured"
        texts.insert(0, f"{start}: {join_words(at_shortest)}")
    text = "; ".join(texts) or "no row scores the blocks in the call"
    return f"{text[0].upper()}{text[1:]}."


def when(curve: SelectionCurve) -> str:
    """Say from which length on a curve is faster. At the shortest length it must not be faster."""
    last, how = curve.points[-1].tokens, _selection(curve, curve.points)
    if curve.faster_from is None:
        return f"is not faster up to {last:,} tokens, the longest length measured {how}"
    return f"is faster from {_rounded(curve.faster_from):,} tokens on [{_interval(curve)}] {how}"


def _selection(curve: SelectionCurve, points: Sequence[CurvePoint]) -> str:
    return f"({kept_of(curve)} kept, blocks of {curve.block[1]}{', a look' * is_look(points)})"


def quality_table(quality: SelectionQuality) -> Table:
    """Return what a model loses by selecting, and how long it takes if that was measured."""
    dense, lines = quality.outcomes[0], list[list[Cell]]()
    passes = (dense.prompts, "prompts"), (dense.steps, "decoding")
    heads = [
        f"{what}, {of}"
        for each, of in passes
        for what in ("loss", "same", *["time"] * bool(each.time_us))
    ]
    for each in quality.outcomes:
        keys = "all" if each.keep is None else f"{each.keep * quality.block:,}"
        cells = [*_passes(each.prompts, dense.prompts), *_passes(each.steps, dense.steps)]
        lines.append([percent(each.share), keys, *cells])
    title = f"{quality.weights}, contexts of {quality.context:,} tokens"
    return Table(columns=["kept", "keys", *heads], lines=lines, title=title)


def _passes(passes: Passes, dense: Passes) -> list[Cell]:
    loss = f"{passes.loss:.3f}"
    if passes is not dense:
        loss = f"{passes.loss - dense.loss:+.3f}"
    cells: list[Cell] = [loss, percent(round(passes.agreement, 3))]
    if dense.time_us:
        ratio = passes.time_us and f"{dense.time_us / passes.time_us:.2f}×"
        cells.append(ratio or ("not measured", "quiet"))
    return cells


def quality_note(quality: SelectionQuality) -> str:
    """Say how a quality was measured."""
    return (
        f"{quality.weights}: the layers without a window select, {quality.selecting} of "
        f"{quality.layers}, in blocks of {quality.block}. Text: {quality.tokens_from}; in "
        f"{quality.dtype} on {quality.device}. Loss: nats per {quality.unit} "
        f"over {quality.prompts:,} {quality.unit}s of the second half of prompts and "
        f"{quality.steps:,} decoded ones; below the first line, its rise. Same: how often the most "
        f"likely next {quality.unit} is that of dense attention."
    )


def terminal(
    curves: Sequence[SelectionCurve], evidence: AttentionEvidence
) -> Iterator[RenderableType]:
    """Yield everything but what is missing, which must not be wrapped."""
    for words, of_group in groups(curves):
        yield from (Text(finding(of_group), "bold"), table(", ".join(words), of_group), Text())
    if curves:
        yield from (Text(" ".join(NOTES), "dim"), Text())
    for quality in evidence.quality:
        yield from (quality_table(quality), Text(quality_note(quality), "dim"), Text())


def markdown(curves: Sequence[SelectionCurve], evidence: AttentionEvidence) -> str:
    """Return everything in Markdown."""
    parts = [
        "\n".join(
            [f"**{escape_markdown(sentence)}**\n", *(f"    {line}" for line in lines.values())]
        )
        for sentence, lines in missing(curves).items()
    ]
    for words, of_group in groups(curves):
        parts += [escape_markdown(finding(of_group)), table(", ".join(words), of_group).markdown()]
    parts += map(escape_markdown, NOTES if curves else [])
    for quality in evidence.quality:
        parts += [quality_table(quality).markdown(), escape_markdown(quality_note(quality))]
    return "\n\n".join(parts) + "\n"

"""What pruning costs and what it gains: a table for the site and for results/published/pruning.

    kind of sparsity   MODEL: magnitude  wanda  spensegpt   ...   SHAPE, m = 16   SHAPE, m = 4096
    2:4                     +4.18        +0.84    +0.43            ≈1.3× [1.2, 1.4]   ...

Losses are the rises of `sparsebench prune` on held-out text, and of training with an L1 term;
speedups are those of gated MLPs on a GPU by the published rows (results/advice.py).
"""

from itertools import product

from sparsebench.reports.advice import style
from sparsebench.reports.tables import Cell, Table
from sparsebench.results.advice import CONTEXT, DEAR, gain_of, mlp_of
from sparsebench.results.layer_estimates import (
    ACTIVATIONS,
    ANYWHERE,
    BLOCKS,
    SIX_EIGHT,
    SMALL_BLOCKS,
    TWO_FOUR,
)
from sparsebench.results.measured_layers import TRAINED, Cost, Evidence
from sparsebench.results.model_shapes import read_shapes
from sparsebench.results.step_model import ACTIVE, StepModel

KINDS = {  # the way of a layer, and its sparsity
    "half of each MLP 2:4": (TWO_FOUR, 0.25),
    "6:8": (SIX_EIGHT, 0.25),
    "2:4": (TWO_FOUR, 0.5),
    "zeros anywhere, 50 %": (ANYWHERE, 0.5),
    "zeros anywhere, 70 %": (ANYWHERE, 0.7),
    "32 × 32 blocks, 50 % zeros": (SMALL_BLOCKS, 0.5),
    "32 × 32 blocks, 80 % zeros": (SMALL_BLOCKS, 0.8),
    "64 × 64 blocks, 50 % zeros": (BLOCKS, 0.5),
    "64 × 64 blocks, 80 % zeros": (BLOCKS, 0.8),
    f"sparse activations, {ACTIVE:g} units": (ACTIVATIONS, 0.0),
}
METHODS = {"magnitude": "magnitude", "wanda": "Wanda", "spensegpt": "SpenseGPT"}
TRAINED_SO = "trained with L1"
TIMED = ("Gemma-3-270m", 4096), ("Llama-3-8B", 16), ("Llama-3-8B", 4096)
NEAR = 0.01  # tolerance of sparsities, which whole blocks round


def costs(evidence: Evidence, gpu: str) -> Table:
    """Return a line for each kind: the rises of the loss, and the gains of MLPs on a GPU."""
    models = dict.fromkeys(each.model for each in evidence.costs)
    methods = [
        (model, method)
        for model, method in product(models, (*METHODS, TRAINED))
        if any((each.model, each.method) == (model, method) for each in evidence.costs)
    ]
    timed = [
        (name, StepModel(read_shapes(name), tokens, CONTEXT), f"× {name}, {tokens:,} tokens")
        for name, tokens in TIMED
    ]
    lines: list[list[Cell]] = []
    for kind, (way, sparsity) in KINDS.items():
        rises = {
            (each.model, each.method): each
            for each in evidence.costs
            if each.way == way and abs(each.sparsity - sparsity) < NEAR
        }
        layers = [mlp_of(step, way, sparsity) for _, step, _ in timed]
        gains = [gain_of(evidence, layer, evidence.layers.gpus[gpu]) for layer in layers]
        cells = [(gain.text, style(gain)) for gain in gains]
        lines.append([kind, *(_rise(rises.get(each)) for each in methods), *cells])
    columns = [f"{model}: {METHODS.get(method, TRAINED_SO)}" for model, method in methods]
    heads = ["kind of sparsity", *columns, *(head for *_, head in timed)]
    return Table(columns=heads, lines=lines, words=["kind of sparsity"])


def notes(evidence: Evidence, gpu: str) -> list[str]:
    """Return what the numbers of the table are."""
    about = {each.model: each for each in evidence.costs if each.method != TRAINED}
    measured = [
        f"{each.model}: nats per {each.unit} over {each.held_out:,} held-out {each.unit}s"
        for each in about.values()
    ]
    return [
        f"A loss is the rise over the dense model: {'; '.join(measured)}. Only MLPs are pruned.",
        "Blocks are chosen by the sum of the squared scores of their elements. SpenseGPT also "
        "updates the weights that stay; – was not measured, or the method does not apply.",
        f"× is the speedup of the gated MLPs of a model over dense cuBLAS on {gpu}, in 16 bits: "
        "measured with its interval, ≈ an estimate from the nearest published rows, or at most "
        "what bytes and FLOPs allow.",
    ]


def markdown(evidence: Evidence, gpu: str) -> str:
    """Return the table and its notes."""
    return "\n\n".join([costs(evidence, gpu).markdown(), *notes(evidence, gpu)])


def _rise(cost: Cost | None) -> Cell:
    if cost is None:
        return "–", "quiet"
    cheap = cost.unit == "token" and cost.rise <= DEAR
    return f"{cost.rise:+.3f}", "good" if cheap else "bad" if cost.rise > 10 * DEAR else "unsure"

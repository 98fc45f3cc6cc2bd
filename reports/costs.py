"""What pruning costs and what it gains: tables for the site and for results/published/pruning.

    MODEL              magnitude   Wanda   SpenseGPT   × own MLPs         × Llama-3-8B, 16 tokens
    2:4                    +4.18   +0.84       +0.43   ≈1.3× [1.1, 1.4]   ...

A loss is the increase of the loss on held-out text that `sparsebench prune` measured, or training
with an L1 term. Speedups are those of gated MLPs on a GPU by published rows
(results/advice/pruning.py).
"""

from sparsebench.reports.advice import loss_style, style
from sparsebench.reports.tables import Cell, Table
from sparsebench.results.advice.layer_estimates import SMALL_BLOCKS
from sparsebench.results.advice.measured_layers import TRAINED, Evidence, Loss
from sparsebench.results.advice.pruning import CONTEXT, KINDS, MOST_LOSS, gain_of
from sparsebench.results.advice.step_model import StepModel
from sparsebench.results.model_shapes import MODELS, read_shapes

COSTS = KINDS | {  # how a layer is sparse, and its sparsity
    "32 × 32 blocks, 50 % zeros": (SMALL_BLOCKS, 0.5),
    "32 × 32 blocks, 80 % zeros": (SMALL_BLOCKS, 0.8),
    "32 × 32 blocks, 90 % zeros": (SMALL_BLOCKS, 0.9),
}
METHODS = {"magnitude": "magnitude", "wanda": "Wanda", "spensegpt": "SpenseGPT"}
TRAINED_SO = "trained with L1"
OF_MODEL = (16, 4096)  # tokens at which the MLPs of REAL are timed
REAL = "Llama-3-8B"
NEAR = 0.01  # tolerance of sparsities, which whole blocks round


def costs(evidence: Evidence, gpu: str) -> list[Table]:
    """Return a table for each pruned model, with the gains of MLPs on a GPU.

    These are the MLPs of REAL, and those of the model itself if its sizes are listed.
    """
    pruned = dict.fromkeys(each.model for each in evidence.losses if each.method != TRAINED)
    return [_of_model(evidence, model, gpu) for model in pruned]


def _of_model(evidence: Evidence, model: str, gpu: str) -> Table:
    rows = [each for each in evidence.losses if each.model == model]
    methods = [name for name in (*METHODS, TRAINED) if any(each.method == name for each in rows)]
    own_models = [each for each in MODELS if model.startswith(each.name.lower())]
    timed = [(each, 4096, f"× own MLPs, {4096:,} tokens") for each in own_models]
    timed += [(read_shapes(REAL), m, f"× {REAL}, {m:,} tokens") for m in OF_MODEL]
    lines: list[list[Cell]] = []
    for kind, (way, sparsity) in COSTS.items():
        alike = [r for r in rows if r.way == way and abs(r.sparsity - sparsity) < NEAR]
        rises = {each.method: each for each in alike}
        gains = [
            gain_of(
                evidence,
                StepModel(shapes, tokens, CONTEXT).mlp(way, sparsity),
                evidence.layers.gpus[gpu],
            )
            for shapes, tokens, _ in timed
        ]
        cells = [(gain.cell, style(gain)) for gain in gains]
        lines.append([kind, *(_rise(rises.get(method)) for method in methods), *cells])
    heads = [METHODS.get(method, TRAINED_SO) for method in methods]
    return Table(
        columns=["kind of sparsity", *heads, *(head for *_, head in timed)],
        lines=lines,
        title=f"{model}: rise of the loss in nats per {rows[0].unit}, and speedups",
        words=["kind of sparsity"],
    )


def notes(evidence: Evidence, gpu: str) -> list[str]:
    """Return notes that explain the numbers of the table."""
    about = {each.model: each for each in evidence.losses if each.method != TRAINED}
    measured = [
        f"{each.model}: nats per {each.unit} over {each.held_out:,} held-out {each.unit}s"
        for each in about.values()
    ]
    return [
        f"A loss is the increase over the dense model. Units: {'; '.join(measured)}. Only MLPs are "
        "pruned.",
        "Blocks are chosen by the sum of the squared scores of their elements. SpenseGPT also "
        "updates the weights that stay. –: not measured, or the method does not apply.",
        f"× is the speedup of the gated MLPs of a model over dense cuBLAS on {gpu}, in 16 bits: "
        "measured with its interval, ≈ an estimate from the nearest published rows, or at most "
        "what bytes and FLOPs allow.",
    ]


def markdown(evidence: Evidence, gpu: str) -> str:
    """Return the tables and their notes."""
    tables = [table.markdown() for table in costs(evidence, gpu)]
    return "\n\n".join([*tables, *notes(evidence, gpu)])


def _rise(loss: Loss | None) -> Cell:
    if loss is None:
        return "–", "quiet"
    per_byte = loss.unit == "byte" and loss.rise <= MOST_LOSS  # a byte is less than a token
    return f"{loss.rise:+.3f}", "unsure" if per_byte else loss_style(loss.rise)

"""What pruning and quantizing cost: tables for the site and for results/published/pruning.

    MODEL              magnitude   Wanda   SpenseGPT   quantized
    2:4                    +4.18   +0.84       +0.43           –

A loss is the increase of the loss on held-out text that `sparsebench prune`,
experiments/quantize_model.py, or training with an L1 term measured.
"""

from sparsebench.reports.advice import QUANTIZED_HOW, loss_style
from sparsebench.reports.tables import Cell, Table
from sparsebench.results.advice.layer_estimates import SMALL_BLOCKS
from sparsebench.results.advice.measured_layers import TRAINED, Evidence, Loss
from sparsebench.results.advice.pruning import KINDS, MOST_LOSS

COSTS = KINDS | {  # how a layer is sparse, and its sparsity
    "32 × 32 blocks, 50 % zeros": (SMALL_BLOCKS, 0.5),
    "32 × 32 blocks, 80 % zeros": (SMALL_BLOCKS, 0.8),
    "32 × 32 blocks, 90 % zeros": (SMALL_BLOCKS, 0.9),
}
METHODS = {"magnitude": "magnitude", "wanda": "Wanda", "spensegpt": "SpenseGPT"}
METHODS |= {"quantized": "quantized"}
TRAINED_SO = "trained with L1"
NEAR = 0.01  # tolerance of sparsities, which whole blocks round


def costs(evidence: Evidence) -> list[Table]:
    """Return a table for each model whose loss was measured."""
    pruned = dict.fromkeys(each.model for each in evidence.losses if each.method != TRAINED)
    return [_of_model(evidence, model) for model in pruned]


def _of_model(evidence: Evidence, model: str) -> Table:
    rows = [each for each in evidence.losses if each.model == model]
    methods = [name for name in (*METHODS, TRAINED) if any(each.method == name for each in rows)]
    lines: list[list[Cell]] = []
    for kind, (way, sparsity) in COSTS.items():
        alike = [r for r in rows if r.way == way and abs(r.sparsity - sparsity) < NEAR]
        rises = {each.method: each for each in alike}
        if rises:
            lines.append([kind, *(_rise(rises.get(method)) for method in methods)])
    return Table(
        columns=["kind", *(METHODS.get(method, TRAINED_SO) for method in methods)],
        lines=lines,
        title=f"{model}: rise of the loss in nats per {rows[0].unit}",
        words=["kind"],
    )


def notes(evidence: Evidence) -> list[str]:
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
        QUANTIZED_HOW,
    ]


def markdown(evidence: Evidence) -> str:
    """Return the tables and their notes."""
    return "\n\n".join([*(table.markdown() for table in costs(evidence)), *notes(evidence)])


def _rise(loss: Loss | None) -> Cell:
    if loss is None:
        return "–", "quiet"
    per_byte = loss.unit == "byte" and loss.rise <= MOST_LOSS  # a byte is less than a token
    return f"{loss.rise:+.3f}", "unsure" if per_byte else loss_style(loss.rise)

"""What pruning and quantizing cost: tables for the site and for results/published/pruning.

    MODEL              magnitude   Wanda   SpenseGPT   quantized
    2:4                    +4.18   +0.84       +0.43           –

    MODEL, trained after pruning
    kind   method      pruned   trained
    2:4    SpenseGPT   +0.57    +0.21 [0.18, 0.24]

A loss is the increase of the loss on held-out text that `sparsebench prune`,
experiments/quantize_model.py, experiments/recover_model.py, or training with an L1 term measured.
"""

from sparsebench.reports.advice import QUANTIZED_HOW, loss_style
from sparsebench.reports.tables import Cell, Table
from sparsebench.results.advice.layer_estimates import SMALL_BLOCKS
from sparsebench.results.advice.measured_layers import TRAINED, Evidence, Recovery
from sparsebench.results.advice.pruning import KINDS, MOST_LOSS

COSTS = KINDS | {  # how a layer is sparse, and its sparsity
    "32 × 32 blocks, 50 % zeros": (SMALL_BLOCKS, 0.5),
    "32 × 32 blocks, 80 % zeros": (SMALL_BLOCKS, 0.8),
    "32 × 32 blocks, 90 % zeros": (SMALL_BLOCKS, 0.9),
}
METHODS = {"magnitude": "magnitude", "wanda": "Wanda", "spensegpt": "SpenseGPT"}
METHODS |= {"quantized": "quantized"}
TRAINED_SO = "trained with L1"
NOT_MEASURED: Cell = ("–", "quiet")
NEAR = 0.01  # tolerance of sparsities, which whole blocks round


def costs(evidence: Evidence) -> list[Table]:
    """Return a table for each model whose loss was measured, and for each that was trained."""
    pruned = dict.fromkeys(each.model for each in evidence.losses if each.method != TRAINED)
    trained = dict.fromkeys(each.pruned.model for each in evidence.recoveries)
    tables = [_of_model(evidence, model) for model in pruned]
    return [*tables, *(_of_recoveries(evidence, model) for model in trained)]


def _of_model(evidence: Evidence, model: str) -> Table:
    rows = [each for each in evidence.losses if each.model == model]
    methods = [name for name in (*METHODS, TRAINED) if any(each.method == name for each in rows)]
    lines: list[list[Cell]] = []
    for kind, (way, sparsity) in COSTS.items():
        alike = [r for r in rows if r.way == way and abs(r.sparsity - sparsity) < NEAR]
        rises = {each.method: _rise(each.rise, each.unit) for each in alike}
        if rises:
            lines.append([kind, *(rises.get(method, NOT_MEASURED) for method in methods)])
    return Table(
        columns=["kind", *(METHODS.get(method, TRAINED_SO) for method in methods)],
        lines=lines,
        title=f"{model}: rise of the loss in nats per {rows[0].unit}",
        words=["kind"],
    )


def _of_recoveries(evidence: Evidence, model: str) -> Table:
    rows = [each for each in evidence.recoveries if each.pruned.model == model]
    kinds = {value: kind for kind, value in COSTS.items()}
    lines: list[list[Cell]] = [
        [
            kinds.get((each.pruned.way, each.pruned.sparsity), each.pruned.way),
            METHODS[each.pruned.method],
            _rise(each.pruned.rise, each.pruned.unit),
            _rise(each.rise, each.pruned.unit, f" [{each.low:.3f}, {each.high:.3f}]"),
            f"{each.minutes:.1f}",
        ]
        for each in rows
    ]
    return Table(
        columns=["kind", "method", "pruned", "trained", "minutes"],
        lines=lines,
        title=f"{model}, trained after pruning: rise of the loss in nats per {rows[0].pruned.unit}",
        words=["kind", "method"],
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
        *dict.fromkeys(map(_of_training, evidence.recoveries)),
    ]


def markdown(evidence: Evidence) -> str:
    """Return the tables and their notes."""
    return "\n\n".join([*(table.markdown() for table in costs(evidence)), *notes(evidence)])


def _of_training(recovery: Recovery) -> str:
    pruned = recovery.pruned
    return (
        f"{pruned.model} was pruned again, and trained on an {recovery.device} to predict what the "
        f"dense model does on {recovery.text}, which has none of the {pruned.held_out:,} held-out "
        f"{pruned.unit}s. Zeros stayed zeros. Brackets: 95 % intervals over the contexts."
    )


def _rise(rise: float, unit: str, interval: str = "") -> Cell:
    per_byte = unit == "byte" and rise <= MOST_LOSS  # a byte is less than a token
    return f"{rise:+.3f}{interval}", "unsure" if per_byte else loss_style(rise)

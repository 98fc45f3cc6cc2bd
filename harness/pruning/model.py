"""Every MLP of a model, pruned one after the other: each from what the pruned ones before give it.

    calibration ── attend ──┬── prune the MLP from its inputs ── feed forward, pruned ──> next layer
    held out    ── attend ──┴── errors of the pruned MLP ─────── feed forward, pruned ──> ... loss

Both streams pass through the model once. The text is cut into contexts of CONTEXT tokens, of which
the first is the one that begins every text; those held out are further on in it.
"""

import pydoc_data.topics
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.pruning.gemma import Gemma
from sparsebench.harness.pruning.layer import Recipe, mlp_errors, prune_mlp
from sparsebench.harness.pruning.mlp import PrunedMLP

CONTEXT = 1024


@dataclass(frozen=True)
class PrunedModel:
    """The pruned MLPs and their errors on held-out tokens, by layer; and the loss on these."""

    layers: Sequence[PrunedMLP]
    errors: Sequence[dict[str, float]]
    loss: float


@torch.no_grad()
def prune_model(model: Gemma, recipe: Recipe, calibration: Tensor, held_out: Tensor) -> PrunedModel:
    """Prune from token numbers [contexts, tokens], and look at others, [contexts, tokens].

    A layer's errors are those on the inputs that it has in the pruned model.
    """
    seen, unseen = model.embed(calibration), model.embed(held_out)
    layers, errors = [], []
    for layer in model.layers:
        seen, unseen = layer.attend(seen), layer.attend(unseen)
        layers.append(prune_mlp(layer.mlp, layer.mlp_input(seen), recipe))
        errors.append(mlp_errors(layer.mlp, layers[-1], layer.mlp_input(unseen)))
        pruned = replace(layer, mlp=layers[-1].mlp)
        seen, unseen = pruned.feed_forward(seen), pruned.feed_forward(unseen)
    return PrunedModel(layers, errors, model.loss(unseen, held_out))


@torch.no_grad()
def dense_loss(model: Gemma, tokens: Tensor) -> float:
    """Return the loss of the model as it is on token numbers [contexts, tokens], in nats."""
    x = model.embed(tokens)
    for layer in model.layers:
        x = layer.feed_forward(layer.attend(x))
    return model.loss(x, tokens)


def contexts(numbers: Sequence[int], begin: int, calibration: int) -> tuple[Tensor, Tensor]:
    """Cut a text into contexts: `calibration` of them, and half as many, held out, after them."""
    body = CONTEXT - 1
    held_out = max(calibration // 2, 1)
    needed = (calibration + held_out) * body
    if calibration < 1 or len(numbers) < needed:
        expected = f"{needed} tokens for {calibration} and {held_out} contexts of {CONTEXT}"
        raise SuiteError(f"text: expected at least {expected}; found {len(numbers)}")
    rows = torch.tensor(numbers[:needed]).view(-1, body)
    tokens = torch.nn.functional.pad(rows, (1, 0), value=begin)
    return tokens[:calibration], tokens[calibration:]


def python_reference() -> str:
    """Return the text of Python's language reference, as each Python carries it: 0.4 MB of English.

    Topics quote one another; a paragraph is taken once, so that none held out was seen before.
    """
    topics = pydoc_data.topics.topics
    parts = (part for name in sorted(topics) for part in re.split("\n{2,}", topics[name].strip()))
    return "\n\n".join(dict.fromkeys(parts))

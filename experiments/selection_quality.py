"""Measure what a model loses, and gains, if its queries attend to selected blocks of keys.

    selection_quality.py gemma-3-270m-q4_k_m.gguf --context 4096 --out selection.json

    prompts   a context in one pass, into a static cache: each block of queries selects blocks of
              keys. Loss and agreement are those of its second half
    steps     the last --steps tokens, one by one: each selects as many keys of the cache, in pages

The tokens are those of the text, not of the model, so errors of one token do not reach the next
ones. The first and the last block are always kept. Layers with a window keep it. With --compiled, a
step is one CUDA graph. Times are those of a GPU; a CPU computes a reference, so it has none.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy

import sparsebench.nn  # noqa: F401
from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.harness.machine.device import pick
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.reporting import numbers, require_writable
from sparsebench.results.run.store import write_json
from sparsebench.results.selection_files import (
    SELECTION_SCHEMA,
    Passes,
    SelectionOutcome,
    SelectionQuality,
)

ROWS = 256  # tokens whose logits are in memory at once
WARM_UP = 2  # steps of a context that are not timed

Call = Callable[..., Any]


def visible_share(keep: int, blocks: int) -> float:
    """Return the share of the blocks that causal rows of blocks keep, `keep` of each at most."""
    return sum(min(keep, row + 1) for row in range(blocks)) / (blocks * (blocks + 1) / 2)


def keep_of(share: float, blocks: int) -> int:
    """Return the number of blocks whose share is nearest, at least the first and the last."""
    return min(range(2, blocks + 1), key=lambda keep: abs(visible_share(keep, blocks) - share))


class Predictions:
    """Losses, and the most likely tokens, of tokens in the order in which they are added."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.likeliest: list[Tensor] = []
        self.times_us: list[float] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        self.losses.append(cross_entropy(logits.float(), targets, reduction="none").cpu())
        self.likeliest.append(logits.argmax(-1).cpu())

    def passes(self, dense: "Predictions") -> Passes:
        same = torch.cat(self.likeliest) == torch.cat(dense.likeliest)
        time_us = median(self.times_us) if self.times_us else None
        return Passes(float(torch.cat(self.losses).mean()), float(same.float().mean()), time_us)


def time_call(predictions: Predictions, on_gpu: bool, call: Call) -> Any:
    """Call, and add the time on a GPU."""
    if not on_gpu:
        return call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    predictions.times_us.append(1e6 * (time.perf_counter() - began))
    return result


@torch.no_grad()
def measure(
    model: Any, step: Call, rows: Tensor, steps: int, select: dict[str, int] | None
) -> tuple[Predictions, Predictions]:
    """Return the predictions in prompts and in steps over contexts [contexts, tokens]."""
    model.set_attn_implementation("sparsebench" if select else "sdpa")
    model.config.get_text_config().sparse_select = select
    prompts, decoded, head = Predictions(), Predictions(), model.get_output_embeddings()
    on_gpu, half, prompt = rows.device.type == "cuda", rows.shape[1] // 2, rows.shape[1] - steps
    cache = transformers.StaticCache(model.config, max_cache_len=rows.shape[1])
    for row in rows:
        first = row[None, :prompt]
        if on_gpu:
            model.base_model(first, past_key_values=cache)  # compiles, and plans
            cache.reset()
        pass_ = time_call(prompts, on_gpu, partial(model.base_model, first, past_key_values=cache))
        hidden, targets = pass_.last_hidden_state[0, half:], row[half + 1 : prompt + 1]
        for part, of_part in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
            prompts.add(head(part), of_part)
        for token, target in zip(row[prompt:-1].split(1), row[prompt + 1 :].split(1), strict=True):
            call = partial(step, token[None].clone(), past_key_values=cache)
            decoded.add(time_call(decoded, on_gpu, call).logits[0], target)
        del decoded.times_us[1 - steps : WARM_UP + 1 - steps]
        cache.reset()
    return prompts, decoded


def main(
    weights: Annotated[Path, typer.Argument(help="A Hugging Face folder, or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="The JSON file.")],
    keep: Annotated[str, typer.Option(help="Shares of the blocks to keep.")] = "0.5,0.25,0.1",
    context: Annotated[int, typer.Option(help="Tokens of a context.", min=64)] = 4096,
    contexts: Annotated[int, typer.Option(min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Tokens to decode of each context.", min=8)] = 128,
    block: Annotated[int, typer.Option(help="Keys of a block and a page.", min=16)] = 64,
    text: Annotated[Path | None, typer.Option(help="A text file.")] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compile steps.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Measure the loss and the time of a model with attention to selected blocks of keys."""
    require_writable(out)
    expected = "fractions above 0, below 1, such as 0.5,0.25"
    shares = numbers("--keep", keep, expected, lambda share: 0 < share < 1)
    if context % block or context <= max(block, 2 * steps):
        expected = f"more than one --block of {block}, whole, and more than twice {steps} steps"
        raise SuiteError(f"--context: expected {expected}; found {context}")
    place = pick(device)
    loaded = models.load(weights, place)
    model = loaded.model.to(torch.bfloat16 if place.type == "cuda" else torch.float32)
    origin = text.name if text else "Python's language reference"
    words = text.read_text("utf-8") if text else models.python_reference()
    rows = models.cut(loaded, [words], context, contexts, origin)
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead") if compiled else model
    blocks, outcomes = context // block, []
    dense = measure(model, step, rows, steps, None)
    for most in (None, *(keep_of(share, blocks) for share in shares)):
        select = None if most is None else {"keep": most, "block": block}
        pair = dense if select is None else measure(model, step, rows, steps, select)
        passes = [one.passes(first) for one, first in zip(pair, dense, strict=True)]
        share = visible_share(most or blocks, blocks)
        outcomes.append(SelectionOutcome(round(share, 4), most, *passes))
        about = "; ".join(f"loss {p.loss:.4f}, agreement {p.agreement:.1%}" for p in passes)
        print(f"{share:.0%} of the blocks: {about}", flush=True)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * loaded.layers
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    facts = weights.name, models.digest(weights), origin, name, str(model.dtype)[6:]
    passes = context - context // 2 - steps, steps - 1
    counts = context, *(contexts * count for count in passes), block, loaded.layers
    report = SelectionQuality(
        *(SELECTION_SCHEMA, *facts, *counts, kinds.count("full_attention"), loaded.unit, outcomes)
    )
    write_json(out, asdict(report))


if __name__ == "__main__":
    try:
        typer.run(main)
    except SparsebenchError as error:
        sys.exit(f"error: {error}")

"""Prune a model, train the weights that stay, and measure what of the loss comes back.

    recover_model.py gemma-3-270m-q4_k_m.gguf --minutes 10 --out recovered.json

    tokens ──┬─> dense model ───> softmax ──> p
             └─> pruned model ──> softmax ──> q      loss = mean over tokens of -sum p ln q

The pruned model learns to predict as the dense one does (Hinton et al., arXiv 1503.02531), so the
text teaches it nothing that the dense model does not know. Zeros stay zeros: their gradients are
set to zero, and AdamW then leaves them. All other weights of the layers train; the embedding and
the head do not. The rate follows the clock: a warm-up, then half a cosine until the minutes are
over. So the number of steps depends on the machine, and the file has it.

The text is the source of Python's standard library: the files that train_lm.py trains on. It leaves
out the language reference, on which `sparsebench prune` measures by default. The file is that of
`sparsebench prune --json`; it is written anew after each recipe.
"""

import math
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from byte_decoder import BETAS, CLIP, HELD_OUT_EVERY, WARMUP, library_files
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.harness.machine.device import pick
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.files import parse_pruners
from sparsebench.harness.models.reporting import require_writable
from sparsebench.results.model_files import (
    PRUNING_SCHEMA,
    Pruning,
    PruningOutcome,
    RecoveryTraining,
)
from sparsebench.results.run.store import write_json
from sparsebench.results.statistics.ratio import student

REFERENCE = "pydoc_data"  # the folder of the language reference
STEP, PART = 16384, 4096  # tokens of a step, and of a forward pass
FEWEST = 12 * models.CONTEXT  # half as many are held out; an interval needs 6 contexts


def training_text() -> list[str]:
    """Return the files of the standard library that are not held out, without the reference."""
    files = [file for i, file in enumerate(library_files(), 1) if i % HELD_OUT_EVERY]
    return [file.read_text("utf-8", "replace") for file in files if file.parent.name != REFERENCE]


def distance(pruned: nn.Module, dense: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of the predictions for tokens [contexts, tokens] with the dense."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        with torch.no_grad():
            expected = dense(tokens, use_cache=False).logits
        logits = pruned(tokens, use_cache=False).logits
    probabilities = expected.float().softmax(-1).flatten(0, 1)
    return cross_entropy(logits.float().flatten(0, 1), probabilities)


def trained_weights(model: Any) -> Iterator[nn.Parameter]:
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = {weight for end in ends for weight in end.parameters()}
    return (weight for weight in model.parameters() if weight not in embeddings)


def train(
    loaded: models.LoadedModel,
    dense: nn.Module,
    rows: Tensor,
    minutes: float,
    rate: float,
    seed: int = 0,
) -> int:
    """Train a pruned model in place on rows [contexts, tokens]; return the number of tokens."""
    weights, draw = [*trained_weights(loaded.model)], torch.Generator().manual_seed(seed)
    count, size = STEP // rows.shape[1], max(PART // rows.shape[1], 1)
    optimizer = torch.optim.AdamW(weights, betas=BETAS, weight_decay=0.0, fused=rows.is_cuda)
    began, steps = time.perf_counter(), 0
    with ExitStack() as hooks:
        for weight in weights:
            hooks.callback(weight.requires_grad_(True).requires_grad_, False)
        for weight in (weight for mlp in loaded.mlps.values() for weight in mlp.parameters()):
            stays = weight != 0
            hooks.callback(weight.register_hook(stays.__mul__).remove)
        while (share := (time.perf_counter() - began) / (60 * minutes)) < 1 or not steps:
            optimizer.param_groups[0]["lr"] = rate * min(
                share / WARMUP, (1 + math.cos(math.pi * min(share, 1))) / 2
            )
            batch = rows[torch.randint(len(rows), (count,), generator=draw)]
            total = 0.0
            for part in batch.split(size):
                loss = distance(loaded.model, dense, part) * (len(part) / count)
                loss.backward()
                total += float(loss.detach())
            clip_grad_norm_(weights, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if steps % 100 == 0:
                print(f"  step {steps}: {total:.4f}", flush=True)
            steps += 1
    return steps * count * rows.shape[1]


def main(
    weights: Annotated[Path, typer.Argument(help="A Hugging Face folder, or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="The JSON file.")],
    minutes: Annotated[
        float, typer.Option(help="Minutes of training for each recipe.", min=0)
    ] = 10,
    method: str = "wanda,spensegpt",
    dense: Annotated[str, typer.Option(help="Fractions of the features left dense.")] = "0,0.5",
    rate: Annotated[float, typer.Option(help="The largest learning rate.")] = 1e-4,
    calibration: Annotated[Path | None, typer.Option(help="A text file.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.", min=FEWEST)] = 16384,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Prune a model to 2:4 and train it, for each method and fraction that stays dense."""
    require_writable(out)
    for option, number in (("--minutes", minutes), ("--rate", rate)):
        if not 0 < number < math.inf:
            raise SuiteError(f"{option}: expected a number above 0; found {number:g}")
    place, pruners = pick(device), parse_pruners(method, dense, "scored")
    loaded = models.load(weights, place)
    loaded.model.float()
    name = f"Python {platform.python_version()}'s language reference"
    name = calibration.name if calibration else name
    words = calibration.read_text("utf-8") if calibration else models.python_reference()
    seen, unseen = models.contexts(loaded, words, tokens, name)
    texts = training_text()
    rows = models.cut(loaded, texts, seen.shape[1])
    about = {
        "text": f"Python {platform.python_version()}'s standard library",
        "bytes": sum(len(text.encode()) for text in texts),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
    }
    original, before = deepcopy(loaded.model), models.losses_of(loaded.model, unseen)
    facts = weights.name, models.digest(weights), name, seen.numel(), unseen.numel()
    report = Pruning(PRUNING_SCHEMA, *facts, float(before.mean()), [], unit=loaded.unit)
    print(f"{rows.numel()} tokens in {about['bytes']} bytes; loss {report.loss:.4f}", flush=True)
    for pruner in pruners:
        loaded.model.load_state_dict(original.state_dict())
        pruned, began = models.prune_model(loaded, pruner, seen, unseen), time.perf_counter()
        count = train(loaded, original, rows, minutes, rate)
        seconds = time.perf_counter() - began
        after = models.losses_of(loaded.model, unseen)
        rise = student((after - before).tolist())
        ends = float(rise.low), float(rise.high)
        recovery = RecoveryTraining(
            float(after.mean()), *ends, tokens=count, seconds=seconds, **about
        )
        errors = {part: fmean(each[part] for each in pruned.errors) for part in pruned.errors[0]}
        share = pruned.dense / pruned.features
        outcome = PruningOutcome(
            *(pruner.method, pruner.region, share, (1 - share) / 2, errors, pruned.loss),
            recovery=recovery,
        )
        report = replace(report, outcomes=[*report.outcomes, outcome])
        write_json(out, asdict(report))
        print(
            f"{pruner.method}, {share:g} dense: {pruned.loss - report.loss:+.4f} pruned, "
            f"{rise.estimate:+.4f} [{ends[0]:.4f}, {ends[1]:.4f}] after {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    try:
        typer.run(main)
    except SparsebenchError as error:
        sys.exit(f"error: {error}")

"""Train small decoders of bytes: with few active hidden units, or with block-sparse weights.

    train_lm.py --l1 0,1e-3 --out layers.safetensors   the middle MLP of one model a coefficient,
                                                       and its inputs: for the suite `trained`
    train_lm.py --l1 0 --out folder                    a Hugging Face model, for `prune`
    train_lm.py --pattern small_world --out file.json  sparse models beside dense ones

A pattern replaces every weight of the layers, in squares of its shorter side, by a ring with moved
links (small_world) or by equally many blocks in each row (uniform). Each sparse model has two dense
ones: of equal width, and the narrowest with at least as many parameters. --dense adds widths, one
of which may take as long for a step.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from byte_decoder import (
    BETAS,
    CLIP,
    DECAY,
    HELD_OUT,
    PATTERNS,
    RATE,
    WARMUP,
    Blocks,
    Sizes,
    Text,
    byte_tokenizer,
    decoder,
    elements_of,
    parameters,
    samples,
    standard_library,
    train,
    weights_of,
)
from safetensors.torch import save_file
from torch import Tensor

from sparsebench._writing import write_file
from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.harness.machine.device import pick
from sparsebench.harness.models.reporting import numbers, require_writable
from sparsebench.results.model_files import (
    DENSE,
    SPARSITY_SCHEMA,
    WIDTHS_SCHEMA,
    L1Training,
    L1Trainings,
    PatternTraining,
    PatternTrainings,
)
from sparsebench.results.run.store import write_json

SAMPLE = 4096  # inputs of the middle MLP in a file, at most


def plan_of(
    sizes: Sizes, sparse: Sequence[Blocks], widths: Sequence[int]
) -> list[tuple[Sizes, Blocks | None]]:
    """Return the models to train: dense ones, then each sparse one and its dense match."""
    head = sizes.width // sizes.heads
    narrower = [sizes.of_width(width) for width in range(head, sizes.width + 1, head)]
    counts = [(parameters(decoder(each, None, 0)), each) for each in narrower]
    plan: list[tuple[Sizes, Blocks | None]] = [(sizes.of_width(width), None) for width in widths]
    for blocks in sparse:
        stored = parameters(decoder(sizes, blocks, 0))
        match = next(each for count, each in counts if count >= stored)
        plan += [(sizes, blocks), (match, None)]
    return list(dict.fromkeys([(sizes, None), *plan]))


def train_widths(
    plan: Sequence[tuple[Sizes, Blocks | None]],
    text: Text,
    facts: dict[str, Any],
    device: torch.device,
    to: Path | None,
) -> None:
    """Train every model with every seed, and write the file after each. Raises SuiteError."""
    settings, trained = facts["settings"], list[PatternTraining]()
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    for seed, (sizes, blocks) in product(seeds, plan):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        model = decoder(sizes, blocks, seed, device)
        outcome, _ = train(model, text, settings, seed)
        linear = [layer for _, _, layer in weights_of(model)]
        full = sum(layer.out_features * layer.in_features for layer in linear)
        training = PatternTraining(
            pattern=blocks.pattern if blocks else DENSE,
            block=blocks.block if blocks else 1,
            sparsity=round(1 - sum(elements_of(layer).numel() for layer in linear) / full, 6),
            width=sizes.width,
            parameters=parameters(model),
            seed=seed,
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            **outcome,
        )
        trained.append(training)
        print(training, flush=True)
        if to:
            report = PatternTrainings(schema=WIDTHS_SCHEMA, **facts, trained=trained)
            write_json(to, asdict(report))


def train_l1(
    coefficients: Sequence[float],
    sizes: Sizes,
    text: Text,
    facts: dict[str, Any],
    device: torch.device,
    to: Path | None,
) -> None:
    """Train a model for each coefficient; write the middle MLPs, or a folder with the one model."""
    seed, trained, tensors = facts["settings"]["seed"], list[L1Training](), dict[str, Tensor]()
    folder = to if to and to.suffix != ".safetensors" else None
    if folder and len(coefficients) != 1:
        raise SuiteError(f"{to}: expected one coefficient for a folder; found {len(coefficients)}")
    for l1 in coefficients:
        model, inputs = decoder(sizes, None, seed, device), list[Tensor]()
        outcome, layers = train(model, text, facts["settings"], seed, l1)
        trained.append(L1Training(l1, outcome["loss"], layers, outcome["seconds"]))
        print(f"l1 {l1:g}: loss {outcome['loss']:.4f}", file=sys.stderr, flush=True)
        mlp = model.model.layers[sizes.layers // 2].mlp
        mlp.gate_proj.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.append(x[0]))
        rows = text.held_out(sizes.context)[: SAMPLE // sizes.context, :-1]
        with torch.no_grad():
            model(input_ids=rows.to(device))
        parts = {"wg": mlp.gate_proj.weight, "wu": mlp.up_proj.weight, "wd": mlp.down_proj.weight}
        parts["x"] = inputs[0].flatten(0, 1)
        tensors |= {f"l1_{l1:g}.{n}": t.detach().bfloat16().contiguous() for n, t in parts.items()}
    if folder:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        words = text.unseen.numpy().tobytes().decode(errors="replace")
        write_file(folder / "held_out.txt", words)
    elif to:
        save_file(tensors, to)
    report = L1Trainings(schema=SPARSITY_SCHEMA, **facts, trained=trained)
    print(json.dumps(asdict(report), indent=1))


def main(
    l1: Annotated[str, typer.Option(help="Coefficients of the L1 term.")] = "0,1e-4,1e-3,1e-2,3e-2",
    steps: int = 3000,
    seed: int = 0,
    layers: int = 6,
    width: int = 512,
    hidden: int = 2048,
    heads: int = 8,
    context: Annotated[int, typer.Option(help="Bytes per context.", min=16)] = 256,
    batch: Annotated[int, typer.Option(help="Contexts per step.")] = 64,
    pattern: Annotated[str, typer.Option(help="small_world,uniform: block-sparse models.")] = "",
    block: str = "32,64",
    sparsity: str = "0.8,0.9",
    seeds: Annotated[int, typer.Option(help="Trainings of each model of --pattern.")] = 3,
    dense: Annotated[str, typer.Option(help="Further widths of dense models.")] = "",
    data: Annotated[Path | None, typer.Option(help="A .npy file, uint8 [samples, bytes].")] = None,
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Train small decoders of bytes with an L1 term or, with --pattern, block-sparse weights."""
    require_writable(out)
    if not pattern and (data or dense):
        raise SuiteError(f"--{'data' if data else 'dense'}: expected --pattern beside it")
    if width % (2 * heads):
        raise SuiteError(f"--width: expected a multiple of {2 * heads}, twice the heads")
    place, text = pick(device), samples(data) if data else standard_library()
    sizes = Sizes(layers, width, hidden, heads, text.row - 1 if data else context)
    settings = {"sizes": asdict(sizes), "steps": steps, "batch": batch, "seed": seed}
    settings |= {"learning_rate": RATE, "betas": BETAS, "decay": DECAY, "clip": CLIP}
    settings |= {"warmup": WARMUP, "held_out": HELD_OUT}
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    facts = {"text": text.name, "sha256": text.sha256, "bytes": len(text.seen), "device": name}
    facts |= {"held_out": text.held_out(sizes.context)[:, 1:].numel(), "settings": settings}
    if not pattern:
        expected = "numbers of at least 0, such as 0,1e-4"
        coefficients = numbers("--l1", l1, expected, lambda n: 0 <= n < math.inf)
        train_l1(coefficients, sizes, text, facts, place, out)
        return
    names = pattern.split(",")
    if unknown := sorted({*names} - {*PATTERNS}):
        raise SuiteError(f"--pattern: expected {' or '.join(PATTERNS)}; found {unknown[0]}")
    sides, widths = (
        [
            int(n)
            for n in numbers(option, text, "positive integers", lambda n: n >= 1 and n % 1 == 0)
        ]
        for option, text in (("--block", block), ("--dense", dense or str(width)))
    )
    levels = numbers("--sparsity", sparsity, "fractions between 0 and 1", lambda n: 0 < n < 1)
    plan = plan_of(sizes, [Blocks(*each) for each in product(names, sides, levels)], widths)
    settings |= {"models": len(plan), "seeds": seeds}
    train_widths(plan, text, facts, place, out)


if __name__ == "__main__":
    try:
        typer.run(main)
    except SparsebenchError as error:
        sys.exit(f"error: {error}")

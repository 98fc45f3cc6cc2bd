"""A small Llama whose tokens are bytes, its text, and its training by transformers' Trainer.

    loss = mean over bytes of -ln p(byte)  +  l1 * mean over layers and tokens of sum |h|

The MLPs are gated by ReLU, h = relu(gate) * up. The L1 term follows the code of Cetin et al., arXiv
2603.23198, which does not divide by the number of units. AdamW; a warm-up, then half a cosine; bf16
on a GPU.

The initial deviation is proportional to 1 / sqrt(fan-in) and the learning rate to 1 / fan-in, where
fan-in counts the stored elements of a row: one rate then suits all widths and sparsities (Dey et
al., arXiv 2405.15743). With equal seeds, all models see the same bytes in the same order.
"""

import hashlib
import math
import os
import platform
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sparsebench.errors import SuiteError
from sparsebench.harness.patterns.small_world import ring, ring_cells
from sparsebench.nn import BlockSparseLinear
from sparsebench.results.model_files import LayerCount

DEVIATION, BASE_WIDTH = 0.02, 512  # at this fan-in the deviation and the rate are not scaled
RESIDUAL = "o_proj", "down_proj"  # these add to the residual stream and start smaller
RATE, BETAS, DECAY, CLIP, WARMUP = 1e-3, (0.9, 0.95), 0.1, 1.0, 0.05
HELD_OUT, HELD_OUT_EVERY = 1024, 16  # contexts at most; files or samples
LEFT_OUT = {"test", "tests", "encodings", "site-packages", "dist-packages"}
WINDOW = 25  # steps per timing
FIRST = 8  # positions of a context whose active units are counted separately
SAMPLE = 4096  # inputs of the middle MLP in a file, at most
PATTERNS = "small_world", "uniform"
TOLERANCE = 0.2  # relative, of the density of a ring
META = torch.device("meta")


@dataclass(frozen=True)
class Sizes:
    """Layers, width, hidden units per MLP, attention heads, and bytes per context."""

    layers: int
    width: int
    hidden: int
    heads: int
    context: int

    def of_width(self, width: int) -> "Sizes":
        """Return sizes of another width, with MLPs and heads in proportion. Raises SuiteError."""
        head = self.width // self.heads
        if width % head:
            raise SuiteError(f"--dense: expected multiples of {head}; found {width}")
        hidden = round(self.hidden / self.width * width)
        return replace(self, width=width, hidden=hidden, heads=width // head)


@dataclass(frozen=True)
class Blocks:
    """The pattern, size and sparsity of the blocks of a weight."""

    pattern: str
    block: int
    sparsity: float


class Text:
    """Training and held-out bytes, uint8. Every 16th of the pieces, files or samples, is held out.

    row  bytes of a sample; contexts begin at multiples of it
    """

    def __init__(self, name: str, pieces: Sequence[bytes], row: int = 1) -> None:
        held_out = b"".join(pieces[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        rest = b"".join(piece for i, piece in enumerate(pieces, 1) if i % HELD_OUT_EVERY)
        self.name, self.row, self.sha256 = name, row, hashlib.sha256(rest + held_out).hexdigest()
        self.seen = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        self.unseen = torch.frombuffer(bytearray(held_out), dtype=torch.uint8)

    def held_out(self, context: int) -> Tensor:
        """Return int64 [contexts, context + 1]: evenly spread contexts without overlap."""
        rows = self.unseen.unfold(0, context + 1, context + 1)
        count = min(HELD_OUT, len(rows))
        return rows[torch.arange(count) * (len(rows) // count)].long()


def library_files() -> list[Path]:
    """Return the source files of Python's standard library, sorted by path."""
    files: list[Path] = []
    for parent, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - LEFT_OUT
        sources = (n for n in names if n.endswith(".py") and not n.startswith("_sysconfig"))
        files += (Path(parent, name) for name in sources)
    return [path for path in sorted(files, key=lambda path: path.parts) if path.is_file()]


def standard_library() -> Text:
    """Return the source of Python's standard library."""
    pieces = [path.read_bytes() for path in library_files()]
    return Text(f"Python {platform.python_version()}'s standard library", pieces)


def samples(path: Path) -> Text:
    """Return the rows of a .npy file, each one context. Raises SuiteError."""
    expected = f"{path}: expected uint8 [samples, bytes] with at least {HELD_OUT_EVERY} samples"
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SuiteError(f"{expected}; found {error}") from error
    if rows.dtype != np.uint8 or rows.ndim != 2 or len(rows) < HELD_OUT_EVERY:
        raise SuiteError(f"{expected}; found {rows.dtype} {list(rows.shape)}")
    return Text(path.stem, [row.tobytes() for row in rows], rows.shape[1])


# ---- the model ----


def weights_of(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the weights of a model's layers: each with its owner, and its name there."""
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            yield from ((owner, n, m) for n, m in owner.named_children() if n.endswith("_proj"))


def elements_of(layer: nn.Linear) -> nn.Parameter:
    return layer.values if isinstance(layer, BlockSparseLinear) else layer.weight


def fan_in(layer: nn.Linear) -> float:
    """Return the mean number of stored elements per row."""
    return elements_of(layer).numel() / layer.out_features


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def decoder(sizes: Sizes, blocks: Blocks | None, seed: int, device: torch.device = META) -> Any:
    """Return a model: dense if `blocks` is None, without values on "meta". Raises SuiteError."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.context,
        hidden_act="relu",
        bos_token_id=None,
        eos_token_id=None,
    )
    with device:
        model = transformers.LlamaForCausalLM(config)
    draw = torch.Generator().manual_seed(seed)
    for owner, name, dense in [*weights_of(model)] if blocks else ():
        n, k = dense.weight.shape
        options = {"block": blocks.block, "pattern": pattern(n, k, blocks, draw)}
        setattr(owner, name, BlockSparseLinear(k, n, bias=False, device=device, **options))
    if device == META:
        return model
    draw = torch.Generator(device).manual_seed(seed)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight.normal_(0, DEVIATION, generator=draw)
    for _, name, layer in weights_of(model):
        deviation = DEVIATION * math.sqrt(BASE_WIDTH / fan_in(layer))
        deviation /= math.sqrt(2 * sizes.layers) if name in RESIDUAL else 1
        elements_of(layer).normal_(0, deviation, generator=draw)
    return model


def pattern(n: int, k: int, blocks: Blocks, draw: torch.Generator) -> Tensor:
    """Return the stored blocks of a weight [n, k], as bool. Raises SuiteError."""
    short, long = sorted((n // blocks.block, k // blocks.block))
    if n % blocks.block or k % blocks.block or long % short:
        expected = f"multiples of the block, {blocks.block}, and of each other"
        raise SuiteError(f"--width, --hidden: expected {expected}; found {n}x{k}")
    cells, needed = ring_cells(short), (1 - blocks.sparsity) * short**2
    nearest = min(cells, key=lambda count: abs(count - needed), default=0)
    if abs(nearest - needed) > TOLERANCE * needed:
        expected = f"{1 - nearest / short**2:.3g}, the nearest of {short} blocks in a row"
        raise SuiteError(f"--sparsity: expected {expected}; found {blocks.sparsity:g}")
    links, squares = cells.index(nearest) + 1, []
    for _ in range(long // short):
        dice = torch.randint(2**31 - 1, (short, short), generator=draw)
        if blocks.pattern == "small_world":
            squares.append(torch.from_numpy(ring(dice.numpy(), links)))
        else:
            squares.append(dice.argsort(1).argsort(1) < 2 * links + 1)
    return torch.cat(squares, 0 if n > k else 1)


# ---- the training ----


class ByteTrainer(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose loss has the L1 term of h [contexts, tokens, hidden] of each MLP."""

    def __init__(self, model: Any, *arguments: Any, l1: float, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self.l1, self.hidden = l1, list[Tensor]()
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(lambda _, x: self.hidden.append(x[0]))

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], **_: Any) -> Tensor:
        loss, hidden = self.loss_of(model, inputs["tokens"].long())
        if self.l1:
            norms = [h.abs().sum(-1, dtype=torch.float32).mean() for h in hidden]
            loss = loss + self.l1 * torch.stack(norms).mean()
        return loss

    def loss_of(self, model: Any, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of tokens [contexts, context + 1], and h of each layer."""
        self.hidden.clear()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), [*self.hidden]


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """The seconds per step of windows, with a synchronization after each."""

    def __init__(self) -> None:
        self.windows, self.began = list[float](), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = (state.global_step - 1) % WINDOW + 1
        if steps == WINDOW or state.global_step == args.max_steps:
            if args.device.type == "cuda":
                torch.cuda.synchronize(args.device)
            now = time.perf_counter()
            self.windows.append((now - self.began) / steps)
            self.began = now


def train(
    model: Any, text: Text, settings: dict[str, Any], seed: int, l1: float = 0.0
) -> tuple[dict[str, float], list[LayerCount]]:
    """Train a model on its device; return the loss, step_us and seconds, and the active units.

    Raises SuiteError if the training diverged.
    """
    on_gpu, clock, began = model.device.type == "cuda", Clock(), time.perf_counter()
    rates = {elements_of(m): RATE * BASE_WIDTH / fan_in(m) for _, _, m in weights_of(model)}
    groups = [
        {
            "params": [parameter],
            "lr": rates.get(parameter, RATE),
            "weight_decay": DECAY if parameter.dim() > 1 else 0.0,
        }
        for parameter in model.parameters()
    ]
    length = settings["sizes"]["context"] + 1
    places = (len(text.seen) - length) // text.row + 1
    draw = torch.Generator().manual_seed(seed)
    count = settings["steps"] * settings["batch"]
    starts = (torch.randint(places, (count,), generator=draw) * text.row).tolist()
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder,
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["batch"],
            seed=seed,
            max_grad_norm=CLIP,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=int(WARMUP * settings["steps"]),
            bf16=on_gpu,
            use_cpu=not on_gpu,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = ByteTrainer(
            *(model, options),
            l1=l1,
            train_dataset=[{"tokens": text.seen[start : start + length]} for start in starts],
            optimizers=(torch.optim.AdamW(groups, betas=BETAS, fused=on_gpu), None),
            callbacks=[clock],
        )
        trainer.pop_callback(transformers.PrinterCallback)
        trainer.train()
    loss, layers = evaluate(trainer, text.held_out(length - 1), settings["batch"])
    step_us = 1e6 * median(clock.windows[1:] or clock.windows)  # the first includes searches
    return {"loss": loss, "step_us": step_us, "seconds": time.perf_counter() - began}, layers


@torch.no_grad()
def evaluate(trainer: ByteTrainer, tokens: Tensor, batch: int) -> tuple[float, list[LayerCount]]:
    """Return the loss in nats per byte of contexts [contexts, context + 1], and active units."""
    model, losses, on = trainer.model.eval(), 0.0, list[list[Tensor]]()
    for part in tokens.to(model.device).split(batch):
        with torch.autocast(part.device.type, torch.bfloat16, enabled=part.is_cuda):
            loss, hidden = trainer.loss_of(model, part)
        losses += float(loss) * len(part) / len(tokens)
        on.append([(h != 0).cpu() for h in hidden])
    if not math.isfinite(losses):
        raise SuiteError(f"expected a finite loss after training; found {losses}")
    layers = []
    for layer in (torch.cat(parts) for parts in zip(*on, strict=True)):
        means, share = layer.sum(-1).double().mean(0).tolist(), float(layer.double().mean())
        layers.append(
            LayerCount(
                active=share * layer.shape[-1],
                zeros=1 - share,
                dead=int((~layer.flatten(0, 1).any(0)).sum()),
                most=int(layer.sum(-1).max()),
                first=means[:FIRST],
                rest=fmean(means[FIRST:]),
            )
        )
    return losses, layers


def byte_tokenizer() -> Any:
    """Return a tokenizer for which the token of each byte is the byte itself."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)

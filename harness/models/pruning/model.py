"""Prune every gated MLP of a Hugging Face model in one pass, each after the MLPs before it.

    calibration contexts ──┐    hidden states of all contexts go through the model once
    held-out contexts ─────┴──> ... attention ──> [hook] MLP ──> attention ──> [hook] MLP ──> ...
                                                    └ prunes the MLP from its calibration inputs,
                                                      and measures errors on the held-out inputs

transformers reads the model: a directory of safetensors, or a GGUF file, of any architecture with
gated MLPs (gated.py). The text is cut into contexts of CONTEXT tokens. Each starts with the model's
begin-of-text token if there is one. The held-out contexts come last.
"""

import hashlib
import pydoc_data.topics
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.sources import require_regular, sha256
from sparsebench.harness.models.pruning.gated import Gated, require_gated, with_name
from sparsebench.harness.models.pruning.layer import (
    ACTIVATIONS,
    GatedMLP,
    Pruner,
    mlp_errors,
    prune_mlp,
)
from sparsebench.harness.models.pruning.left_dense import outside, totals
from sparsebench.harness.models.pruning.methods import TWO_FOUR
from sparsebench.harness.models.pruning.sparsify import TwoFour, sparsify_
from sparsebench.harness.models.pruning.state import (
    INDEX,
    headers,
    load_complete,
    quiet,
    require_finite,
    usable,
)
from sparsebench.harness.models.reporting import transformers_for
from sparsebench.results.formatting import amount
from sparsebench.results.model_files import DenseWeights
from sparsebench.results.run.store import new_directory

CONTEXT = 1024


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device in evaluation mode, and its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def mlps(self) -> dict[str, nn.Module]:
        modules = self.model.named_modules()
        return {name: module for name, module in modules if Gated.of(module) is not None}

    @property
    def left_dense(self) -> dict[str, DenseWeights]:
        """Return the weights outside of the gated MLPs, in the words of sparsify_."""
        return totals(outside(self.model, [*self.mlps]))

    @property
    def layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def unit(self) -> Literal["token", "byte"]:
        """Return what a token is; a vocabulary of 256 has the bytes alone."""
        return "byte" if self.model.config.vocab_size == 256 else "token"


@dataclass(frozen=True)
class PrunedModel:
    """Numbers of dense and of all hidden features; held-out errors of the MLPs, and the loss."""

    dense: int
    features: int
    errors: Sequence[dict[str, float]]
    loss: float


def load(path: Path, device: torch.device) -> LoadedModel:
    """Read a local checkpoint directory or .gguf file, without network access.

    Raises SuiteError if transformers is missing, or if the files are not a model with gated MLPs:
    all its tensors, finite, and a tokenizer. FormatError names a tensor that is not finite.
    """
    transformers = transformers_for(path)
    options: dict[str, Any] = {}
    if path.suffix == ".gguf":
        require_regular(path)
        options["gguf_file"] = path.name
    elif not (path / "config.json").is_file():
        raise SuiteError(f"{path}: expected a directory with config.json, found none")
    elif (path / INDEX).exists():
        headers(path)
    folder = path.parent if path.suffix == ".gguf" else path
    with usable(path), quiet(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, **options
            )
        except Exception as error:  # of a dozen types
            raise SuiteError(f"no tokenizer that can be read: {error}") from error
        if path.suffix == ".gguf":
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = load_complete(
        *(transformers.AutoModelForCausalLM, path, folder), dtype="auto", **options
    )
    if getattr(model, "hf_quantizer", None):
        raise SuiteError(f"{path}: expected a usable model; found a quantized checkpoint")
    for name, tensor in model.state_dict().items():
        with_name(str(path), require_finite, name, tensor)
    loaded = LoadedModel(model.to(device).eval().requires_grad_(False), tokenizer)
    if not loaded.mlps:
        raise SuiteError(f"{path}: expected gated MLPs, found none in {type(model).__name__}")
    return loaded


@torch.no_grad()
def prune_model(
    loaded: LoadedModel, pruner: Pruner, calibration: Tensor, held_out: Tensor
) -> PrunedModel:
    """Prune a model in place from calibration tokens, and measure it on held-out ones.

    Both are token ids [contexts, tokens]. The errors of an MLP are measured on its inputs in the
    pruned model. Raises FormatError, before any change, if an MLP is not a plain gated one. Raises
    SuiteError if the data does not suffice; the MLPs before that one are then already pruned.
    """
    results: dict[str, tuple[int, int, dict[str, float]]] = {}
    count, names = calibration.numel(), tuple(ACTIVATIONS)
    mlps = {name: with_name(name, require_gated, mlp, names) for name, mlp in loaded.mlps.items()}

    def prune(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        parts, activation = mlps[name]
        x = inputs[0].flatten(0, -2)
        mlp = GatedMLP(*parts.weights, activation)
        try:
            pruned = prune_mlp(mlp, x[:count], pruner)
        except SuiteError as error:
            raise SuiteError(f"{name}: {error}") from error
        results[name] = pruned.dense, len(pruned.permutation), mlp_errors(mlp, pruned, x[count:])
        for layer, weight in zip(parts.layers.values(), pruned.weights, strict=True):
            layer.weight.copy_(weight)

    with ExitStack() as hooks:
        for name, module in loaded.mlps.items():
            hooks.callback(module.register_forward_pre_hook(partial(prune, name)).remove)
        loaded.model.base_model(torch.cat((calibration, held_out)), use_cache=False)
    if unused := mlps.keys() - results.keys():
        raise SuiteError(f"{min(unused)}: expected an MLP that the forward pass calls")
    dense, features, _ = next(iter(results.values()))
    errors = [error for *_, error in results.values()]
    return PrunedModel(dense, features, errors, loss_of(loaded.model, held_out))


def save(loaded: LoadedModel, pruner: Pruner, to: Path) -> None:
    """Write a model that was pruned by a pruner, and its tokenizer; pack 2:4 weights in place.

    Other pruned weights are written dense, and 32-bit weights are rounded to bf16. Raises
    FormatError or ResultError; after an error, nothing is written.
    """
    model = loaded.model
    if model.dtype not in (torch.float16, torch.bfloat16):
        model.to(torch.bfloat16)
    if pruner.mask_pattern == TWO_FOUR:
        sparsify_(model, TwoFour(pruner.dense), lambda module, _: Gated.of(module) is not None)
    with new_directory(to) as fresh, quiet(transformers_for(to)):
        model.save_pretrained(fresh)
        loaded.tokenizer.save_pretrained(fresh)


@contextmanager
def restore_weights(loaded: LoadedModel) -> Iterator[None]:
    """Restore the current weights of a model's MLPs at the end."""
    weights = [weight for mlp in loaded.mlps.values() for weight in mlp.parameters()]
    before = [weight.detach().cpu() if weight.is_cuda else weight.clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


def loss_of(model: Any, tokens: Tensor) -> float:
    """Return the mean loss in nats per token of [contexts, tokens], except the first tokens."""
    return float(losses_of(model, tokens).mean())


@torch.no_grad()
def losses_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of each context of [contexts, tokens], in nats per token."""
    losses = [
        cross_entropy(model(row[None], use_cache=False).logits[0, :-1].float(), row[1:])
        for row in tokens
    ]
    return torch.stack(losses)


def contexts(
    loaded: LoadedModel, text: str, tokens: int, name: str = "text"
) -> tuple[Tensor, Tensor]:
    """Cut a text into contexts of about `tokens` tokens in all, then held-out ones of half as many.

    A context has CONTEXT tokens, or as many as the model has positions. Raises SuiteError with the
    name of the text if it is too short.
    """
    size = min(CONTEXT, getattr(loaded.model.config, "max_position_embeddings", CONTEXT))
    calibration = tokens // size
    if calibration < 1:
        raise SuiteError(f"expected at least {size} tokens to calibrate on; found {tokens}")
    rows = cut(loaded, [text], size, calibration + max(calibration // 2, 1), name)
    return rows[:calibration], rows[calibration:]


def cut(
    loaded: LoadedModel,
    texts: Sequence[str],
    size: int,
    count: int | None = None,
    name: str = "text",
) -> Tensor:
    """Return contexts of texts, int64 [contexts, size]: `count`, or as many as there are.

    Each starts with the model's begin-of-text token if there is one. Raises SuiteError with the
    name of the text if it is too short.
    """
    lists = loaded.tokenizer([*texts], add_special_tokens=False)["input_ids"]
    numbers = torch.tensor([number for each in lists for number in each])
    first = loaded.tokenizer.bos_token_id
    begin = torch.tensor([] if first is None else [first], dtype=torch.int64)
    body = size - len(begin)
    count = count or max(len(numbers) // body, 1)
    if len(numbers) < count * body:
        expected = f"{count * body} tokens, for {amount(count, 'context')} of {size}"
        raise SuiteError(f"{name}: expected at least {expected}; found {len(numbers)} tokens")
    rows = numbers[: count * body].view(count, body)
    return torch.cat((begin.expand(count, -1), rows), dim=1).to(loaded.model.device)


def python_reference() -> str:
    """Return the text of the language reference that Python installs: 0.4 MB of English.

    Topics repeat paragraphs. Each is kept once, so that no held-out paragraph occurs earlier.
    """
    topics = pydoc_data.topics.topics
    parts = (part for name in sorted(topics) for part in re.split("\n{2,}", topics[name].strip()))
    return "\n\n".join(dict.fromkeys(parts))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the digests of a directory's *.safetensors files."""
    if path.is_file():
        return sha256(path)
    total = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        total.update(bytes.fromhex(sha256(file)))
    return total.hexdigest()

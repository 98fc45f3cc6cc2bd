"""Every gated MLP of a Hugging Face model, pruned in one pass: each from what pruned ones give it.

    contexts of calibration ──┐    hidden states of all contexts, through the model once
    contexts held out ────────┴──> ... attention ──> [hook] MLP ──> attention ──> [hook] MLP ──> ...
                                                       └ prunes it from the first contexts' inputs,
                                                         and takes its errors on the others'

The model is read by transformers: a directory of safetensors, or a GGUF file, of any architecture
with gated MLPs (gated.py). The text is cut into contexts of CONTEXT tokens, each after the token
that begins every text, if the model has one; those held out are further on in it.
"""

import hashlib
import pydoc_data.topics
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.harness.inputs.sources import require_regular, sha256
from sparsebench.harness.models.pruning.gated import Gated, named, require_gated
from sparsebench.harness.models.pruning.layer import Recipe, mlp_errors, prune_mlp
from sparsebench.harness.models.pruning.mlp import ACTIVATIONS, GatedMLP
from sparsebench.harness.models.pruning.sparsify import TwoFour, sparsify_

CONTEXT = 1024


@dataclass(frozen=True)
class Loaded:
    """A model on its device, in evaluation mode, and its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def mlps(self) -> dict[str, nn.Module]:
        """Return the gated MLPs by name; each is an outermost one."""
        modules = self.model.named_modules()
        return {name: module for name, module in modules if Gated.of(module) is not None}


@dataclass(frozen=True)
class PrunedModel:
    """How many of the hidden features are dense, errors of the MLPs on held-out tokens, a loss."""

    dense: int
    features: int
    errors: Sequence[dict[str, float]]
    loss: float


def load(path: Path, device: torch.device) -> Loaded:
    """Read a directory of a checkpoint, or a .gguf file, from this machine alone.

    Raises SuiteError where transformers is missing, or where the files make up no such model.
    """
    transformers = _transformers(path)
    options: dict[str, Any] = {"local_files_only": True}
    if path.suffix == ".gguf":
        require_regular(path)
        options["gguf_file"] = path.name
    elif not (path / "config.json").is_file():
        raise SuiteError(f"{path}: expected a directory with config.json, found none")
    folder = path.parent if path.suffix == ".gguf" else path
    with usable(path), quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        if path.suffix == ".gguf":
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, **options, dtype="auto", output_loading_info=True
        )
        lost = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
        if lost:
            raise SuiteError(f"no weights for {lost[0]}")
        if getattr(model, "hf_quantizer", None):
            raise SuiteError("a quantized checkpoint, whose weights are not dense")
    found = Loaded(model.to(device).eval().requires_grad_(False), tokenizer)
    if not found.mlps:
        raise SuiteError(f"{path}: expected gated MLPs, found none in {type(model).__name__}")
    return found


@torch.no_grad()
def prune_model(
    loaded: Loaded, recipe: Recipe, calibration: Tensor, held_out: Tensor
) -> PrunedModel:
    """Prune a model in place, from token numbers [contexts, tokens], and look at others.

    An MLP's errors are those on the inputs that it has in the pruned model. SuiteError or
    FormatError where an MLP cannot be pruned; where data is the cause, those before it are.
    """
    found: dict[str, tuple[int, int, dict[str, float]]] = {}
    count = calibration.numel()
    known = tuple(ACTIVATIONS)
    mlps = {name: named(name, require_gated, mlp, known) for name, mlp in loaded.mlps.items()}

    def prune(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        parts, activation = mlps[name]
        x = given[0].flatten(0, -2)
        mlp = GatedMLP(*parts.weights, activation)
        try:
            pruned = prune_mlp(mlp, x[:count], recipe)
        except SuiteError as error:
            raise SuiteError(f"{name}: {error}") from error
        found[name] = pruned.dense, len(pruned.permutation), mlp_errors(mlp, pruned, x[count:])
        weights = pruned.mlp.gate, pruned.mlp.up, pruned.mlp.down
        for layer, weight in zip(parts.layers.values(), weights, strict=True):
            layer.weight.copy_(weight)

    with ExitStack() as hooks:
        for name, module in loaded.mlps.items():
            hooks.callback(module.register_forward_pre_hook(partial(prune, name)).remove)
        loaded.model.base_model(torch.cat((calibration, held_out)), use_cache=False)
    if missed := mlps.keys() - found.keys():
        raise SuiteError(f"{min(missed)}: expected an MLP that text goes through, found none did")
    dense, features, _ = next(iter(found.values()))
    errors = [error for *_, error in found.values()]
    return PrunedModel(dense, features, errors, loss_of(loaded.model, held_out))


def save(loaded: Loaded, recipe: Recipe, to: Path) -> None:
    """Write a model that was pruned by a recipe, and its tokenizer; 2:4 is packed, in place.

    Unstructured weights are written as dense ones, and weights of 32 bits rounded to bf16. Raises
    SuiteError, FormatError; writes all or nothing.
    """
    model = loaded.model
    if model.dtype not in (torch.float16, torch.bfloat16):
        model.to(torch.bfloat16)
    if recipe.where.group:
        sparsify_(model, TwoFour(recipe.dense), lambda module, _: Gated.of(module) is not None)
    fresh = to.with_name(f"{to.name}.new")
    try:
        with quiet(_transformers(to)):
            model.save_pretrained(fresh)
            loaded.tokenizer.save_pretrained(fresh)
        fresh.rename(to)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise SuiteError(
            f"{to}: expected a directory that can be written; found {error}"
        ) from error


@contextmanager
def restored(loaded: Loaded) -> Iterator[None]:
    """Give a model's MLPs the weights back, at the end, that they have now."""
    weights = [weight for mlp in loaded.mlps.values() for weight in mlp.parameters()]
    before = [weight.detach().cpu() if weight.is_cuda else weight.clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


@torch.no_grad()
def loss_of(model: Any, tokens: Tensor) -> float:
    """Return the mean loss of each token but a context's first, in nats; tokens [contexts, t]."""
    losses = [
        cross_entropy(model(row[None], use_cache=False).logits[0, :-1].float(), row[1:])
        for row in tokens
    ]
    return float(torch.stack(losses).mean())


def contexts(loaded: Loaded, text: str, calibration: int) -> tuple[Tensor, Tensor]:
    """Cut a text into contexts: `calibration` of them, and half as many, held out, after them."""
    numbers = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    first = loaded.tokenizer.bos_token_id
    begin = [] if first is None else [first]
    body = CONTEXT - len(begin)
    held_out = max(calibration // 2, 1)
    needed = (calibration + held_out) * body
    if calibration < 1 or len(numbers) < needed:
        expected = f"{needed} tokens for {calibration} and {held_out} contexts of {CONTEXT}"
        raise SuiteError(f"text: expected at least {expected}; found {len(numbers)}")
    rows = [begin + numbers[start : start + body] for start in range(0, needed, body)]
    tokens = torch.tensor(rows, device=loaded.model.device)
    return tokens[:calibration], tokens[calibration:]


def python_reference() -> str:
    """Return the text of Python's language reference, as each Python carries it: 0.4 MB of English.

    Topics quote one another; a paragraph is taken once, so that none held out was seen before.
    """
    topics = pydoc_data.topics.topics
    parts = (part for name in sorted(topics) for part in re.split("\n{2,}", topics[name].strip()))
    return "\n\n".join(dict.fromkeys(parts))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of a directory's *.safetensors, one after the other."""
    if path.is_file():
        return sha256(path)
    whole = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        whole.update(bytes.fromhex(sha256(file)))
    return whole.hexdigest()


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Say in one line that files do not make up a model, whatever they break."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        found = words if isinstance(error, SparsebenchError) else f"{type(error).__name__}: {words}"
        raise SuiteError(f"{path}: expected a model that computes; found {found}") from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from logging, from drawing progress, and from warning of its changes."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _transformers(path: Path) -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        expected = "the package transformers (pip install 'sparsebench[models]')"
        raise SuiteError(f"{path}: expected {expected}; found none") from error

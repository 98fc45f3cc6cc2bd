"""Plan the sparse layers of a model ahead, so that no request waits for a compiler or a search.

    sparsify_, from_pretrained ── plan_ahead ──> a plan for each power of two, from the lists
    sparsebench tune MODEL ── searches ──> MODEL/sparsebench-sm90_132.choices
    from_pretrained, sparsify_(tokens=...) ── take ──> these choices come first (choices.py)

A call takes the plan for up to twice as many tokens at first, so the powers of two are enough for
every number of tokens below the largest. Layers of equal sizes share machine code, and those in 2:4
also their plans, so one layer of each kind is planned. Plans of blocks read the index of the layer:
an MLP of 12288 x 4096 took 0.4 s in its first call. So if the checkpoint has a file, or the caller
says for how many tokens, all layers in blocks are planned, which took 1.3 s for each such MLP and
16 numbers of tokens, and 74 MB.

The first line of the file says what it was made for:

    {"tuned": {"gpu": "NVIDIA H200", "version": "0.4.0", "layers": "5f2c...", "tokens": [1, 8, 16]}}
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn

from sparsebench._writing import write_file
from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.checkpoint import Description, describe, register
from sparsebench.harness.models.reporting import transformers_for
from sparsebench.kernels._common import choices
from sparsebench.kernels._common.front_extension import front_type
from sparsebench.kernels._common.operator import ahead, bucket
from sparsebench.kernels.nn import BlockSparseLinear

POWERS = (1, *(2**power for power in range(3, 12)))  # to 2048 tokens
BUILDERS = 8  # threads that compile
MOST = 2**16  # tokens of a call, in a file and on the command line


def plan_ahead(model: nn.Module, tokens: Iterable[int] | None = None) -> None:
    """Plan the layers that are on a GPU for these numbers of tokens, without a search.

    By default one layer of each kind is planned, for the powers of two; with `tokens`, one of each
    kind and all in blocks. One line says which layers no kernel runs on this GPU.
    """
    counts = sorted({bucket(m) for m in (POWERS if tokens is None else tokens)})
    layers = kinds_of(model)
    with ThreadPoolExecutor(BUILDERS) as pool:
        if layers:
            pool.submit(front_type)  # c++ takes 25 s, once on a machine: a first call would wait
        for layer in layers:  # compiles
            reasons = [*pool.map(partial(_plan, layer), [[m] for m in counts])]
            if reasons and all(reasons):
                warnings.warn(f"{type(layer).__name__}: {reasons[0]}", stacklevel=2)
        if tokens is not None:
            layers = [layer for _, layer in _layers_on_gpus(model)]
            blocks = [layer for layer in layers if isinstance(layer, BlockSparseLinear)]
            [*pool.map(partial(_plan, tokens=counts), blocks)]
    for device in {t.device for layer in layers for t in _tensors(layer) if t.is_cuda}:
        torch.cuda.synchronize(device)  # plans upload lists, and calls may use another stream


def _plan(layer: Any, tokens: list[int]) -> str | None:
    """Return why no kernel can run a layer, or None."""
    try:
        layer.plan(tokens, search=False)
    except Unsupported as error:
        return str(error)
    return None


def kinds_of(model: nn.Module) -> list[Any]:
    """Return one sparse layer of each description and GPU that can be planned."""
    kinds: dict[Any, Any] = {}
    for kind, layer in _layers_on_gpus(model):
        kinds.setdefault(kind, layer)
    return [*kinds.values()]


def _layers_on_gpus(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the description and GPU of each sparse layer that can be planned, and the layer.

    Layers that are offloaded, even in part, are left out.
    """
    for name, description in describe(model).items():
        layer = model.get_submodule(name)
        devices = {t.device for t in _tensors(layer)}
        if hasattr(layer, "plan") and {device.type for device in devices} == {"cuda"}:
            yield (str(description), *devices), layer


def _tensors(layer: nn.Module) -> list[torch.Tensor]:
    return [*chain(layer.parameters(), layer.buffers())]


# ---- the file of a checkpoint ----


def file_of(folder: Path, device: torch.device) -> Path:
    """Return the path of a checkpoint's choices for the kind of a GPU."""
    return folder / f"sparsebench-{choices.package_file(device).name}"


def tune(
    folder: Path,
    tokens: Iterable[int],
    device: torch.device,
    minutes: float,
    out: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> list[str]:
    """Search the layers of a checkpoint, and write the choices beside it; return lines to print.

    tokens  of a call; each stands for its bucket
    out     the folder to write to, which is made if needed; by default the checkpoint's

    If the time is up, the file has the numbers of tokens that were reached, the least first. Raises
    FormatError, and before it searches OSError if the folder cannot be made.
    """
    place = out or folder
    place.mkdir(parents=True, exist_ok=True)
    writable = os.access(place, os.W_OK)
    require(writable, f"{place}: expected a folder to write to, found it write-protected")
    model = _load(folder).to(device)
    layers, counts = kinds_of(model), sorted({bucket(m) for m in tokens})
    expected = "expected sparse layers, such as save_pretrained writes them"
    require(bool(layers), f"{folder}: {expected}, found none")
    reached, refusals = list[int](), dict[str, None]()
    end, steps = monotonic() + 60 * minutes, len(layers)
    with ahead(search=True) as selected:
        for m in counts:
            if reached and monotonic() > end:
                break
            for number, layer in enumerate(layers):
                text = f"{type(layer).__name__} {m} tokens"
                progress(len(reached) * steps + number, len(counts) * steps, text)
                try:
                    layer.plan([m])
                except Unsupported as error:
                    refusals[f"{type(layer).__name__}, {m} tokens: {error}"] = None
            reached.append(m)
    rows = {choices.key(each.problem): each for each in selected}
    lines = [choices.line(s.problem, s.choice, s.product.code) for s in rows.values()]
    file, gpu = file_of(place, device), torch.cuda.get_device_properties(device).name
    header = {"gpu": gpu, **_description(describe(model)), "tokens": reached}
    write_file(file, "\n".join([json.dumps({choices.HEADER: header}), *lines, ""]))
    said = [f"{file}: {len(lines)} choices for {reached[0]} to {reached[-1]} tokens"]
    if left := len(counts) - len(reached):
        said.append(f"time is up: {left} numbers of tokens left, of {len(counts)}")
    return [*said, *refusals]


def take(model: nn.Module) -> list[int] | None:
    """Take the choices beside the weights that a model was loaded from; return their tokens.

    Without a file that fits, return None; one line says what does not fit.
    """
    place = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not place or not (layers := kinds_of(model)):
        return None
    return take_from(Path(place), _tensors(layers[0])[0].device, describe(model))


def take_from(
    folder: Path, device: torch.device, layers: Mapping[str, Description]
) -> list[int] | None:
    """Take the choices of a folder for these layers of a model, as `take`."""
    file = file_of(folder, device)
    if not (names := sorted(path.name for path in folder.glob("sparsebench-sm*.choices"))):
        return None
    try:
        require(file.name in names, f"expected {file.name} for this GPU, found {', '.join(names)}")
        header = _header(file)
        for name, expected in _description(layers).items():
            fits = header.get(name) == expected
            require(fits, f"expected {name} {expected}, found {header.get(name)}")
        choices.add(choices.parse(file))
        return [int(m) for m in header["tokens"]]
    except (OSError, FormatError) as error:
        advice = f"searched choices are ignored: run `sparsebench tune {folder}`"
        warnings.warn(f"{file}: {error}; {advice}", stacklevel=2)
        return None


def _header(file: Path) -> dict[str, Any]:
    """Return what a file was made for. Raises FormatError."""
    with file.open(encoding="utf-8", errors="replace") as text:
        first = text.readline()
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        header: dict[str, Any] = json.loads(first)[choices.HEADER]
        tokens = header["tokens"]
        if tokens and all(isinstance(m, int) and 0 < m <= MOST for m in tokens):
            return header
    raise FormatError(f"expected a first line with {choices.HEADER!r}, found {first[:60]!r}")


def _description(layers: Mapping[str, Description]) -> dict[str, str]:
    """Return the version, and a digest of the layers."""
    digest = hashlib.sha256(json.dumps(layers, sort_keys=True).encode())
    return {"version": version("sparsebench"), "layers": digest.hexdigest()[:16]}


def _load(folder: Path) -> Any:
    """Return the model of a checkpoint, on the CPU. Raises FormatError."""
    transformers = transformers_for(folder)
    register()  # as sparsebench.nn does, which a command does not import
    config = transformers.AutoConfig.from_pretrained(folder)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    require(bool(names), f"{folder}: expected an architecture that transformers has, found none")
    return getattr(transformers, names[0]).from_pretrained(folder, dtype="auto").eval()


def counts_of(text: str) -> list[int]:
    """Return the numbers of tokens of a text such as 1,16,64-512. Raises FormatError."""
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        expected = f"expected numbers from 1 to {MOST}, such as 1-512 or 1,16,64"
        require(1 <= first <= last <= MOST, f"--tokens: {expected}; found {part.strip()!r}")
        counts.update(range(first, last + 1))
    return sorted(counts)

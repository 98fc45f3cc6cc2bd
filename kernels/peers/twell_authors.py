"""Gated feed-forward layer by TwELL's authors: their CUDA kernels, built from their own code.

    gate   X @ Wg.T, relu, packed             words of value and place; 31 for each 256 units
    layer  Y = (gate * (X @ Wu.T)) @ Wd.T     a warp per token, over the active units

torch's loader builds their extension once, in about a minute, with the machine's nvcc
(_authors.built_library). The build needs no GPU, so it can be done before a run:

    SPARSEBENCH_PEERS=DIR python -c \
        "from sparsebench.kernels.peers.twell_authors import extension; extension()"

Only the sources of the two kernels are built. Both precisions of the second kernel are timed, and
the faster one is chosen.

    needs        --peers DIR with a checkout (_authors.py), compute capability 9.0, nvcc, ninja
    dtype        bf16, relu
    sizes        k 2048; n 5632 or 8192, because their second kernel is instantiated for these alone
                 and leaves its output unwritten for others; m padded to a multiple of 256
                 (_padding.py); a schedule of at most 384 tiles per cluster
    no graph     they launch on the default stream, so rows are timed with events

If more than 31 of 256 units are active for a token, the gate silently keeps 31. Such a call is
wrong, and the row has the number of lost values (Launch.lost).
Source: github.com/SakanaAI/sparser-faster-llms, MIT licence, custom_models/twell_modules.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.search import search
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _authors
from sparsebench.kernels.peers._padding import multiple_of, padded
from sparsebench.results.record import Problem

REPOSITORY = "github.com/SakanaAI/sparser-faster-llms"
MARKER = "custom_models/twell_modules/twell.py"
WIDTH, UNITS = 2048, (5632, 8192)  # k and n
TILE, SLOTS = 256, 32  # units of a tile; its words, of which one is a count
CLUSTERS, SCHEDULE = 64, 384
KERNELS = ["twell_d2t", "twell_gated_t2d"]  # by their names
NUMBERS = count(1)  # their extension identifies layers of a process by number


def prepare(operands: Operands, *, highest_precision: bool | None = None) -> Launch:
    """Build the extension, and choose the faster precision unless one is given or pinned."""
    twell, ext, digest = extension()
    fixed = (operands.pinned or {}).get("highest_precision", highest_precision)
    choices = [{"highest_precision": p} for p in ((False, True) if fixed is None else (fixed,))]
    gate = Gate(operands, "wg", twell, ext)
    up, down = operands.weights["wu"].to_dense(), operands.weights["wd"].to_dense().t().contiguous()

    def layer(highest_precision: bool) -> Tensor:
        return gate.then(
            lambda x, packed, out: twell.matmul_gated_t2d_out(
                x, packed, up, down, out, highest_precision=highest_precision, ext=ext
            )
        )

    calls = [partial(layer, **choice) for choice in choices]
    found = search(calls, operands.device)
    choice = {**choices[found.best], **gate.tokens.choice, "digest": digest}
    return Launch(calls[found.best], choice, candidates=found.lines(choices), lost=gate.lost)


def extension() -> tuple[Any, Any, str]:
    """Return the authors' module, its extension, and the digest of its code."""
    folder = _authors.checkout(MARKER)
    if not folder:
        raise Unsupported(str(_authors.missing(MARKER, REPOSITORY)))
    twell, sources = _authors.imported(folder / MARKER), (folder / MARKER).parent
    ext = _authors.built_library(sources, partial(twell.get_ext, algorithms=KERNELS))
    return twell, ext, _authors.digest(sources)


class Gate:
    """The authors' first kernel: X with padded tokens, and the packed gate of a weight [n, k]."""

    def __init__(self, operands: Operands, weight: str, twell: Any, ext: Any) -> None:
        """Register the weight."""
        w, x = operands.weights[weight].to_dense(), operands.activations["x"]
        self.tokens = padded(x, multiple_of(TILE, len(x)))
        whole = self.tokens.whole
        self._layer = twell.D2TLayer(next(NUMBERS), w, ext=ext)
        self._packed = twell.allocate_packed_output(len(whole), len(w), device=x.device)
        self._out = torch.empty_like(whole)

    def then(self, second: Callable[[Tensor, Tensor, Tensor], None]) -> Tensor:
        """Enqueue the kernel and the second one, of X, the packed gate and Y; return Y.

        Both use the default stream. Raises RuntimeError inside a capture.
        """
        x = self.tokens.filled()
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the authors' kernels launch on the default stream")
        self._layer.run(x, C_packed=self._packed)
        second(x, self._packed, self._out)
        return self._out[: len(self.tokens.x)]

    def lost(self) -> int:
        """Return the number of values that the last call had no room for."""
        counts = self._packed.view(torch.int32)[:, ::SLOTS]
        return int((counts - (SLOTS - 1)).clamp(min=0).sum())


def unsupported_type(problem: Problem, device: torch.device) -> str | None:
    """Return why no kernel of the authors runs here, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs an NVIDIA GPU of compute capability 9.0, found {device}"
    if (problem["dtype"], problem["activation"]) != ("bf16", "relu"):
        return f"expected bf16 and relu, found {problem['dtype']} and {problem['activation']}"
    return None


def unsupported_layer(problem: Problem, device: torch.device) -> str | None:
    """Return why the authors' kernels for inference cannot run here, or None."""
    if reason := unsupported_type(problem, device):
        return reason
    m, n, k = (problem[size] for size in "mnk")
    if k != WIDTH or n not in UNITS:
        expected = f"k {WIDTH} and n {' or '.join(map(str, UNITS))}"
        return f"expected {expected}, found k {k} and n {n}"
    if multiple_of(TILE, m) * n > CLUSTERS * SCHEDULE * TILE**2:
        return f"expected a schedule of at most {SCHEDULE} tiles per cluster, found m {m} and n {n}"
    return _authors.missing(MARKER, REPOSITORY)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the authors' layer cannot run or be built here, or None."""
    if reason := unsupported_layer(problem, device):
        return reason
    return None if find_spec("ninja") else "needs ninja: pip install ninja"


KERNEL = Kernel("ffn", "twell", "cuda", prepare, unsupported)

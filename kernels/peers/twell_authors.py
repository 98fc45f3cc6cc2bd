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
    sizes        k 2048; m and n multiples of 256; a schedule of at most 384 tiles per cluster
    no graph     they launch on the default stream, so rows are timed with events

If more than 31 of 256 units are active for a token, the gate silently keeps 31. Such a call is
wrong, and the row has the number of lost values (Launch.lost).
Source: github.com/SakanaAI/sparser-faster-llms, MIT licence, custom_models/twell_modules.
"""

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
from sparsebench.results.record import Problem

REPOSITORY = "github.com/SakanaAI/sparser-faster-llms"
MARKER = "custom_models/twell_modules/twell.py"
WIDTH, TILE, SLOTS = 2048, 256, 32  # k; units of a tile; its words, of which one is a count
CLUSTERS, SCHEDULE = 64, 384
KERNELS = ["twell_d2t", "twell_gated_t2d"]  # by their names
NUMBERS = count(1)  # their extension identifies layers of a process by number


def prepare(operands: Operands, *, highest_precision: bool | None = None) -> Launch:
    """Build the extension, and choose the faster precision unless one is given or pinned."""
    twell, ext, digest = extension()
    fixed = (operands.pinned or {}).get("highest_precision", highest_precision)
    choices = [{"highest_precision": p} for p in ((False, True) if fixed is None else (fixed,))]
    layer = Layer(operands, twell, ext)
    calls = [partial(layer.run, **choice) for choice in choices]
    found = search(calls, operands.device)
    choice = {**choices[found.best], "digest": digest}
    return Launch(calls[found.best], choice, candidates=found.lines(choices), lost=layer.lost)


def extension() -> tuple[Any, Any, str]:
    """Return the authors' module, its extension, and the digest of its code."""
    folder = _authors.checkout(MARKER)
    if not folder:
        raise Unsupported(str(_authors.missing(MARKER, REPOSITORY)))
    twell, sources = _authors.imported(folder / MARKER), (folder / MARKER).parent
    ext = _authors.built_library(sources, partial(twell.get_ext, algorithms=KERNELS))
    return twell, ext, _authors.digest(sources)


class Layer:
    """The authors' two kernels with their buffers."""

    def __init__(self, operands: Operands, twell: Any, ext: Any) -> None:
        """Register the gate's weights."""
        wg, self._up, wd = (operands.weights[name].to_dense() for name in ("wg", "wu", "wd"))
        self._down, self._x = wd.t().contiguous(), operands.activations["x"]
        self._twell, self._ext = twell, ext
        self._gate = twell.D2TLayer(next(NUMBERS), wg, ext=self._ext)
        m, n = len(self._x), len(wg)
        self._packed = twell.allocate_packed_output(m, n, device=self._x.device)
        self._out = torch.empty_like(self._x)

    def run(self, highest_precision: bool) -> Tensor:
        """Enqueue both kernels on the default stream. Raises RuntimeError inside a capture."""
        if self._x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the authors' kernels launch on the default stream")
        self._gate.run(self._x, C_packed=self._packed)
        self._twell.matmul_gated_t2d_out(
            self._x,
            self._packed,
            self._up,
            self._down,
            self._out,
            highest_precision=highest_precision,
            ext=self._ext,
        )
        return self._out

    def lost(self) -> int:
        """Return the number of values that the last call had no room for."""
        counts = self._packed.view(torch.int32)[:, ::SLOTS]
        return int((counts - (SLOTS - 1)).clamp(min=0).sum())


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the authors' kernels cannot run here, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs an NVIDIA GPU of compute capability 9.0, found {device}"
    if (problem["dtype"], problem["activation"]) != ("bf16", "relu"):
        return f"expected bf16 and relu, found {problem['dtype']} and {problem['activation']}"
    m, n, k = (problem[size] for size in "mnk")
    if k != WIDTH or m % TILE or n % TILE:
        expected = f"k {WIDTH}, and m and n multiples of {TILE}"
        return f"expected {expected}, found m {m}, n {n} and k {k}"
    if m * n > CLUSTERS * SCHEDULE * TILE**2 or n > 2**16:
        return f"expected a schedule of at most {SCHEDULE} tiles per cluster, found m {m} and n {n}"
    if reason := _authors.missing(MARKER, REPOSITORY):
        return reason
    return None if find_spec("ninja") else "needs ninja: pip install ninja"


KERNEL = Kernel("ffn", "twell", "cuda", prepare, unsupported)

"""Gated feed-forward layer by TwELL's authors: their CUDA kernels, built from their own code.

    gate   X @ Wg.T, relu, packed             words of value and place; 31 for each 256 units
    layer  Y = (gate * (X @ Wu.T)) @ Wd.T     a warp per token, over the active units

torch's loader builds their extension once, in about a minute, with the machine's nvcc
(_builds.built_library). The build needs no GPU, so it can be done before a run:

    SPARSEBENCH_PEERS=DIR python -c \
        "from sparsebench_authors.twell_authors import extension; extension()"

Only the sources of the two kernels are built. The search times both precisions of the second
kernel, its `flex` version, and for that also gates of 63 and 127 words for each 256 units
(compression 4 and 2); of these, only ways that lose none of the values.

    needs        --peers DIR with a checkout (_builds.py), compute capability 9.0, nvcc, ninja
    dtype        bf16, relu
    sizes        k 2048; n 5632 or 8192, because their second kernel is instantiated for these alone
                 and writes no output for other sizes; m padded to a multiple of 256
                 (_common/padding.py); a schedule of at most 384 tiles per cluster
    no graph     they launch on the default stream, so rows are timed with events

If a token has more active units of 256 than words, the gate silently keeps as many as there are.
Such a call is wrong, and the row has the number of lost values (Launch.lost).
Source: github.com/SakanaAI/sparser-faster-llms, MIT licence, custom_models/twell_modules.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, product
from typing import Any, Self

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._common.padding import multiple_of, padded
from sparsebench.kernels._common.requirements import HOPPER, unsupported_device, unsupported_without
from sparsebench.kernels._common.search import fastest_call
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem
from sparsebench_authors import _builds

REPOSITORY = "github.com/SakanaAI/sparser-faster-llms"
MARKER = "custom_models/twell_modules/twell.py"
WIDTH, UNITS = 2048, (5632, 8192)  # k and n
TILE = 256  # units of a tile; it has TILE / compression words, of which one is a count
COMPRESSION, MORE_ROOM = 8, (4, 2)  # theirs by default, and for `flex` alone
CLUSTERS, SCHEDULE = 64, 384
KERNELS = ["twell_d2t", "twell_gated_t2d"]  # by their names
NUMBERS = count(1)  # their extension identifies layers of a process by number


@dataclass(frozen=True)
class Way:
    """One way to run the second kernel, by default as the authors do."""

    highest_precision: bool = False
    flex: bool = False
    compression: int = COMPRESSION


WAYS = [
    Way(precision, flex, compression)
    for flex, compression, precision in product(
        (False, True), (COMPRESSION, *MORE_ROOM), (False, True)
    )
    if flex or compression == COMPRESSION
]


def prepare(
    operands: Operands, *, highest_precision: bool | None = None, flex: bool | None = None
) -> Launch:
    """Build the extension, and choose the fastest way among those with the given options."""
    twell, ext, digest = extension()
    options = {"highest_precision": highest_precision, "flex": flex}
    options = {name: value for name, value in options.items() if value is not None}
    ways = [way for way in WAYS if options.items() <= asdict(way).items()]
    if pinned := operands.pinned:  # rows up to 0.2.0 have the precision alone
        ways = [Way(**{name: pinned[name] for name in asdict(Way()) if name in pinned})]
    up, down = operands.weights["wu"].to_dense(), operands.weights["wd"].to_dense().t().contiguous()
    gates = {c: Gate(operands, "wg", twell, ext, c) for c in {way.compression for way in ways}}

    def layer(gate: Gate, way: Way) -> Tensor:
        return gate.then(
            lambda x, packed, out: twell.matmul_gated_t2d_out(
                *(x, packed, up, down, out, way.highest_precision),
                *(way.compression, way.flex, ext),
            )
        )

    full = {c for c, gate in gates.items() if len(ways) > 1 and gate.filled().lost()}
    ways = [way for way in ways if way.compression not in full] or ways
    calls = [partial(layer, gates[way.compression], way) for way in ways]
    padding = next(iter(gates.values())).tokens.choice
    choices = [asdict(way) for way in ways]
    launch = fastest_call(calls, choices, operands.device, **padding, digest=digest)
    return replace(launch, lost=gates[launch.choice["compression"]].lost)


def extension() -> tuple[Any, Any, str]:
    """Return the authors' module, its extension, and the digest of its code."""
    folder = foreign_code.checkout(MARKER)
    if not folder:
        raise Unsupported(str(_builds.missing(MARKER, REPOSITORY)))
    twell, sources = _builds.imported(folder / MARKER), (folder / MARKER).parent
    ext = _builds.built_library(sources, partial(twell.get_ext, algorithms=KERNELS))
    return twell, ext, _builds.digest(sources)


class Gate:
    """The authors' first kernel: X with padded tokens, and the packed gate of a weight [n, k]."""

    def __init__(
        self, operands: Operands, weight: str, twell: Any, ext: Any, compression: int = COMPRESSION
    ) -> None:
        self._words = TILE // compression
        w, x = operands.weights[weight].to_dense(), operands.activations["x"]
        self.tokens = padded(x, multiple_of(TILE, len(x)))
        whole = self.tokens.whole
        self._layer = twell.D2TLayer(next(NUMBERS), w, compression_factor=compression, ext=ext)
        self._packed = twell.allocate_packed_output(
            len(whole), len(w), device=x.device, compression_factor=compression
        )
        self._out = torch.empty_like(whole)

    def then(self, second: Callable[[Tensor, Tensor, Tensor], None]) -> Tensor:
        """Enqueue the kernel and the second one, of X, the packed gate and Y; return Y.

        Both use the default stream.
        """
        second(self.filled().tokens.whole, self._packed, self._out)
        return self._out[: len(self.tokens.x)]

    def filled(self) -> Self:
        """Enqueue the kernel alone. Raises RuntimeError inside a capture."""
        x = self.tokens.filled()
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the authors' kernels launch on the default stream")
        self._layer.run(x, C_packed=self._packed)
        return self

    def lost(self) -> int:
        """Return the number of values that the last call had no room for."""
        counts = self._packed.view(torch.int32)[:, :: self._words]
        return int((counts - (self._words - 1)).clamp(min=0).sum())


def unsupported_type(problem: Problem, device: torch.device) -> str | None:
    types = problem["dtype"], problem["activation"]
    wrong = f"expected bf16 and relu, found {' and '.join(types)}"
    return unsupported_device(device, HOPPER) or (None if types == ("bf16", "relu") else wrong)


def unsupported_layer(problem: Problem, device: torch.device) -> str | None:
    if reason := unsupported_type(problem, device):
        return reason
    m, n, k = (problem[size] for size in "mnk")
    if k != WIDTH or n not in UNITS:
        expected = f"k {WIDTH} and n {' or '.join(map(str, UNITS))}"
        return f"expected {expected}, found k {k} and n {n}"
    if multiple_of(TILE, m) * n > CLUSTERS * SCHEDULE * TILE**2:
        return f"expected a schedule of at most {SCHEDULE} tiles per cluster, found m {m} and n {n}"
    return _builds.missing(MARKER, REPOSITORY)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    return unsupported_layer(problem, device) or unsupported_without("ninja", "ninja")


KERNEL = Kernel("ffn", "twell", "cuda", prepare, unsupported)

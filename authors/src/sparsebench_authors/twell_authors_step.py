"""A training step of a gated layer by TwELL's authors: their two operators, called directly.

    forward     ff_forward_gated(X, Wg, Wu, Wd.T)       gate packed, 31 words for each 256 units
    backward    ff_backward_gated(..., P, R, T, dY)     over the active units, by token and by unit

            units                    ELL [m, width]           tail [tail, n]
    token | a . b |  few active ->  | a b . . |
          | c d e |  more than `width`                  ->   | c d e |      a dense row

The step stores the gate by token and again by unit, each as ELL with a dense tail. Active units
beyond 31 of 256, and rows that do not fit into the tail, are dropped without an error; with more
than 2048 units in the tail the process can crash. So the search times only widths and
tails that hold every value of the activations, and the case is unsupported if there are none. Each
checked call counts the lost values from a dense gate (Launch.lost). The kernels drop
varying rows; the count assumes the shortest ones.

    needs        their library sparse_ops.so, which their own code builds: found by
                 $SPARSE_OPS_PREBUILT, in a checkout below --peers DIR (_builds.py) or in torch's
                 folder of extensions; compute capability 9.0
    dtype        bf16, relu
    sizes        k a multiple of 64; n of 256, at most 8192; m padded to a multiple of 256, at most
                 65536 (_common/padding.py). For other sizes they multiply the gate densely
    no graph     the backward pass waits for the host twice, so rows are timed with events

The launch copies their five results into one tensor, 2 % of the bytes of a step. Their L1 gradient
is 0. `tails_bytes` in the choice is the memory of the tails: three for the gate listed by
token, and three for the gate listed by unit.
Source: github.com/SakanaAI/sparser-faster-llms, MIT licence, custom_models/hybrid_modules.
"""

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.padding import multiple_of, padded
from sparsebench.kernels._common.search import fastest_call
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem
from sparsebench_authors import _builds
from sparsebench_authors.twell_authors import unsupported_type

LIBRARY, VARIABLE, LOADER = "sparse_ops", "SPARSE_OPS_PREBUILT", "load_sparse_ops()"
MARKER = "custom_models/hybrid_modules/sparse_ops_loader.py"
DEPTH, TILE, SLOTS = 64, 256, 31  # multiples of k and n; the most active units that a tile holds
MOST_UNITS, MOST_TOKENS = 8192, 65536
WIDTHS, UNIT_WIDTHS, TAILS = (64, 128, 256, 512), (128, 256, 512, 1024), (512, 2048)
KEEP_OVERFLOW = 0  # their setting `discard_overflow`


@dataclass(frozen=True)
class Config:
    """Width of the ELL and rows of the tail, for the gate listed by token and by unit."""

    width: int
    width_by_unit: int
    tail: int
    tail_by_unit: int

    def count_lost(self, active: Tensor) -> int:
        """Return the fewest values that the kernels can drop for a gate [m, n] of booleans."""
        tiles = active.unflatten(1, (-1, TILE)).sum(2)
        stored = tiles.clamp(max=SLOTS)
        by_token = _dropped(stored.sum(1), self.width, self.tail)
        by_unit = _dropped(active.sum(0), self.width_by_unit, self.tail_by_unit)
        return int((tiles - stored).sum()) + by_token + by_unit


def _dropped(counts: Tensor, width: int, tail: int) -> int:
    """Return the values of the shortest rows that are too long for the ELL and the tail."""
    longer = counts[counts > width].sort().values
    return int(longer[: max(len(longer) - tail, 0)].sum())


CONFIGS = [Config(*values) for values in product(WIDTHS, UNIT_WIDTHS, TAILS, TAILS)]


def prepare(operands: Operands) -> Launch:
    """Choose the widths and tails among those that lose nothing. Raises Unsupported."""
    digest, (wg, wu, wd) = loaded(), (operands.weights[w].to_dense() for w in ("wg", "wu", "wd"))
    wd_t, n = wd.t().contiguous(), len(wg)  # they read its rows
    rows = multiple_of(TILE, len(operands.activations["x"]))
    x, dy = (padded(operands.activations[name], rows) for name in ("x", "dy"))
    no_l1, m = torch.zeros((), device=operands.device), len(x.x)

    def active() -> Tensor:
        """Return which units are active for the current activations, bool [m, n]."""
        return torch.mm(x.x, wg.t()) > 0

    def run(config: Config) -> Tensor:
        """Enqueue both passes, and return the five results. Raises RuntimeError in a capture."""
        whole, whole_dy = x.filled(), dy.filled()
        if whole.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the authors' backward pass waits for the host")
        ops, settings = torch.ops.sparse_ops, torch.ops.sparse_ops_config
        settings.set_ell_width_regular(config.width)
        settings.set_ell_width_transpose(config.width_by_unit)
        settings.set_tail_rows_regular(config.tail)
        settings.set_tail_rows_transpose(config.tail_by_unit)
        settings.set_discard_overflow(KEEP_OVERFLOW)
        layer = whole[None], wg, wu, wd_t
        with torch.inference_mode():  # otherwise autograd's operator returns empty P, R and T
            y, _, _, *saved = ops.ff_forward_gated(*layer)
            dx, *weights = ops.ff_backward_gated(*layer, *saved, whole_dy[None], no_l1, no_l1)
        return torch.cat((y[0, :m], dx[0, :m], *weights))

    if operands.pinned:
        configs = [Config(**{name: operands.pinned[name] for name in asdict(CONFIGS[0])})]
    else:
        units = active()
        configs = [config for config in CONFIGS if not config.count_lost(units)]
        if not configs:
            least = min(config.count_lost(units) for config in CONFIGS)
            raise Unsupported(f"the authors' formats have no room for {least} values of the gate")
    calls, choices = [partial(run, config) for config in configs], [*map(asdict, configs)]
    launch = fastest_call(calls, choices, operands.device, **x.choice, digest=digest)
    best = Config(**{name: launch.choice[name] for name in choices[0]})
    tails = 3 * wg.element_size() * (best.tail * n + best.tail_by_unit * len(x.whole))
    choice = {**launch.choice, "tails_bytes": tails}
    return replace(launch, choice=choice, lost=lambda: best.count_lost(active()))


@cache
def loaded() -> str:
    """Register the authors' operators, and return the digest of their library."""
    file = _builds.built_by_authors(LIBRARY, MARKER, LOADER, VARIABLE)
    try:
        torch.ops.load_library(str(file))
    except OSError as error:
        expected, reason = f"a library for torch {torch.__version__}", str(error).splitlines()[0]
        raise Unsupported(f"expected {expected}, found {reason}") from error
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if reason := unsupported_type(problem, device):
        return reason
    m, n, k = multiple_of(TILE, problem["m"]), problem["n"], problem["k"]
    if k % DEPTH or n % TILE or n > MOST_UNITS or m > MOST_TOKENS:
        expected = f"k a multiple of {DEPTH}, n of {TILE} and at most {MOST_UNITS}"
        sizes = f"m {m}, n {n} and k {k}"
        return f"expected {expected}, and m of at most {MOST_TOKENS}; found {sizes}"
    return _builds.not_built(LIBRARY, MARKER, LOADER, VARIABLE)


KERNEL = Kernel("ffn_step", "twell", "cuda", prepare, unsupported)

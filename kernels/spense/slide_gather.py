"""Linear layer with 6:8 or other slide weights in two launches: lift X, then multiply by 2:4.

    X [m, k]   ── _common/lift.py ──>   X' [m, k']   ── spense_wgmma ──>   Y = X' W'.T

X' goes through memory: for 6:8 one launch writes 1.5 times the bytes of X, and the other reads
them. Both launches are timed. slide_wgmma.py lifts X on chip instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.slide import Slide
from sparsebench.kernels._common.cuda import BoundKernel, compile_ahead
from sparsebench.kernels._common.lift import lifting
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import _operands, spense_wgmma
from sparsebench.kernels.spense.spense_wgmma import DTYPES, Config, constants_of


@dataclass(frozen=True)
class TwoLaunches:
    """The launch that lifts X, and the product of its result."""

    lift: Callable[[], object]
    product: BoundKernel

    def __call__(self) -> Tensor:
        self.lift()
        return self.product()

    @property
    def out(self) -> Tensor:
        """Return Y, which each call computes in the same buffer."""
        return self.product.out

    @property
    def code(self) -> str:
        return self.product.code


def launch(x: Tensor, w: Slide, config: Config, *, watchdog: bool = False) -> TwoLaunches:
    """Return the two launches, bound to these operands. Raises Unsupported."""
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    lift = lifting(x, w)
    return TwoLaunches(lift, spense_wgmma.launch(lift.out, w.lifted, config, watchdog=watchdog))


def unsupported_operands(x: Tensor, w: Slide) -> str | None:
    limits = {"most_tokens": spense_wgmma.TOKENS[-1], "most_columns": 2**20, "y_step": 8}
    tiles_of_x = replace(w.lifted, shape=w.shape)  # X has k columns, not k'
    return _operands.unsupported(x, tiles_of_x, DTYPES, **limits)


def slide_of(operands: Operands) -> Slide:
    weight = operands.weights["w"]
    assert isinstance(weight, Slide)
    return weight


def sizes_of(x: Tensor, w: Slide, dtype: str) -> Sizes:
    return Sizes(len(x), *w.shape, dtype, None, w.nonzeros / w.group)


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    w, x = slide_of(operands), operands.activations["x"]
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    tried = spense_wgmma.searched(len(x), w.lifted.shape, x.itemsize, x.device)
    tried = list(dict.fromkeys([*tried, *spense_wgmma.space()])) if tuned == "wide" else tried
    sizes = sizes_of(x, w, operands.problem["dtype"])
    configs, by = choose("slide_gather", Config, operands, sizes, tuned, tried)
    compile_ahead("spense_wgmma", [constants_of(config, w.dtype) for config in configs])
    lift = lifting(x, w)
    products = (spense_wgmma.launch(lift.out, w.lifted, config) for config in configs)
    candidates = [TwoLaunches(lift, product) for product in products]
    return fastest_launch(configs, candidates, by, x.device)


KERNEL = Kernel("linear", "slide", "cuda", prepare, spense_wgmma.unsupported, tunes=True)

"""Linear layer with 6:8 weights in one launch on Hopper: spense_wgmma.cu, which lifts X on chip.

    X, two boxes of 128 bytes a token    TMA ──> shared memory ─┬──────────────────> wgmma.sp
                                                                └─ idle warps ─> the middle four of
                                                                   each group: a third box ─^

TMA cannot lift X. It copies pieces of 16 bytes. A piece holds one group (16 bits) or two (8 bits),
and a window starts 4 or 2 bytes inside of it. A box may start anywhere, but then half of its
windows straddle two groups. They would be of no use: a, b and c to f of a group may have six
elements, and so may g, h and c to f, so each group needs three separate windows. A descriptor of
wgmma has the same granularity of 16 bytes.

So two of the three windows of a group cost nothing, because they are X itself. The third is copied
within shared memory, and no byte of X is read twice from memory or from L2. For 256 tokens, three
boxes take 512 clocks of shared memory for these reads and 256 for the writes, beside 2700 for the
products (spense_wgmma.cu).

CTAs have one or two warpgroups that multiply, because three leave no warp idle.
"""

from dataclasses import replace

from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.slide import Slide
from sparsebench.kernels._common.cuda import BoundKernel, compile_ahead
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import _operands, spense_wgmma
from sparsebench.kernels.spense.spense_wgmma import DTYPES, Config, constants_of

KEPT, GROUP = 6, 8


def launch(x: Tensor, w: Slide, config: Config, *, watchdog: bool = False) -> BoundKernel:
    """Return the kernel, bound to these operands, that computes Y [m, n]. Raises Unsupported."""
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    plan = spense_wgmma.plan(w.lifted, len(x), config, watchdog=watchdog, lifted_from=w.shape[1])
    return spense_wgmma.bind(plan, x, w.lifted)


def unsupported_operands(x: Tensor, w: Slide) -> str | None:
    if (w.nonzeros, w.group) != (KEPT, GROUP):
        return f"expected {KEPT} of {GROUP} elements, found {w.nonzeros} of {w.group}"
    limits = {"most_tokens": spense_wgmma.TOKENS[-1], "most_columns": 2**20, "y_step": 8}
    tiles_of_x = replace(w.lifted, shape=w.shape)  # X has k columns, not k'
    return _operands.unsupported(x, tiles_of_x, DTYPES, **limits)


def searched(x: Tensor, w: Slide) -> list[Config]:
    """Return the configurations of a short search, the likeliest first."""
    every = spense_wgmma.searched(len(x), w.lifted.shape, x.itemsize, x.device, 8)
    high = spense_wgmma.POWERS[-1], *range(16, 129, 16)  # 144 to 240 tokens are not lifted faster
    return [config for config in every if config.warpgroups < 3 and config.tokens in high]


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Slide)
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    tried = searched(x, w)
    tried = list(dict.fromkeys([*tried, *spense_wgmma.space()])) if tuned == "wide" else tried
    sizes = Sizes(len(x), *w.shape, operands.problem["dtype"], None, KEPT / GROUP)
    configs, by = choose("slide_wgmma", Config, operands, sizes, tuned, tried)
    constants = [constants_of(config, w.dtype, windows=True) for config in configs]
    compile_ahead("spense_wgmma", constants)
    return fastest_launch(configs, [launch(x, w, config) for config in configs], by, x.device)


KERNEL = Kernel("linear", "slide", "cuda", prepare, spense_wgmma.unsupported, tunes=True)

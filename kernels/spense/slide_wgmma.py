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

from sparsebench.errors import Unsupported
from sparsebench.formats.slide import Slide
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, OperatorCall
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense._call import LIFTED, SpenseCall, bound
from sparsebench.kernels.spense.spense_wgmma import Config

CLUSTERS = 8  # that are likely, of which those of three warpgroups are left out
TOKENS = *range(16, 129, 16), 256  # 144 to 240 tokens are not lifted faster


def choices(w: Spense, call: SpenseCall) -> list[Config]:
    """Return the likely configurations of spense_wgmma that can lift X."""
    every = spense_wgmma.choices(w, call, CLUSTERS)
    return [config for config in every if config.warpgroups < 3 and config.tokens in TOKENS]


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands. Raises Unsupported."""
    w = operands.weights["w"]
    if not isinstance(w, Slide):
        raise Unsupported(f"expected a weight in slide, found {type(w).__name__}")
    if (w.nonzeros, w.group) != LIFTED:
        expected = f"expected {LIFTED[0]} of {LIFTED[1]} elements"
        raise Unsupported(f"{expected}, found {w.nonzeros} of {w.group}")
    return bound(w.lifted, operands.activations["x"], engines, lifted_from=w.shape[1])


KERNEL = gpu_engine(
    *("slide_wgmma", "linear", "slide", Config, choices, spense_wgmma.plan),
    *(spense_wgmma.unsupported, bind, spense_wgmma.unsupported_call),
)

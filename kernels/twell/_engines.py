"""All engines of a gated layer with few active units, the likeliest first.

ffn_few          one launch, up to 64 tokens
ffn_sparse       groups of up to eight tokens, after a gate by torch
ffn_twell        the same, after a gate as TwELL words
ffn_step_sparse  the forward pass of training, in Triton; also for GPUs before Hopper
dense            three products in torch, gate and up side by side, and a kernel for act(G) * U.
                 If many units are active, only ffn_few comes before it
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.elementwise import gated
from sparsebench.kernels._common.operator import Engine, NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels._common.triton import unsupported
from sparsebench.kernels.twell._call import NAMES, TwellCall, twell_engine
from sparsebench.kernels.twell._grouped import WHOLE, WORDS
from sparsebench.kernels.twell.ffn_few import KERNEL as FEW
from sparsebench.kernels.twell.ffn_step_sparse import FORWARD


def _in_torch(device: torch.device, call: TwellCall, config: NoConfig) -> Product:
    """Plan dense products."""

    def run(x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, out: Tensor | None = None) -> Tensor:
        on_tape(complete=False)
        products = x.new_empty(len(x), 2 * call.n)
        torch.mm(x, wg.t(), out=products[:, : call.n])
        torch.mm(x, wu.t(), out=products[:, call.n :])
        return torch.mm(gated(products, call.activation), wd_t, out=out)

    return Product(run)


DENSE = twell_engine("dense", lambda call: [NoConfig()], _in_torch, unsupported)
ENGINES = FEW, WHOLE, WORDS, FORWARD, DENSE
SPARSE_UP_TO = 0.02  # share of active units with which 256 tokens take as long as dense (NOTES.md)


def likeliest(active: int, call: TwellCall) -> Sequence[Engine]:
    """Return all engines for a layer with so many active units per token. Raises Unsupported."""
    if call.dtype not in NAMES:
        raise Unsupported(f"expected {', '.join(NAMES.values())} on a GPU, found {call.dtype}")
    many = active > SPARSE_UP_TO * call.n
    return (FEW, DENSE, WHOLE, WORDS, FORWARD) if many else ENGINES

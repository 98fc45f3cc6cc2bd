"""The gated layer of a mixture with 2:4 hybrid experts on Hopper, in five launches.

    route     ids ─> the rows of each expert              _common/routing.py
    gather    X ─> the rows, sorted by expert
    gate, up  H = act(X_e @ Wg_e.T) * (X_e @ Wu_e.T)      experts_wgmma, an expert's 8 rows of gate
                                                          and 8 of up in turn (spense_ffn.py)
    down      H @ Wd_e.T                                  experts_wgmma
    combine   the sum of a token's rows times its shares

    experts_ffn_dense   the same with dense tiles

G and U never leave registers. Rows are gathered by a launch of their own, because TMA gathers no
rows before compute capability 10.0: it writes and reads m top_k k elements, 3 % of the bytes of
Qwen3-30B-A3B at 1,024 tokens.
"""

from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.operator import Earlier
from sparsebench.kernels._common.routing import combine, route
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import experts_wgmma
from sparsebench.kernels.spense._call import weight_of
from sparsebench.kernels.spense.spense_ffn import TURN, interleaved

PRODUCT = experts_wgmma.KERNEL


def joined(gate: Spense, up: Spense) -> Spense:
    """Return gate and up of all experts [experts n, k] as one matrix, 8 rows of each in turn."""
    parts = [(w.shape, w.sparse_shape, w.dtype) for w in (gate, up)]
    (rows, k), (sparse_rows, columns), _ = parts[0]
    if parts[0] != parts[1] or sparse_rows not in (0, rows):
        sizes = " and ".join(
            f"{list(sparse)} sparse of {list(whole)}" for whole, sparse, _ in parts
        )
        raise Unsupported(f"expected gate and up split at the same column, found {sizes}")
    if rows % TURN:
        raise Unsupported(f"expected a multiple of {TURN} hidden units, found {rows}")
    both = interleaved(gate.to_dense(), up.to_dense())
    fraction = 1 - columns / k if sparse_rows else 1.0
    return Spense.from_dense(both, dense_fraction=fraction, split="columns")


def prepare(operands: Operands) -> Launch:
    """Plan both products, each with a search of its own. Raises Unsupported."""
    wg, wu, wd = (weight_of(operands.weights, name) for name in ("wg", "wu", "wd"))
    return launch_of(joined(wg, wu), wd, operands)


def launch_of(both: Spense, wd: Spense, operands: Operands) -> Launch:
    """Return the launch of a layer, whose gate and up are joined."""
    problem, earlier = operands.problem, Earlier(operands.pinned, operands.timed)
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    experts, engines = problem["experts"], (PRODUCT,)
    rows = route(ids, experts)
    gathered = x.index_select(0, rows.source)
    activation = problem["activation"]
    first = experts_wgmma.bound(both, gathered, rows.ends, experts, engines, activation=activation)
    gate_up = first.select(earlier.part("gate_up"))
    h = gate_up.product.run(gathered, rows.ends, both.sparse, both.dense)
    down = experts_wgmma.bound(wd, h, rows.ends, experts, engines).select(earlier.part("down"))

    def run() -> Tensor:
        rows = route(ids, experts)
        gathered = x.index_select(0, rows.source)
        h = gate_up.product.run(gathered, rows.ends, both.sparse, both.dense)
        return combine(down.product.run(h, rows.ends, wd.sparse, wd.dense), rows.place, shares)

    plans = {"gate_up": gate_up, "down": down}
    choice = {name: plan.row for name, plan in plans.items()}
    lines = [{"of": name, **line} for name, plan in plans.items() for line in plan.lines]
    return Launch(run, choice, gate_up.product.code, lines)


KERNEL = Kernel("experts_ffn", "spense", "cuda", prepare, experts_wgmma.unsupported)

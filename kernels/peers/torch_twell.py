"""Gated feed-forward layer with few active units on a CPU, in torch's operations.

    G = act(X @ Wg.T)                      dense, then stored as TwELL, an entry an active unit
    h[e] = G[e] * (X[token] . Wu[unit])    for the entries e alone
    Y[token] += h[e] * Wd[:, unit]

Only the first product is dense: with few active units the layer takes about a third of the time.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from sparsebench.formats.twell import Twell
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    """Transpose Wd once, so that the weights of a unit are contiguous."""
    wg, wu, wd = (operands.weights[name].to_dense() for name in ("wg", "wu", "wd"))
    x, units = operands.activations["x"], wd.T.contiguous()
    squared = operands.problem["activation"] == "relu2"

    def run() -> Tensor:
        gate = relu(linear(x, wg))
        tokens, columns, values = _entries(Twell.from_dense(gate**2 if squared else gate))
        hidden = values * (x[tokens] * wu[columns]).sum(-1)
        return x.new_zeros(x.shape).index_add_(0, tokens, hidden[:, None] * units[columns])

    return Launch(run)


def _entries(gate: Twell) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, unit and value of every entry, those of the spill last."""
    used = torch.arange(gate.capacity) < gate.counts[..., None]
    spilled = torch.arange(len(gate.spill_offsets) - 1).repeat_interleave(
        gate.spill_offsets.diff().long()
    )
    tokens = torch.cat((used.nonzero()[:, 0], spilled))
    columns = torch.cat((gate.columns[used], gate.spill_columns)).long() & 0xFFFF
    return tokens, columns, torch.cat((gate.values[used], gate.spill_values))


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] != "fp32":
        return f"expected fp32, found {problem['dtype']}"
    activation = problem["activation"]
    return None if activation != "silu" else "expected relu or relu2, found silu"


KERNEL = Kernel("ffn", "twell", "cpu", prepare, unsupported)

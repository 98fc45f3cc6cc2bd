"""Operands of layers with few active units, and what their results must be."""

import torch
from torch import Tensor

from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.kernels.twell._call import TwellCall

Operands = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""X, gate, up and Wd transposed."""


def drawn(call: TwellCall, fraction: float, device: str = "cpu") -> Operands:
    """Return operands of which a fraction of the units is active, and sums of about 1.

    All units are active for token 1, and none for token 2. Memory beside X is NaN.
    """
    m, n, k = call[:3]
    torch.manual_seed(m)
    x, gate, up, wd_t = (torch.randn(size, k, device=device) for size in (m, n, n, n))
    gate, up, wd_t = gate * k**-0.5, up * k**-0.5, wd_t * n**-0.5
    bias = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(fraction)).clamp(-6, 6)
    x[:, 0], gate[:, 0] = 1, float(bias)
    x[:, 1], gate[:, 1] = 0, 1
    x[1:2, 1], x[2:3, 1] = 30, -200
    rows = torch.full((m + 16, k), torch.nan, device=device, dtype=call.dtype)
    rows[:m] = x
    gate, up, wd_t = (w.to(call.dtype) for w in (gate, up, wd_t))
    return rows[:m], gate, up if call.gated else None, wd_t


def assert_right(
    y: Tensor, operands: Operands, squared: bool, tokens: Tensor | slice = slice(None)
) -> None:
    """Compare these tokens of Y with the definition in fp64, whose gates are rounded as Y."""
    x, gate, up, wd_t = operands
    x, gate, wd_t = x.double(), gate.double(), wd_t.double()
    g = (x @ gate.T).to(y.dtype).double().relu()
    h = (g.square() if squared else g) * (1 if up is None else x @ up.double().T)
    right, spread = h @ wd_t, (h.square() @ wd_t.square()).sqrt()
    # Gates and H are rounded; in fp16, H may be below the smallest number, 6e-8.
    # In fp32 the sums of G and U differ as much as roundings do: 2.4 times this on an H200.
    factor = 6 if y.dtype == torch.float32 else 2
    spread = factor * spread + (1e-3 if y.dtype == torch.float16 else 1e-30)
    expected = Expected(right[tokens], spread[tokens], y.dtype, max(wd_t.shape))
    reason = check(y[tokens], expected).reason
    assert reason is None, reason

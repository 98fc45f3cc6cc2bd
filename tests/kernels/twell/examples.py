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
    x, gate, wd_t = (t.double() for t in (operands[0], operands[1], operands[3]))
    up = torch.zeros_like(gate) if operands[2] is None else operands[2].double()
    a, u = x @ gate.T, x @ up.T + (operands[2] is None)
    g = a.to(y.dtype).double().relu()
    slope, act = (2 * g, g.square()) if squared else (1, g)
    h = act * u
    # G and U are sums in fp32, so a gate near 0 has a large relative error, and may change sign.
    # Tensor cores add 16 products of 16 bits at a time, and truncate each sum.
    steps = 1 if y.dtype == torch.float32 else max(x.shape[1] // 16, 1)
    fp32 = torch.finfo(torch.float32).eps * steps**0.5
    size_a, size_u = ((x.square() @ w.square().T).sqrt() for w in (gate, up))
    sums = slope * size_a * (a > -8 * fp32 * size_a) * u.abs() + act * size_u
    errors = h.abs() + fp32 / torch.finfo(y.dtype).eps * sums
    right, spread = h @ wd_t, (errors.square() @ wd_t.square()).sqrt()
    # Gates and H are rounded; in fp16, H may be below the smallest number, 6e-8.
    factor = 6 if y.dtype == torch.float32 else 2
    spread = factor * spread + (1e-3 if y.dtype == torch.float16 else 1e-30)
    sizes = right[tokens], spread[tokens], y.dtype, max(wd_t.shape)
    expected = Expected(*sizes, rounded=True)
    reason = check(y[tokens], expected).reason
    assert reason is None, reason

"""Dense attention by torch's scaled_dot_product_attention, with its backend forced.

The operators of the backend are called directly, so no call chooses a backend, and a backward pass
starts from the O and LSE in its operands. torch writes dQ, dK and dV into three tensors; a
copy puts them one below the other, which takes 1 % of the time at 16k tokens and 2 % at 4k.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.results.record import Problem

ALIGNMENT = 8  # elements: a head dimension that is not a multiple is padded by torch, in a copy

Forward = Callable[[Tensor, Tensor, Tensor, bool, float | None], Any]
Backward = Callable[[tuple[Tensor, ...], Any, bool, float | None], tuple[Tensor, ...]]


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why torch's fused backends cannot run the problem, or None."""
    if problem["dtype"] not in ("fp16", "bf16"):
        return f"expected fp16 or bf16, found {problem['dtype']}"
    if problem["head_dim"] % ALIGNMENT:
        return f"head_dim: expected a multiple of {ALIGNMENT}, found {problem['head_dim']}"
    if problem["causal"] and problem["m"] not in (1, problem["context"] or problem["m"]):
        return "aligns a causal mask to the first key, not to the last, if m is not context"
    return None


def forward(operands: Operands, attend: Forward) -> Launch:
    """Return the launch of O [batch * m, H * D]. Raises Unsupported."""
    problem, (q, k, v) = operands.problem, by_head(operands, "q", "k", "v")
    causal, scale = problem["causal"] and problem["m"] > 1, problem["scale"]
    tokens = problem["batch"] * problem["m"]

    def run() -> Tensor:
        o: Tensor = attend(q, k, v, causal, scale)[0]
        return o.transpose(1, 2).reshape(tokens, -1)

    _require_running(run)
    return Launch(run)


def backward(operands: Operands, attend: Forward, gradients: Backward) -> Launch:
    """Return the launch of dQ, dK and dV, rows of D below each other. Raises Unsupported."""
    problem, (q, k, v, o, do) = operands.problem, by_head(operands, "q", "k", "v", "o", "do")
    causal, scale = problem["causal"] and problem["m"] > 1, problem["scale"]
    results: Any = None

    def first() -> Tensor:
        nonlocal results
        results = attend(q, k, v, causal, scale)
        return q

    _require_running(first)
    lse = operands.activations["lse"].view(results[1].shape)
    tensors = (do, q, k, v, o, lse)

    def run() -> Tensor:
        parts = gradients(tensors, results, causal, scale)
        return torch.cat([x.transpose(1, 2).reshape(-1, x.shape[-1]) for x in parts])

    _require_running(run)
    return Launch(run)


def by_head(operands: Operands, *names: str) -> list[Tensor]:
    """Return views [batch, heads, tokens, D] of token-major activations."""
    problem = operands.problem
    return [
        operands.activations[name]
        .view(
            problem["batch"],
            -1,
            problem["kv_heads" if name in "kv" else "heads"],
            problem["head_dim"],
        )
        .transpose(1, 2)
        for name in names
    ]


def _require_running(call: Callable[[], Tensor]) -> None:
    """Call the launch once, so that the backend plans it. Raises Unsupported."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unsupported(str(error).splitlines()[0]) from error

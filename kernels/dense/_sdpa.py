"""Dense attention by torch's scaled_dot_product_attention, with its backend forced.

The operators of the backend are called directly, so no call chooses a backend, and a backward pass
starts from the O and LSE in its operands. torch writes dQ, dK and dV into three tensors; a
copy puts them one below the other, which takes 1 % of the time at 16k tokens and 2 % at 4k.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem

ALIGNMENT = 8  # elements: a head dimension that is not a multiple is padded by torch, in a copy

Forward = Callable[[Tensor, Tensor, Tensor, bool, float | None], Any]
Backward = Callable[[tuple[Tensor, ...], Any, bool, float | None], tuple[Tensor, ...]]


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] not in ("fp16", "bf16"):
        return f"expected fp16 or bf16, found {problem['dtype']}"
    if problem["head_dim"] % ALIGNMENT:
        return f"head_dim: expected a multiple of {ALIGNMENT}, found {problem['head_dim']}"
    if problem["causal"] and problem["m"] not in (1, problem["context"] or problem["m"]):
        expected = "m 1 or equal to context, because torch aligns the mask to the first key"
        return f"causal: expected {expected}, found {problem['m']} and {problem['context']}"
    return None


def forward_kernel(attend: Forward) -> Kernel:
    """Return the kernel of `attention` by a backend's forward pass."""
    return Kernel("attention", "dense", "cuda", partial(forward, attend), unsupported)


def backward_kernel(attend: Forward, gradients: Backward) -> Kernel:
    """Return the kernel of `attention_backward` by both passes of a backend."""
    prepare = partial(backward, attend, gradients)
    return Kernel("attention_backward", "dense", "cuda", prepare, unsupported)


def forward(attend: Forward, operands: Operands) -> Launch:
    """Return the launch of O [batch * m, H * D]. Raises Unsupported."""
    problem, (q, k, v) = operands.problem, by_head(operands, "q", "k", "v")
    causal, scale = problem["causal"] and problem["m"] > 1, problem["scale"]
    tokens = problem["batch"] * problem["m"]

    def run() -> Tensor:
        o: Tensor = attend(q, k, v, causal, scale)[0]
        return o.transpose(1, 2).reshape(tokens, -1)

    _result_of(run)
    return Launch(run)


def backward(attend: Forward, gradients: Backward, operands: Operands) -> Launch:
    """Return the launch of dQ, dK and dV, rows of D below each other. Raises Unsupported."""
    # The mask determines which queries have no key, so this is the same in every draw.
    if bool((operands.activations["lse"] == -torch.inf).any()):
        raise Unsupported("expected a key for every query, found queries without one (lse = -inf)")
    problem, (q, k, v, o, do) = operands.problem, by_head(operands, "q", "k", "v", "o", "do")
    causal, scale = problem["causal"] and problem["m"] > 1, problem["scale"]
    results = _result_of(partial(attend, q, k, v, causal, scale))
    lse = operands.activations["lse"].view(results[1].shape)
    tensors = (do, q, k, v, o, lse)

    def run() -> Tensor:
        parts = gradients(tensors, results, causal, scale)
        return torch.cat([x.transpose(1, 2).reshape(-1, x.shape[-1]) for x in parts])

    _result_of(run)
    return Launch(run)


def by_token(operands: Operands, *names: str) -> list[Tensor]:
    """Return views [batch, tokens, heads, D] of token-major activations."""
    width, batch = operands.problem["head_dim"], operands.problem["batch"]
    return [
        operands.activations[name].unflatten(1, (-1, width)).unflatten(0, (batch, -1))
        for name in names
    ]


def by_head(operands: Operands, *names: str) -> list[Tensor]:
    """Return views [batch, heads, tokens, D] of token-major activations."""
    return [x.transpose(1, 2) for x in by_token(operands, *names)]


def _result_of(call: Callable[[], Any]) -> Any:
    """Return the result of a first call, in which the backend plans. Raises Unsupported."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unsupported(str(error).splitlines()[0]) from error

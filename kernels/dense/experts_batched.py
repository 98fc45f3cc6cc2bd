"""Products of routed rows with dense experts by a batched product, which copies W_e for each row.

    Y[s, n] = W[e(s), n, k] @ X[s, k]      e(s) is the first expert whose end is beyond row s

The `batched_mm` experts of transformers do this in decoding, because it takes few launches. With
one token an expert has one row at most, and the copies have the bytes that any kernel reads. With
more tokens, they have rows / experts times the bytes of W.
"""

import torch
from torch import Tensor

from sparsebench.kernels._kernel import DTYPES, Kernel, Launch, Operands
from sparsebench.results.record import Problem

MOST_BYTES = 4 << 30  # of the copies


def unsupported(problem: Problem, device: torch.device, matrices: int = 1) -> str | None:
    """Return why the copies of n x k `matrices` of each row cannot be made, or None."""
    if problem["dtype"] == "fp8":
        return "expected fp16, bf16 or fp32, found fp8"
    rows, size = problem["m"] * problem["top_k"], DTYPES[problem["dtype"]].itemsize
    copies = rows * matrices * problem["n"] * problem["k"] * size
    return (
        None if copies <= MOST_BYTES else f"expected copies of 4 GiB at most, found {copies} bytes"
    )


def prepare(operands: Operands) -> Launch:
    """Return the launch, which finds the expert of each row on the device."""
    x, ends = operands.activations["x"], operands.activations["ends"][0]
    w = operands.weights["w"].to_dense().view(operands.problem["experts"], -1, x.shape[1])
    numbers = torch.arange(len(x), dtype=torch.int32, device=x.device)

    def run() -> Tensor:
        expert = torch.searchsorted(ends, numbers, right=True)
        return torch.bmm(w[expert], x[:, :, None])[:, :, 0]

    return Launch(run)


KERNEL = Kernel("experts", "dense", "any", prepare, unsupported)

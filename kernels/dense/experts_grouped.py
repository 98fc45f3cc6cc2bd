"""Products of routed rows with dense experts by torch: one grouped product on the device.

    16 bits  torch._grouped_mm(X, W [experts, k, n], offs=ends)
    fp8      torch._scaled_grouped_mm, whose scales, one for each row of X and of W, are 1

The first is what the experts of transformers call (`grouped_mm`). On Hopper it is a kernel of
CUTLASS after a small one that writes addresses. It multiplies tiles of 64 or 128 rows of X,
whichever suits the mean of an expert's rows (GroupMM.cu). It does not write rows after the last
end, of which a suite has none.
"""

import torch
from torch import Tensor

from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem

ALIGNED = 16  # bytes of strides


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why torch's grouped product cannot run a problem, or None."""
    if problem["dtype"] not in ("bf16", "fp8"):  # others run a loop with a copy to the host
        return f"expected bf16 or fp8, found {problem['dtype']}"
    size = 1 if problem["dtype"] == "fp8" else 2
    if problem["k"] * size % ALIGNED or problem["n"] * size % ALIGNED:
        sizes = f"n {problem['n']} and k {problem['k']}"
        return f"expected rows of multiples of {ALIGNED} bytes, found {sizes}"
    return None


def prepare(operands: Operands) -> Launch:
    """Return the launch; the weight stays as it is stored."""
    problem, w = operands.problem, operands.weights["w"].to_dense()
    x, ends = operands.activations["x"], operands.activations["ends"][0]
    of_experts = w.view(problem["experts"], -1, w.shape[1]).transpose(1, 2)
    if problem["dtype"] == "fp8":
        rows = x.new_ones(len(x), dtype=torch.float32)
        columns = rows.new_ones(problem["experts"], problem["n"])

        def scaled() -> Tensor:
            y: Tensor = torch._scaled_grouped_mm(
                *(x, of_experts, rows, columns), offs=ends, out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )  # fmt: skip
            return y

        return Launch(scaled)

    def grouped() -> Tensor:
        y: Tensor = torch._grouped_mm(x, of_experts, offs=ends)
        return y

    return Launch(grouped)


KERNEL = Kernel("experts", "dense", "cuda", prepare, unsupported)

"""Keeps its sums in bf16 between tiles of 128 along k."""

import torch
from torch import Tensor

from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands

TILE = 128


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense().float(), operands.activations["x"]
    dtype = OUTPUTS[operands.problem["dtype"]]

    def run() -> Tensor:
        total = torch.zeros(len(x), len(w), dtype=torch.bfloat16, device=x.device)
        for x_tile, w_tile in zip(x.float().split(TILE, 1), w.split(TILE, 1), strict=True):
            total = (total.float() + x_tile @ w_tile.T).bfloat16()
        return total.to(dtype)

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)

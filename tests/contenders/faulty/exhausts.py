"""Asks for more memory than there is."""

import torch

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    if operands.device.type == "cpu":
        raise MemoryError("asked for 4 EiB")
    return Launch(lambda: torch.empty(1 << 50, dtype=torch.uint8, device=operands.device))


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)

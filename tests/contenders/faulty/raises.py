"""Raises while it prepares."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    raise RuntimeError("no such instruction <b>here</b>\nsecond line")


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)

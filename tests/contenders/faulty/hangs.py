"""Never returns."""

import time

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    return Launch(lambda: time.sleep(3600))


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)

"""Reads address 0, and says a last word."""

import ctypes
import sys

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    def run() -> object:
        sys.stderr.write("about to read address 0\n")
        sys.stderr.flush()
        return ctypes.string_at(0)

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)

"""Rounds its sum to 16 bits after every 16 tokens."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern

    def run() -> object:
        total = (dy.t() @ x).bfloat16().zero_()
        for start in range(0, len(x), 16):
            total += (dy[start : start + 16].t() @ x[start : start + 16]).bfloat16()
        return w.sample(total.to(x.dtype))

    return Launch(run)


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)

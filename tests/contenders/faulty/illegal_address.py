"""Writes to an address that is not the GPU's: a real CUDA error, which ends the context."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands

SOURCE = 'extern "C" __global__ void f(float* p) { p[1ull << 40] = 1; }'


def prepare(operands: Operands) -> Launch:
    import cupy

    kernel = cupy.RawKernel(SOURCE, "f")
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]

    def run() -> object:
        kernel((1,), (1,), (x.data_ptr(),))
        return x @ w.T

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="dense", device="cuda", prepare=prepare)

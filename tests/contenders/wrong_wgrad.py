"""Weight gradients that are wrong, each in one way; the check must reject every one."""

from dataclasses import replace

from declare import Run, kernel, prepare_wgrad, run_wgrad
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Launch, Operands


@prepare_wgrad
def another_pattern(dy: Tensor, x: Tensor, w: Bsr) -> Run:
    """Sample the right product where the weight has no block."""
    columns = w.columns.flip(0)
    return lambda: replace(w, columns=columns).sample(dy.t() @ x)


@run_wgrad
def low_precision(dy: Tensor, x: Tensor, w: Bsr) -> object:
    """Round the sum to 16 bits after every 16 tokens."""
    total = (dy.t() @ x).bfloat16().zero_()
    for start in range(0, len(x), 16):
        total += (dy[start : start + 16].t() @ x[start : start + 16]).bfloat16()
    return w.sample(total.to(x.dtype))


@prepare_wgrad
def masked_elements(dy: Tensor, x: Tensor, w: Bsr) -> Run:
    """Keep the gradient of non-zeros only, although a block is stored whole."""
    mask = w.values != 0
    mask[:, 0] = False

    def run() -> object:
        gradient = w.sample(dy.t() @ x)
        gradient.values.mul_(mask)
        return gradient

    return run


@run_wgrad
def one_element(dy: Tensor, x: Tensor, w: Bsr) -> object:
    """Miss one element, the largest."""
    gradient = w.sample(dy.t() @ x)
    gradient.values.view(-1)[gradient.values.abs().argmax()] = 0
    return gradient


@prepare_wgrad
def precomputed(dy: Tensor, x: Tensor, w: Bsr) -> Run:
    """Multiply in `prepare`, and only copy in the launch."""
    gradient = w.sample(dy.t() @ x)
    return lambda: replace(gradient, values=gradient.values.clone())


@kernel(op="linear_wgrad", consumes="bsr")
def the_weight(operands: Operands) -> Launch:
    """Return the weight itself."""
    return Launch(lambda: operands.pattern)


@run_wgrad
def transposed(dy: Tensor, x: Tensor, w: Bsr) -> object:
    """Transpose every block, which is right for symmetric products only."""
    gradient = w.sample(dy.t() @ x)
    return replace(gradient, values=gradient.values.transpose(1, 2).contiguous())


@prepare_wgrad
def writes_nothing(dy: Tensor, x: Tensor, w: Bsr) -> Run:
    """Return a gradient that no call writes."""
    gradient = w.sample(dy.t() @ x)
    return lambda: gradient

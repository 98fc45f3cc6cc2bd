"""Weight gradients that are wrong, each in one way; the check must reject every one."""

from dataclasses import replace

from declare import gradient_operands, kernel

from sparsebench.kernels._kernel import Launch, Operands


@kernel(op="linear_wgrad", consumes="bsr")
def another_pattern(operands: Operands) -> Launch:
    """Sample the right product where the weight has no block."""
    dy, x, w = gradient_operands(operands)
    columns = w.columns.flip(0)
    return Launch(lambda: replace(w, columns=columns).sample(dy.t() @ x))


@kernel(op="linear_wgrad", consumes="bsr")
def dense(operands: Operands) -> Launch:
    """Return the whole product as a dense tensor, which the caller would have to gather."""
    dy, x, _ = gradient_operands(operands)
    return Launch(lambda: dy.t() @ x)


@kernel(op="linear_wgrad", consumes="bsr")
def low_precision(operands: Operands) -> Launch:
    """Round the sum to 16 bits after every 16 tokens."""
    dy, x, w = gradient_operands(operands)

    def run() -> object:
        total = (dy.t() @ x).bfloat16().zero_()
        for start in range(0, len(x), 16):
            total += (dy[start : start + 16].t() @ x[start : start + 16]).bfloat16()
        return w.sample(total.to(x.dtype))

    return Launch(run)


@kernel(op="linear_wgrad", consumes="bsr")
def masked_elements(operands: Operands) -> Launch:
    """Keep the gradient of non-zeros only, although a block is stored whole."""
    dy, x, w = gradient_operands(operands)

    mask = w.values != 0
    mask[:, 0] = False

    def run() -> object:
        gradient = w.sample(dy.t() @ x)
        gradient.values.mul_(mask)
        return gradient

    return Launch(run)


@kernel(op="linear_wgrad", consumes="bsr")
def one_element(operands: Operands) -> Launch:
    """Miss one element of one block."""
    dy, x, w = gradient_operands(operands)

    def run() -> object:
        gradient = w.sample(dy.t() @ x)
        gradient.values[0, 2, 1] = 0
        return gradient

    return Launch(run)


@kernel(op="linear_wgrad", consumes="bsr")
def precomputed(operands: Operands) -> Launch:
    """Multiply in `prepare`, and only copy in the launch."""
    dy, x, w = gradient_operands(operands)
    gradient = w.sample(dy.t() @ x)
    return Launch(lambda: replace(gradient, values=gradient.values.clone()))


@kernel(op="linear_wgrad", consumes="bsr")
def the_weight(operands: Operands) -> Launch:
    """Return the weight itself."""
    return Launch(lambda: operands.pattern)


@kernel(op="linear_wgrad", consumes="bsr")
def transposed(operands: Operands) -> Launch:
    """Transpose every block, which is right for symmetric products only."""
    dy, x, w = gradient_operands(operands)

    def run() -> object:
        gradient = w.sample(dy.t() @ x)
        return replace(gradient, values=gradient.values.transpose(1, 2).contiguous())

    return Launch(run)


@kernel(op="linear_wgrad", consumes="bsr")
def writes_nothing(operands: Operands) -> Launch:
    """Return a gradient that no call writes."""
    dy, x, w = gradient_operands(operands)
    gradient = w.sample(dy.t() @ x)
    return Launch(lambda: gradient)


@kernel(op="linear_wgrad", consumes="bsr")
def wrong_type(operands: Operands) -> Launch:
    """Return sums in fp64 instead of the problem's dtype."""
    dy, x, w = gradient_operands(operands)
    return Launch(lambda: w.sample(dy.double().t() @ x.double()))

"""Block-sparse products that a tape can hold (front.py), so that later calls need no Python.

Linear     Y or dX. If pack.cu needs transposed blocks, torch's copy of them is on the tape
Gradient   dW. Its partial sums are in the workspace that launches on a stream share
"""

from torch import Tensor

from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.cuda import TransposedCopy, on_tape
from sparsebench.kernels._common.scratch import workspace
from sparsebench.kernels.bsr import _launch, bsr_wgrad


class Linear(_launch.Product):
    """Y of X and W's blocks, or dX of dY and W's blocks (selection.Product)."""

    def __init__(self, plan: _launch.Plan) -> None:
        """Take the plan, and pack transposed blocks if it needs them."""
        super().__init__(plan)
        if plan.source is not None and plan.turned:
            self.pack = self._pack_transposed

    def _pack_transposed(self, values: Tensor) -> Tensor:
        """Return the transposed blocks in the order of the steps."""
        source = self.plan.source
        assert source is not None
        transposed = values.transpose(1, 2).contiguous()
        on_tape(transposed, copy=TransposedCopy(values, transposed))
        return _launch.packed(transposed, source)


class Gradient:
    """The values of dW, new, of dY and X (selection.Product).

    The caller checks the operands: at most `plan.tokens` tokens, in the plan's dtype, aligned.
    """

    pack = order = None

    def __init__(self, plan: bsr_wgrad.Plan) -> None:
        """Keep the plan."""
        self.plan, self.code = plan, plan.loaded.code

    def run(self, dy: Tensor, x: Tensor) -> Tensor:
        """Sum the blocks of dY.T @ X; a graph keeps the plan alive."""
        plan = self.plan
        values = x.new_empty(plan.blocks)
        rows, columns = plan.partials
        partials = workspace(x, rows * columns)
        sums = 0 if partials is None else partials.data_ptr()
        addresses = dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride()
        plan.loaded.enqueue(plan.arguments(x.shape[0], *addresses, values.data_ptr(), sums))
        on_tape(values, kept=(plan, partials))
        if is_capturing(x):
            keep(plan)
        return values

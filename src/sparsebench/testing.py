"""Test a plug-in: the contracts of formats, kernels, ops, patterns and figures.

    from sparsebench import testing

    def test_my_kernel():
        testing.check_kernel("diagonal_torch", "m=8 n=64 k=64 pattern=main_diagonal sparsity=0.98")

Or a test for each sentence of a contract:

    @pytest.mark.parametrize("check", testing.op_checks("linear_relu"), ids=str)
    def test_my_op(check):
        check()

A name is what a suite writes: that of an entry point, `package.module` or `package.module:NAME`.
The package must be installed, or on the path. Our own formats, ops and patterns are tested by the
same functions. A check raises AssertionError, which says what was expected and what was found;
pytest is not needed.
"""

from sparsebench.harness.testing.contract import Check
from sparsebench.harness.testing.figures import check_figure, figure_checks
from sparsebench.harness.testing.formats import check_format, format_checks
from sparsebench.harness.testing.kernels import check_kernel, kernel_checks
from sparsebench.harness.testing.ops import check_op, op_checks
from sparsebench.harness.testing.patterns import check_pattern, pattern_checks

__all__ = [
    "Check",
    "check_figure",
    "check_format",
    "check_kernel",
    "check_op",
    "check_pattern",
    "figure_checks",
    "format_checks",
    "kernel_checks",
    "op_checks",
    "pattern_checks",
]

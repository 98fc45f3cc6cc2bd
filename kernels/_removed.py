"""Kernels that were removed, and what to use instead.

Published bundles still name them. Their suites expand to the same cases with the same ids, and
`reproduce` reports each of these cases as unsupported with the reason. A suite that a user writes
is refused with one line (harness/plan/suite.py).
"""

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "bsr_gathered": "use bsr_triton, which runs on the same GPUs",
    "cublas_ffn": "use cublas, which searches the same products",
    "dense_triton": "use cublas, which was faster in every published cell",
}
"""The advice by kernel name: `kernel NAME was removed: ADVICE`."""


def removal(kernel: str) -> str | None:
    """Return one line that says the kernel was removed and what to use, or None."""
    return f"kernel {kernel} was removed: {REMOVED[kernel]}" if kernel in REMOVED else None

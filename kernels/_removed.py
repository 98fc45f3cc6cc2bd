"""Kernels that were removed, and what to use instead.

Published bundles still name them. Their suites expand to the same cases with the same ids, and
`reproduce` reports each of these cases as unsupported with the reason. A suite that a user writes
is refused with one line (harness/plan/suite.py).
"""

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "bsr_gathered": "0.3.0: use bsr_triton, which runs on the same GPUs",
    "cublas_ffn": "0.3.0: use cublas, which searches the same products",
    "cusparselt_slide": "0.4.0: use slide_wgmma for 6:8; cublas was as fast in every cell",
    "dense_triton": "0.3.0: use cublas, which was faster in every published cell",
    "slide_gather": "0.4.0: use slide_wgmma for 6:8; cublas was as fast in every cell",
}
"""Version and advice by kernel name: `kernel NAME was removed in VERSION: ADVICE`."""


def removal(kernel: str) -> str | None:
    """Return one line that says the kernel was removed and what to use, or None."""
    return f"kernel {kernel} was removed in {REMOVED[kernel]}" if kernel in REMOVED else None

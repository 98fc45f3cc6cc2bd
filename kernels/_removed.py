"""Kernels that were removed, and what to use instead.

Published bundles still name them. Their suites expand to the same cases with the same ids, and
`reproduce` reports each of these cases as unsupported with the reason. A suite that a user writes
is refused with one line (harness/plan/suite.py).
"""

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "bsr_ffn": "use format bsr without a kernel, which multiplies in the same two products",
    "bsr_gathered": "use bsr_triton, which runs on the same GPUs",
    "bsr_resident_dgrad": "use bsr_strips_dgrad or bsr_triton_dgrad",
    "cublas_ffn": "use cublas, which searches the same products",
    "decoder_bsr": "name no kernel: {format: bsr} runs what the layers choose",
    "decoder_spense": "name no kernel: {format: spense} runs what the layers choose",
    "dense_triton": "use cublas, which was faster in every published cell",
    "slide_gather": "use slide_wgmma for 6:8",
}
"""The advice by kernel name: `kernel NAME was removed: ADVICE`."""


def removal(kernel: str) -> str | None:
    """Return one line that says the kernel was removed and what to use, or None."""
    return f"kernel {kernel} was removed: {REMOVED[kernel]}" if kernel in REMOVED else None

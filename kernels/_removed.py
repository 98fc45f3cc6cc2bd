"""Kernels that left this package: what to use instead, or which distribution has them.

Published bundles still name them. Their suites expand to the same cases with the same ids, and
`reproduce` reports each of these cases as unsupported with the reason. A suite that a user writes
and that names a removed kernel is refused with one line (harness/plan/suite.py). A kernel of
sparsebench-authors that is not installed is an unsupported row there, too.
"""

from collections.abc import Mapping

from sparsebench._discovery import modules

REMOVED: Mapping[str, str] = {
    "bsr_ffn": "0.4.0: use format bsr without a kernel, which multiplies in the same two products",
    "bsr_gathered": "0.3.0: use bsr_triton, which runs on the same GPUs",
    "bsr_resident_dgrad": "0.4.0: use bsr_strips_dgrad or bsr_triton_dgrad",
    "cublas_ffn": "0.3.0: use cublas, which searches the same products",
    "cusparselt_slide": "0.4.0: use slide_wgmma for 6:8; cublas was as fast in every cell",
    "decoder_bsr": "0.4.0: name no kernel: {format: bsr} runs what the layers choose",
    "decoder_spense": "0.4.0: name no kernel: {format: spense} runs what the layers choose",
    "dense_triton": "0.3.0: use cublas, which was faster in every published cell",
    "slide_gather": "0.4.0: use slide_wgmma for 6:8; cublas was as fast in every cell",
    "torch_sampled_csr": "0.4.0: use cusparse_csr_wgrad, which calls the same product of cuSPARSE",
    "torch_wgrad": "0.4.0: use reference, which computes the same gradient on a CPU",
}
"""Version and advice by kernel name: `kernel NAME was removed in VERSION: ADVICE`."""


def removal(kernel: str) -> str | None:
    """Return one line that says the kernel was removed and what to use, or None."""
    return f"kernel {kernel} was removed in {REMOVED[kernel]}" if kernel in REMOVED else None


AUTHORS = {
    *("macko", "marlin", "scattermoe", "sparse_marlin", "spinfer"),
    *("twell_authors", "twell_authors_mlp", "twell_authors_step"),
}
"""The kernels of the distribution sparsebench-authors, in the folder authors/ of the repository."""


def not_installed(kernel: str) -> str | None:
    """Return one line that says which distribution has the kernel, or None if it can be loaded."""
    if kernel not in AUTHORS or kernel in modules("kernels"):
        return None
    return "needs sparsebench-authors: pip install ./authors, in a checkout of sparsebench"

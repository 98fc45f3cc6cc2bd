"""Whose a kernel is, by the folder of its file: kernels/FAMILY/NAME.py.

ours     bitmap, bsr, csr, spense, twell
dense    dense: cuBLAS, torch.compile and the like
peers    peers, every other package's, and names that no file has any more
"""

from functools import cache

from sparsebench._discovery import modules

REMOVED = {"cublas_ffn": "dense", "dense_triton": "dense"}
"""Families of removed kernels that published rows name (kernels/_removed.py)."""

OURS = {"bitmap", "bsr", "csr", "spense", "twell"}

OF_ACTIVATIONS = {"active_csr", "cvse", "twell"}
"""Formats that store hidden activations: the weights of their contenders are dense."""


@cache
def family(kernel: str) -> str:
    """Return the folder of a kernel in this project; "peers" for any other."""
    if kernel in REMOVED:
        return REMOVED[kernel]
    parts = modules("kernels").get(kernel, kernel).split(".")
    return parts[2] if parts[:2] == ["sparsebench", "kernels"] else "peers"


def ours() -> list[str]:
    """Name our kernels."""
    return [name for name in modules("kernels") if family(name) in OURS]

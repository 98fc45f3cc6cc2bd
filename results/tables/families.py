"""The family of each kernel, from the folder of its file: kernels/FAMILY/NAME.py.

ours     attention, bitmap, bsr, csr, spense, twell; and DEFAULT, which runs one of their kernels
dense    dense: cuBLAS, torch.compile and others
peers    peers, kernels of other packages, and kernels that were removed
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from sparsebench._discovery import modules
from sparsebench.results.formatting import FORMATS

REMOVED = {"cublas_ffn": "dense", "dense_triton": "dense", "slide_gather": "spense"}
"""Families of removed kernels that occur in published rows (kernels/_removed.py)."""

OURS = {"attention", "bitmap", "bsr", "csr", "spense", "twell"}

DEFAULT = "default"
"""The kernel of a contender that names none: what users of its format get."""

OF_ACTIVATIONS = {"active_csr", "cvse", "twell"}
"""Formats that store hidden activations; the weights of their contenders are dense."""

OF_MASKS = {"block_mask"}
"""Formats that store which blocks an op computes, and no values."""

QUANTISED = {"int4", "int4_two_four"}
"""Formats that store weights in fewer bits than the dtype of the problem."""


@cache
def family(kernel: str) -> str:
    """Return the folder of a kernel of this project, or "peers" for any other kernel."""
    if kernel in REMOVED:
        return REMOVED[kernel]
    parts = modules("kernels").get(kernel, kernel).split(".")
    return parts[2] if parts[:2] == ["sparsebench", "kernels"] else "peers"


def by_default(format_name: str, choice: Mapping[str, Any]) -> str:
    """Name a contender of DEFAULT: `bsr_wgmma (by default)`, or by its format if none is chosen.

    A layer of several products has the kernels of all: `bsr_wgmma + bsr_small (by default)`.
    """
    parts = [choice, *(part for part in choice.values() if isinstance(part, Mapping))]
    kernels = dict.fromkeys(part["kernel"] for part in parts if part.get("kernel"))
    return f"{' + '.join(kernels) or FORMATS.get(format_name, format_name)} (by default)"


def is_ours(kernel: str) -> bool:
    """Return whether a kernel of a sparse contender is ours."""
    return kernel == DEFAULT or family(kernel) in OURS


def ours() -> list[str]:
    return [name for name in modules("kernels") if is_ours(name)]

"""Numbers and names as people say them: 52 µs, 3.7 ms, 5.58 ± 0.02, cuBLAS, 2:4 (Spense).

A kernel's format is that of its family: `ffn_sparse` stores dense weights, and uses the sparsity of
activations. A portfolio's is that of the kernel which it chose.
"""

from collections.abc import Mapping
from math import floor, isnan, log10
from typing import Any

from sparsebench._discovery import modules

ACTIVATIONS = "sparse activations"
FORMATS = {"dense": "dense", "bsr": "BSR", "csr": "CSR", "spense": "2:4 (Spense)"}
FORMATS |= {ACTIVATIONS: ACTIVATIONS}
KERNELS = {"cublas": "cuBLAS", "torch_compile": "torch.compile", "torch_dense": "dense torch"}
OURS = {"bsr", "spense", "sparse_activations"}  # families, folders of kernels/
WIDE = 0.3  # of the value, from its farther end
UNITS = (("s", 1e6), ("ms", 1e3), ("µs", 1.0))


def significant(value: float, digits: int = 3) -> str:
    """Write so many digits, or all before the point; never an exponent."""
    if value == 0 or isnan(value):
        return "-" if isnan(value) else "0"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.{max(0, digits - 1 - floor(log10(abs(rounded))))}f}"


def duration(us: float) -> str:
    """Write a time in the unit that people use: 29.3 µs, 3.70 ms, 1.20 s; `-` where unknown."""
    if isnan(us):
        return "-"
    unit, size = next((u for u in UNITS if float(f"{us:.3g}") >= u[1]), UNITS[-1])
    return f"{significant(us / size)} {unit}"


def plus_minus(value: float, low: float, high: float) -> str:
    """Write 5.58 ± 0.02: the farther end of the interval, in one digit.

    An interval that is WIDE is written out: 2.30 [2.10, 24.4].
    """
    if isnan(value):
        return "-"
    apart = max(value - low, high - value)
    if isnan(apart) or apart < 0.0005 * value:
        return significant(value)
    if apart > WIDE * value:
        return f"{significant(value)} [{significant(low)}, {significant(high)}]"
    places = max(0, -floor(log10(apart)))
    return f"{value:.{places}f} ± {apart:.{places}f}"


def percent(level: float) -> str:
    """Write a level: 90 %, 99.5 %."""
    return f"{round(100 * level, 2):g} %"


def kernel(label: str) -> str:
    """Name a contender without its format: `torch_bsr tuned=True`, cuBLAS."""
    name = label.partition("/")[2] or label
    return KERNELS.get(name, name)


def winner(case: Mapping[Any, Any]) -> str:
    """Name what ran: of a portfolio the kernel that it chose, and by whom."""
    chosen = str(case["chosen"]).partition(", ")[2]
    own = kernel(case["label"])
    if not chosen or chosen.startswith(str(case["kernel"])):
        return chosen or own
    return f"{KERNELS.get(chosen, chosen)} (by {case['kernel']})"


def family(name: str) -> str:
    """Return the folder of kernels/ that a kernel is in; "" of another package's."""
    parts = modules("kernels").get(name, "").split(".")
    return parts[2] if parts[:2] == ["sparsebench", "kernels"] else ""


def format_of(case: Mapping[Any, Any]) -> str:
    """Return the format that a case ran in: a key of FORMATS, or its own name."""
    if case["chosen"]:
        return str(case["chosen"]).partition(", ")[0]
    return ACTIVATIONS if family(case["kernel"]) == "sparse_activations" else str(case["format"])

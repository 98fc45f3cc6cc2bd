"""Checks that kernels share: each returns why a kernel cannot run, or None.

return unsupported_device(device, HOPPER) or unsupported_sizes(problem, n=8, k=16) or ...
"""

from importlib.util import find_spec

import torch

from sparsebench.results.record import Problem

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capability
WEIGHT_BITS = 4
GPU_EXTRA = "'sparsebench[gpu]'"  # what pip installs CuPy and nvmath-python by


def unsupported_device(
    device: torch.device, capability: tuple[int, int], *, newer: bool = False
) -> str | None:
    """Require a GPU of this compute capability, or with `newer` of a newer one."""
    needed = f"an NVIDIA GPU of compute capability {capability[0]}.{capability[1]}"
    needed += " or newer" if newer else ""
    if device.type != "cuda":
        return f"needs {needed}, found {device.type}"
    actual = torch.cuda.get_device_capability(device)
    fits = actual >= capability if newer else actual == capability
    return None if fits else f"needs {needed}, found {actual[0]}.{actual[1]}"


def unsupported_dtype(problem: Problem, *dtypes: str) -> str | None:
    """Require one of these dtypes."""
    dtype = problem["dtype"]
    return None if dtype in dtypes else f"expected {' or '.join(dtypes)}, found {dtype}"


def unsupported_sizes(problem: Problem, **multiples: int) -> str | None:
    """Require that each of these fields of a problem is a multiple of a number."""
    if not any(problem[name] % side for name, side in multiples.items()):
        return None
    expected = " and ".join(f"{name} a multiple of {side}" for name, side in multiples.items())
    return f"expected {expected}, found {' and '.join(str(problem[name]) for name in multiples)}"


def unsupported_without(module: str, package: str) -> str | None:
    """Require a module, which `pip install PACKAGE` provides."""
    return None if find_spec(module) else f"needs {module}: pip install {package}"


def unmet(
    problem: Problem,
    device: torch.device,
    capability: tuple[int, int],
    *dtypes: str,
    newer: bool = False,
    package: tuple[str, str] | None = None,
    **multiples: int,
) -> str | None:
    """Return which of these requirements is not met, or None: see the functions above.

    package    arguments of `unsupported_without`
    multiples  those of `unsupported_sizes`
    """
    return (
        (unsupported_without(*package) if package else None)
        or unsupported_device(device, capability, newer=newer)
        or unsupported_dtype(problem, *dtypes)
        or unsupported_sizes(problem, **multiples)
    )


def unsupported_on_hopper(
    problem: Problem, device: torch.device, dtypes: tuple[str, ...] = ("fp16", "bf16")
) -> str | None:
    """Require what a CUDA kernel with Hopper's instructions needs."""
    reason = unmet(problem, device, HOPPER, *dtypes)
    return reason or unsupported_without("cupy", GPU_EXTRA)


def unsupported_before_ampere(
    problem: Problem, device: torch.device, dtypes: tuple[str, ...] = ("fp16", "bf16")
) -> str | None:
    """Require what a CUDA kernel for compute capability 8.0 or newer needs."""
    reason = unmet(problem, device, AMPERE, *dtypes, newer=True)
    return reason or unsupported_without("cupy", GPU_EXTRA)


def unsupported_in_4_bits(
    problem: Problem, device: torch.device, dtype: str, rows: int, columns: int
) -> str | None:
    """Return why a kernel cannot run here, or None.

    The kernel takes weights of 4 bits and activations of one dtype, on Ampere and newer, with n a
    multiple of `rows` and k of `columns`.
    """
    if problem.fields.get("weight_bits") != WEIGHT_BITS:
        actual = problem["dtype"]
        return f"expected weights of 4 bits (weight_bits: {WEIGHT_BITS}), found {actual}"
    return unmet(problem, device, AMPERE, dtype, newer=True, n=rows, k=columns)

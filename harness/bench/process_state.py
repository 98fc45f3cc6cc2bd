"""What a contender can change for the whole process, and so for every later contest.

    numerics     tf32, reduced precision, deterministic algorithms, default dtype and device
    speed        threads, cores, cuDNN's and attention's switches, garbage collection, tracing
    place        directory, umask, environment, current GPU and stream, limits of the CUDA context
                 New environment variables that libraries read at a call are removed, but not
                 reported; others, which libraries set on import, stay

`ProcessState` records these when a contest starts. `restore` puts back what has changed, and
returns the names of changes that no kernel may make. A kernel may draw random numbers: nothing here
reads the generators of torch, numpy or Python without a seed of its own.
`rewritten_modules` finds files of Python modules that were written since this process loaded them.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from sparsebench.kernels._common.driver import driver

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read a setting, and how to write it."""

OF_TORCH = {
    "torch's threads": "num_threads",
    "the default dtype": "default_dtype",
    "the precision of fp32 products": "float32_matmul_precision",
    "deterministic algorithms": "deterministic_debug_mode",
}
MATMUL = [
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
]
CUDNN = ["enabled", "allow_tf32", "benchmark", "deterministic"]
PRECISIONS: dict[str, Any] = {  # torch's new switches of tf32; those in MATMUL and CUDNN are older
    "torch": torch.backends,
    "matmul": torch.backends.cuda.matmul,
    "cudnn": torch.backends.cudnn,
}
ATTENTION = ["flash", "mem_efficient", "math", "cudnn"]
READ_LATER = "CUBLAS", "CUDNN", "CUDA_LAUNCH", "NVIDIA_TF32", "OMP_", "MKL_", "PYTORCH_"
PACKAGES = "torch", "numpy", "triton", "sparsebench"
LIMITS = {"the granularity of L2 fetches": 5, "the persisting part of L2": 6}  # CUlimit


class ProcessState:
    """The settings of this process when the contest starts."""

    def __init__(self) -> None:
        self._settings = settings()
        self._before = {name: _read_setting(read) for name, (read, _) in self._settings.items()}
        self._environment = dict(os.environ)

    def restore(self) -> list[str]:
        """Put everything back, and return what was changed, with values."""
        changed = self._restore_settings()
        if changed:
            self._restore_settings()  # an old switch of torch also writes the new one
        return changed + self._restore_environment()

    def _restore_settings(self) -> list[str]:
        changed = []
        for name, (read, write) in self._settings.items():
            before, now = self._before[name], _read_setting(read)
            if before != now:
                write(before)
                changed.append(f"{name} from {before} to {now}")
        return changed

    def _restore_environment(self) -> list[str]:
        changed = [n for n, value in self._environment.items() if os.environ.get(n) != value]
        os.environ.update({name: self._environment[name] for name in changed})
        for name in os.environ.keys() - self._environment.keys():
            if name.startswith(READ_LATER):
                del os.environ[name]
        return [f"the environment variable {name}" for name in changed]


def _read_setting(read: Callable[[], Any]) -> Any:
    """Read a setting; torch refuses to name a precision that was set in its old and its new way."""
    try:
        return read()
    except RuntimeError:
        return "unreadable"


@cache
def settings() -> dict[str, Setting]:
    """Return everything that is read by a function without arguments, in the order of repair."""
    settings: dict[str, Setting] = {
        f"{title}'s fp32": _attribute(owner, "fp32_precision")
        for title, owner in PRECISIONS.items()
        if hasattr(owner, "fp32_precision")
    }
    settings |= {
        title: (getattr(torch, f"get_{name}"), getattr(torch, f"set_{name}"))
        for title, name in OF_TORCH.items()
    }
    settings |= {
        "the default device": (
            lambda: str(torch.get_default_device()),
            lambda _: torch.set_default_device(None),
        ),
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "the working directory": (os.getcwd, os.chdir),
        "the umask": (_umask, os.umask),
        "the cores of the process": (
            lambda: os.sched_getaffinity(0),
            partial(os.sched_setaffinity, 0),
        ),
        "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        "its thresholds": (gc.get_threshold, lambda counts: gc.set_threshold(*counts)),
        "the tracing function": (sys.gettrace, sys.settrace),
        "the profiling function": (sys.getprofile, sys.setprofile),
        "the switching interval": (sys.getswitchinterval, sys.setswitchinterval),
        "subnormal numbers": (_keeps_subnormals, lambda keep: torch.set_flush_denormal(not keep)),
    }
    for title, names in {"matmul": MATMUL, "cudnn": CUDNN}.items():
        owner = PRECISIONS[title]
        settings |= {  # not all are in every version of torch
            f"{title}.{name}": _attribute(owner, name) for name in names if hasattr(owner, name)
        }
    for name in ATTENTION:
        enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
        settings[f"{name} attention"] = enabled, getattr(torch.backends.cuda, f"enable_{name}_sdp")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        settings["the current GPU"] = torch.cuda.current_device, torch.cuda.set_device
        settings["the current stream"] = torch.cuda.current_stream, torch.cuda.set_stream
        for name, limit in LIMITS.items():
            settings[name] = partial(_limit, limit), partial(_set_limit, limit)
    return settings


def _attribute(owner: object, name: str) -> Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _keeps_subnormals() -> bool:
    return bool(torch.tensor(1e-39) * 0.5 > 0)


def _limit(limit: int) -> int:
    """Return a limit of the CUDA context, or -1 if the driver does not tell."""
    value = ctypes.c_size_t()
    with suppress(OSError):
        if driver().cuCtxGetLimit(ctypes.byref(value), limit) == 0:
            return value.value
    return -1


def _set_limit(limit: int, value: int) -> None:
    driver().cuCtxSetLimit(limit, ctypes.c_size_t(value))


_files: dict[str, tuple[int, int]] = {}  # time and size, as this process first saw them


def rewritten_modules() -> list[str]:
    """Return the modules of PACKAGES whose files have changed since an earlier call."""
    changed = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and (file := getattr(module, "__file__", None)):
            try:
                status = os.stat(file)
            except OSError:
                continue
            now = status.st_mtime_ns, status.st_size
            if _files.setdefault(file, now) != now:
                _files[file] = now
                changed.append(name)
    return sorted(changed)

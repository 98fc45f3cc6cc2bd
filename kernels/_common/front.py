"""Compile front.cpp, and record what a layer launches, so that later calls need no Python.

    first call     plans, and may search (selection.py)
    second call    is recorded: a tape has each launch's arguments, and each tensor that it made
    later calls    Front(x): the same bytes, with the addresses of X and of new outputs put in

A recording counts only if every launch was seen, every address was found in the arguments exactly
where a tensor starts, and the recorded launches give the same bits as the path in Python. Until
then, and whenever a guard of front.cpp fails, the layer takes its path in Python: 15 to 30 µs more.

front.cpp is compiled once per machine, for this torch and Python, with $CXX or c++, in about 20 s:
$XDG_CACHE_HOME/sparsebench/front/KEY/. Without a compiler, every call takes the path in Python, and
that is said once. SPARSEBENCH_FRONT=0 switches it off.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import cpp_extension

from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.cuda import COOPERATIVE, EARLY, Tape, driver, taping

NAME = "sparsebench_front"
SOURCE = Path(__file__).with_name("front.cpp")
WORD = 8  # bytes of an address


class Guard(NamedTuple):
    """`holder[name]` must stay this tensor, unwritten; without a holder, the tensor alone."""

    holder: dict[str, Any] | None
    name: str
    tensor: Tensor | None


class Fronts(dict[Any, Any]):
    """The Fronts of a layer by what it computes; copies and pickles as an empty one."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Return what a copy is made of: the recordings are of this layer's memory."""
        return Fronts, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fronts":
        """Return an empty one."""
        return Fronts()


def recorded(
    front: Any, x: Tensor, run: Callable[[], Tensor], guards: Sequence[Guard], **options: Any
) -> tuple[Tensor, Any]:
    """Run a planned call of X [m, k], and return Y [m, n] and the Front that has its recording.

    front    the layer's Front, or None
    run      the path in Python, without a gradient, autocast and modes
    options  limit: calls after which the path in Python must be taken once; bias: added to Y
    """
    bias, limit = options.get("bias"), options.get("limit", 0)
    tensors = [guard.tensor for guard in guards if guard.tensor is not None]
    if is_capturing(x) or x.is_inference() or any(t.is_inference() for t in tensors):
        return _with_bias(run(), bias), front
    if (kind := front_type()) is None:
        return _with_bias(run(), bias), None
    with taping() as tape:
        flat = run()
    y = _with_bias(flat, bias)
    steps = [] if tape.dense is not None else _steps(tape, x, flat)
    if steps is None:
        return y, front
    if front is None or front.stale:
        front = kind(x, x.shape[1], limit)
        for guard in guards:
            front.guard(*guard)
    made = {id(t) for t in tape.made}
    owners = [owner for owner in tape.kept if id(owner) not in made]
    front.add(x, tape.made, steps, bias, owners, tape.dense)
    return (y, front) if _same(front(x), y) else (y, None)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)


def _same(fast: Tensor | None, y: Tensor) -> bool:
    """Return whether the recording gives the bits of Y; None, in a new thread, counts."""
    return fast is None or torch.equal(fast.view(torch.uint8), y.view(torch.uint8))


def _steps(tape: Tape, x: Tensor, y: Tensor) -> list[tuple[Any, ...]] | None:
    """Return the launches for Front.add, or None if they do not explain all of the call."""
    operands = [x, *tape.made]
    places = {t.data_ptr(): i for i, t in enumerate(operands)}
    complete = tape.complete and len(places) == len(operands) and bool(tape.launches)
    if not complete or tape.made[-1].data_ptr() != y.data_ptr():
        return None
    steps, patched = [], set()
    for loaded, (pointers, memory) in tape.launches:
        image, base = bytes(memory), ctypes.addressof(memory)
        parameters = [pointer - base for pointer in pointers]
        patches = []
        for at in range(0, len(image) - WORD + 1, WORD):
            (word,) = struct.unpack_from("Q", image, at)
            if word and word in places:
                patches.append((places[word], at))
                patched.add(places[word])
        attributes = [n for n, on in ((COOPERATIVE, loaded.together), (EARLY, loaded.early)) if on]
        shape = loaded.grid, loaded.threads, loaded.shared_bytes
        steps.append((loaded.kernel.ptr, *shape, attributes, image, parameters, patches))
    return steps if patched == set(range(len(operands))) else None


# ---- the extension ----


def front_type() -> Any:
    """Return the class Front, or None if there is none; waits until it is compiled."""
    if os.environ.get("SPARSEBENCH_FRONT", "1") == "0":
        return None
    return _compiled_type()


@cache
def _compiled_type() -> Any:
    try:
        module = _load(_built())
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[:1]
        warnings.warn(
            f"front.cpp is not compiled, so calls of layers take 15 to 30 µs longer: {reason}",
            stacklevel=2,
        )
        return None
    module.connect(*_functions())
    return module.Front


def _functions() -> tuple[int, int, int]:
    """Return the addresses of cuLaunchKernelEx, of torch's current stream, and of its capture."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    found = (
        driver().cuLaunchKernelEx,
        library.aoti_torch_get_current_cuda_stream,
        driver().cuStreamIsCapturing,
    )
    launch, stream, capturing = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in found)
    return launch, stream, capturing


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file}: expected a Python extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    """Return the extension, compiled now if this torch and Python have none. Raises OSError."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise OSError("expected a C++ compiler ($CXX, c++ or g++), found none")
    versions = SOURCE.read_text("utf-8"), torch.__version__, torch.__file__, sys.version, compiler
    key = hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "sparsebench" / "front" / key
    file = folder / f"{NAME}.so"
    if file.exists():
        return file
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    library = Path(torch.__file__).parent / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as beside:
        fresh = Path(beside) / file.name
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(fresh)]
        command += [f"-I{include}" for include in includes]
        command += [f"-L{library}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
        fresh.replace(file)  # several processes may compile it at the same time
    return file

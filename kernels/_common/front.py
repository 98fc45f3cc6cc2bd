"""Compile front.cpp, and record what a layer launches, so that later calls need no Python.

    first call     plans, and may search (selection.py)
    second call    is recorded: a tape has each launch's arguments and each new tensor
    later calls    Front(x): the same bytes, with the addresses of X and of new outputs put in
    backward       a node of autograd in C++ does the same for dX and dW, which their second call
                   records; a derivative in Python (`differentiate`) computes what has no recording

A call is recorded only if the weight is as the call before it left it, so a weight that is replaced
or written in every step costs no recordings. A recording is used only if the tape has every launch,
if every address in the arguments is the start of a known tensor, and if the recorded launches give
the same bits as the path in Python. Until then, and whenever a guard of front.cpp fails, the layer
takes its path in Python, which takes 15 to 30 µs more, and 50 to 100 µs more in backward.

front.cpp is compiled once per machine, for this torch and Python, with $CXX or c++, in about 20 s:
$XDG_CACHE_HOME/sparsebench/front/KEY/. Without a compiler, which is said once, or with
SPARSEBENCH_FRONT=0, layers always take their path in Python.
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
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import cpp_extension

from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.cuda import Arguments, ByTorch, Loaded, MatrixProduct, Tape, taping
from sparsebench.kernels._common.driver import COOPERATIVE, EARLY, driver
from sparsebench.kernels._common.machine_code import cache_folder
from sparsebench.kernels._common.python_node import LINEAR
from sparsebench.kernels._common.transforms import rows_of, unflatten

NAME = "sparsebench_front"
SOURCE = Path(__file__).with_name("front.cpp")
WORD = 8  # bytes of an address


class Guard(NamedTuple):
    """`holder[name]` must stay this tensor; without a holder, the tensor alone is checked.

    content  whether a write to the tensor ends the recordings, because they read its old content
    """

    holder: dict[str, Any] | None
    name: str
    tensor: Tensor | None
    content: bool = True

    def stamp(self) -> tuple[Any, ...] | None:
        """Return what must not change, or None without a tensor."""
        if (t := self.tensor) is None:
            return None
        return id(t), t.data_ptr(), t._version if self.content else 0, t.requires_grad


class ModuleGuard(NamedTuple):
    """`holder[name]` must stay this module, which holds guarded tensors."""

    holder: dict[str, Any]
    name: str
    module: torch.nn.Module
    content: bool = False

    def stamp(self) -> tuple[Any, ...]:
        return (id(self.module),)


Guards = Sequence[Guard | ModuleGuard]


class Pending(NamedTuple):
    """The weight as the last call left it; a Front follows if the next call finds the same one."""

    stamps: tuple[Any, ...]
    stale: bool = True

    def __call__(self, x: Tensor) -> None:
        """Return None, so that the layer takes its path in Python."""

    def due(self) -> bool:
        """Return whether the path in Python must check the weight again."""
        return False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as None, as a Front does."""
        return type(None), ()


class Fronts(dict[Any, Any]):
    """The Fronts of a layer by what it computes; copies and pickles as an empty one."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Return what a copy is made of: the recordings are of this layer's memory."""
        return Fronts, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fronts":
        return Fronts()


def recorded(
    front: Any, x: Tensor, run: Callable[[Tensor], Tensor], guards: Guards, **options: Any
) -> tuple[Tensor, Any]:
    """Run a call of X [..., k], and return Y [..., n] and the Front for later calls.

    front    what this function returned for the weight before, or None
    run      the planned product of rows [m, k] in the layout of X, without checks and a gradient
    options  planned: False if this call makes the plan, so that there is nothing to record yet;
             limit: calls after which the path in Python must be taken once; bias: added to Y;
             derivative: of calls that need a gradient; differentiated: for a call that autograd
             must see, a function that makes it in Python
    """
    bias, differentiated = options.get("bias"), options.get("differentiated")
    planned, derivative = options.get("planned", True), options.get("derivative")
    values = None if derivative is None else derivative.values
    kind, rows = front_type(), rows_of(x)
    in_python = kind is None or is_capturing(x) or _in_inference(x, guards)
    front = front if in_python else _front_of(kind, front, guards, options)
    fast: Tensor | None = None
    if planned and not in_python and not isinstance(front, Pending):
        inputs = [rows, values] if values is not None and values.requires_grad else [rows]
        with torch.no_grad():
            y = record(front, LINEAR, inputs, lambda rows, *_: run(rows), bias=bias)
        if differentiated is None:
            return unflatten(y, x), front
        fast = front(x)
    if fast is None and differentiated is not None:
        fast = differentiated()
    return unflatten(_with_bias(run(rows), bias), x) if fast is None else fast, front


def _in_inference(x: Tensor, guards: Guards) -> bool:
    """Return whether torch does not count the writes to an operand, which is of inference mode."""
    guarded = (guard.tensor for guard in guards if isinstance(guard, Guard))
    return x.is_inference() or any(t is not None and t.is_inference() for t in guarded)


def _front_of(kind: Any, front: Any, guards: Guards, options: Mapping[str, Any]) -> Any:
    """Return the Front to record in, or Pending if it is too early."""
    if isinstance(front, kind) and not front.stale:
        return front
    pending = Pending(tuple(guard.stamp() for guard in guards))
    if front != pending:
        return pending
    front = kind(options.get("limit", 0))
    for guard in guards:
        front.guard(*guard)
    if (derivative := options.get("derivative")) is not None:
        front.differentiate(*derivative)
    return front


def record(
    front: Any,
    op: int,
    inputs: list[Tensor],
    run: Callable[..., Tensor],
    *,
    bias: Tensor | None = None,
    fixed: Sequence[int] = (),
) -> Tensor:
    """Run a planned product of the inputs, and add it to a Front if the tape explains it.

    front  or None, which records nothing
    fixed  inputs that launches need not read, because they read tensors derived from them earlier
    """
    if front is None or is_capturing(inputs[0]):
        return _with_bias(run(*inputs), bias)
    with taping() as tape:
        flat = run(*inputs)
    y = _with_bias(flat, bias)
    steps = ([], [*fixed]) if tape.dense is not None else _steps(tape, inputs, flat, fixed)
    if steps is None:
        return y
    outputs = {id(t) for t in tape.outputs}
    owners = [owner for owner in tape.owners if id(owner) not in outputs]
    entry = op, inputs, tape.outputs, *steps, bias, owners, tape.dense
    trial = type(front)(0)
    if trial.add(*entry):
        again = trial.run(op, inputs)
        if torch.equal(again.view(torch.uint8), y.view(torch.uint8)):
            front.add(*entry)
        else:
            warnings.warn(
                f"the recording of a product of {list(inputs[0].shape)} gives other bits than the "
                "path in Python, so it is not used: please report this",
                stacklevel=2,
            )
    return y


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)


def _steps(
    tape: Tape, inputs: list[Tensor], y: Tensor, fixed: Sequence[int]
) -> tuple[list[tuple[Any, ...]], list[int]] | None:
    """Return the launches for Front.add, and the inputs that none of them reads.

    None if the launches do not explain all of the call.
    """
    operands = [*inputs, *tape.outputs]
    numbers = {t.data_ptr(): i for i, t in enumerate(operands)}
    complete = tape.complete and len(numbers) == len(operands) and bool(tape.launches)
    if not complete or tape.outputs[-1].data_ptr() != y.data_ptr():
        return None
    places = {address: (number, 0) for address, number in numbers.items()}
    for view, whole in tape.views:
        start = whole.data_ptr()
        places[view.data_ptr()] = numbers[start], view.data_ptr() - start
    steps = [_step(launch, places) for launch in tape.launches]
    patched = {operand for *_, patches, _ in steps for operand, *_ in patches}
    rest = [i for i in range(len(operands)) if i not in patched]
    return (steps, rest) if set(rest) <= {*fixed} else None


def _step(
    launch: tuple[Loaded, Arguments] | ByTorch, places: Mapping[int, tuple[int, int]]
) -> tuple[Any, ...]:
    """Return a launch, and its patches.

    places  address -> number of an operand, and bytes from its start
    patch   both, and where the address is in the bytes of the arguments
    """
    if isinstance(launch, ByTorch):
        weight = launch.b if isinstance(launch, MatrixProduct) and launch.fixed else None
        tensors = [t for t in launch if isinstance(t, Tensor) and t is not weight]
        return 0, 0, 0, 0, [], b"", [], [(*places[t.data_ptr()], 0) for t in tensors], weight
    loaded, (pointers, memory) = launch
    image, base = bytes(memory), ctypes.addressof(memory)
    parameters = [pointer - base for pointer in pointers]
    words = ((at, *struct.unpack_from("Q", image, at)) for at in range(0, len(image) - 7, WORD))
    patches = [(*places[word], at) for at, word in words if word and word in places]
    attributes = [n for n, on in ((COOPERATIVE, loaded.together), (EARLY, loaded.early)) if on]
    shape = loaded.grid, loaded.threads, loaded.shared_bytes
    return loaded.kernel.ptr, *shape, attributes, image, parameters, patches, None


# ---- the extension ----


def front_type() -> Any:
    """Return the class Front, or None if there is none; waits until it is compiled."""
    if os.environ.get("SPARSEBENCH_FRONT", "1") == "0":
        return None
    return _compiled_type()


@cache
def _compiled_type() -> Any:
    try:
        file = _built()
        try:
            module = _load(file)
        except ImportError:  # a damaged file
            file.unlink()
            module = _load(_built())
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[:1]
        warnings.warn(
            f"layers are called in Python, which takes 15 to 30 µs longer: no front.cpp: {reason}",
            stacklevel=2,
        )
        return None
    module.connect(*_functions())
    return module.Front


def _functions() -> tuple[int, int, int]:
    """Return the addresses of cuLaunchKernelEx, of torch's current stream, and of its capture."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    functions = (
        driver().cuLaunchKernelEx,
        library.aoti_torch_get_current_cuda_stream,
        driver().cuStreamIsCapturing,
    )
    launch, stream, capturing = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
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
    code = [SOURCE.with_suffix(suffix).read_text("utf-8") for suffix in (".hpp", ".cpp")]
    versions = *code, torch.__version__, torch.__file__, sys.version, compiler
    key = hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]
    folder = cache_folder("front") / key
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

"""What the contenders of this folder share: a function of the operands becomes a kernel.

A suite names one as `module:function`, such as `wrong:zeros`.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from types import ModuleType

from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands

Declared = Callable[[Callable[[Operands], Launch]], Kernel]
Run = Callable[[], object]


def kernel(op: str = "linear", consumes: str = "dense", device: str = "any") -> Declared:
    """Declare a kernel by the function that prepares it."""
    return lambda prepare: Kernel(op=op, consumes=consumes, device=device, prepare=prepare)


def weight_and_input(operands: Operands) -> tuple[Tensor, Tensor]:
    """Return W as a dense tensor, and X."""
    return operands.weights["w"].to_dense(), operands.activations["x"]


def gradient_operands(operands: Operands) -> tuple[Tensor, Tensor, Bsr]:
    """Return dY, X, and the weight whose pattern the gradient follows."""
    return operands.activations["dy"], operands.activations["x"], operands.pattern


def prepare_linear(device: str = "any") -> Callable[[Callable[[Tensor, Tensor], Run]], Kernel]:
    """Declare a kernel by a function of W and X that returns the launch's function."""
    return lambda prepare: kernel(device=device)(lambda o: Launch(prepare(*weight_and_input(o))))


def run_linear(run: Callable[[Tensor, Tensor], object]) -> Kernel:
    """Declare a kernel by the function of W and X that each call is."""
    return prepare_linear()(lambda w, x: partial(run, w, x))


def by_call(run: Callable[[Tensor, Tensor, int], object]) -> Kernel:
    """Declare a kernel by the function of W, X and its number, from 1, that each call is."""

    def prepare(w: Tensor, x: Tensor) -> Run:
        calls = count(1)
        return lambda: run(w, x, next(calls))

    return prepare_linear()(prepare)


def prepare_wgrad(prepare: Callable[[Tensor, Tensor, Bsr], Run]) -> Kernel:
    """Declare a weight gradient by a function of dY, X and W that returns the launch's function."""
    declare = kernel(op="linear_wgrad", consumes="bsr")
    return declare(lambda operands: Launch(prepare(*gradient_operands(operands))))


def run_wgrad(run: Callable[[Tensor, Tensor, Bsr], object]) -> Kernel:
    """Declare a weight gradient by the function of dY, X and W that each call is."""
    return prepare_wgrad(lambda dy, x, w: partial(run, dy, x, w))


def names(module: ModuleType) -> list[str]:
    """Return what a suite calls the kernels of a module."""
    kernels = (name for name, value in vars(module).items() if isinstance(value, Kernel))
    return [f"{module.__name__}:{name}" for name in kernels]

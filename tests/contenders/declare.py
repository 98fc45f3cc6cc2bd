"""What the contenders of this folder share: a function that prepares a launch becomes a kernel.

A suite names one as `module:function`, such as `wrong:zeros`.
"""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands

Declared = Callable[[Callable[[Operands], Launch]], Kernel]


def kernel(op: str = "linear", consumes: str = "dense", device: str = "any") -> Declared:
    """Declare a kernel by the function that prepares it."""
    return lambda prepare: Kernel(op=op, consumes=consumes, device=device, prepare=prepare)


def weight_and_input(operands: Operands) -> tuple[Tensor, Tensor]:
    """Return W as a dense tensor, and X."""
    return operands.weights["w"].to_dense(), operands.activations["x"]


def gradient_operands(operands: Operands) -> tuple[Tensor, Tensor, Bsr]:
    """Return dY, X, and the weight whose pattern the gradient follows."""
    return operands.activations["dy"], operands.activations["x"], operands.pattern


def names(module: ModuleType) -> list[str]:
    """Return what a suite calls the kernels of a module."""
    kernels = (name for name, value in vars(module).items() if isinstance(value, Kernel))
    kernels = (name for name, value in vars(module).items() if isinstance(value, Kernel))
    return [f"{module.__name__}:{name}" for name in kernels]

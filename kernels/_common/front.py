"""Record what an operator launches, so that later calls need no Python.

    first call     plans (operator.py)
    second call    of a layout is recorded: a tape has each launch's arguments and new tensor
    later calls    Recordings.replay(x): the same bytes, with the addresses of X and of new outputs
    backward       a node of autograd in C++ does the same for the products that the Signature
                   declares; a Derivative in Python computes and records what has no recording

A call is recorded only if the weight is as the call before it left it, so a weight that is replaced
or written in every step costs no recordings. A recording is used only if the tape has every launch,
if each operand's address is in the arguments, and if the recorded launches give the same bits as
the path in Python. Until then, and whenever a guard of front.cpp fails, the operator takes its path
in Python, which takes 15 to 30 µs more, and 50 to 100 µs more in backward. Without the extension
(front_extension.py), all calls do.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.cuda import Arguments, Loaded
from sparsebench.kernels._common.driver import COOPERATIVE, EARLY
from sparsebench.kernels._common.front_extension import front_type
from sparsebench.kernels._common.tape import ByTorch, LibraryCall, MatrixProduct, Tape, taping
from sparsebench.kernels._common.transforms import PLAIN, aligned, readable, rows_of, unflatten

# ---- what an operator declares ----


class BackwardProduct(NamedTuple):
    """A product of backward, by names of a Signature.

    reads  operands; the first one is the gradient, such as "dy", unless sizes are exact
    gives  arguments or held tensors whose gradients it returns
    """

    reads: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class Signature:
    """What an operator reads and returns, by names.

    arguments  tensors of each call
    results    the first one, such as "y", may have a gradient, "dy"; the others have none
    held       tensors of a weight that may have a gradient; forward reads those that have one
    backward   its products
    exact      kernels are planned for all sizes of the operands. Otherwise for rows and columns:
               the first result, and gradients of arguments, have as many rows as the first operand
    """

    arguments: tuple[str, ...] = ("x",)
    results: tuple[str, ...] = ("y",)
    held: tuple[str, ...] = ()
    backward: tuple[BackwardProduct, ...] = ()
    exact: bool = False

    @property
    def numbers(self) -> list[tuple[list[int], list[int]]]:
        """Return what each product of backward reads and gives, as front.hpp numbers operands."""
        names = *self.arguments, *self.held, *self.results, f"d{self.results[0]}"
        return [([*map(names.index, p.reads)], [*map(names.index, p.gives)]) for p in self.backward]


PRODUCT = Signature()
"""Y of X without a gradient."""


class Guard(NamedTuple):
    """`holder[name]` must stay this object; without a holder, the tensor alone is checked.

    content  whether a write to the tensor ends the recordings, because they read its old content
    """

    holder: dict[str, Any] | None
    name: str
    value: Tensor | nn.Module | None
    content: bool = True

    def stamp(self) -> tuple[Any, ...]:
        """Return what must not change."""
        if not isinstance(t := self.value, Tensor):
            return (id(t),)
        return id(t), t.data_ptr(), t._version if self.content else 0, t.requires_grad


Derivative = Callable[
    ["Front | None", Tensor, Sequence[Tensor | None], Sequence[bool]], Sequence[Tensor | None]
]
"""Returns the gradients of arguments and held tensors, or None where one is not needed.

It takes the Front that made the call, or None; the gradient of the first result; arguments, held
tensors and results, each only if a product that is needed reads it; and which gradients are needed.
It may `record` products of backward.
"""


class Conditions(NamedTuple):
    """What the recordings of a weight or a mask depend on.

    held        the tensors that the Signature names
    bias        which forward adds to its first result
    derivative  of calls that need a gradient; None: they take the path in Python
    limit       calls after which the path in Python must be taken once; 0: never
    """

    guards: Sequence[Guard]
    held: Sequence[Tensor] = ()
    bias: Tensor | None = None
    derivative: Derivative | None = None
    limit: int = 0


class Front(Protocol):
    """The class of front.cpp: the recordings of a weight, while its guards hold."""

    stale: bool

    def __call__(self, *arguments: Tensor) -> Any: ...
    def guard(self, *guard: Any) -> None: ...
    def add(self, product: int, *recording: Any) -> bool | None: ...
    def due(self) -> bool: ...


# ---- calls ----

LAYOUTS = 1024  # of a weight's earlier calls that are remembered, 300 bytes each


class Recordings:
    """The recorded calls of one weight or mask; copies and pickles without any.

    replay  returns the result of a recorded call, or a tuple of them; None if the operator must
            take its path in Python
    """

    def __init__(self, signature: Signature) -> None:
        """Record nothing yet."""
        self.signature = signature
        self.clear()

    def clear(self) -> None:
        """Forget all calls."""
        self.replay: Callable[..., Any] = _replay_nothing
        self._front: Front | None = None
        self._stamps: list[tuple[Any, ...]] = []
        self._layouts: dict[Any, bool] = {}  # of earlier calls: whether they can be recorded

    def __reduce__(self) -> tuple[type, tuple[Signature]]:
        return Recordings, (self.signature,)

    def due(self) -> bool:
        """Return whether the limit has been reached, and count anew."""
        return self._front is not None and self._front.due()

    def call(
        self,
        arguments: Sequence[Tensor],
        conditions: Conditions,
        run: Callable[..., Sequence[Tensor]] | None,
        in_python: Callable[[], Any],
    ) -> Any:
        """Make a call that is not replayed, and record it if it repeats the call before it.

        run        the planned kernel: returns the results of arguments in a layout that it reads,
                   as rows unless sizes are exact, with the bias and without a gradient. None if
                   the call is not planned yet
        in_python  makes the call as autograd sees it
        """
        plain = all(type(t) in PLAIN for t in arguments) and not is_capturing(arguments[0])
        front = self._current_front(conditions) if plain else None
        layouts = tuple([(t.shape, t.stride(), t.dtype) for t in arguments])
        if layouts not in self._layouts or front is None or run is None:  # to record a call waits
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            self._layouts.setdefault(layouts, True)
            return in_python()
        results = self.replay(*arguments)  # again if only the limit was reached
        if results is None and self._layouts.get(layouts):
            with torch.no_grad():
                layout = aligned if self.signature.exact else lambda t: readable(rows_of(t))
                inputs = [*map(layout, arguments)]
                count = len(inputs)
                inputs += [t for t in conditions.held if t.requires_grad]
                try:
                    added = _add(front, 0, inputs, lambda *t: run(*t[:count]), ())[1]
                except torch.OutOfMemoryError:  # a tape keeps all that a call allocates
                    added = False
                self._layouts[layouts] = added
            results = self.replay(*arguments)
        return in_python() if results is None else results

    def product(
        self,
        x: Tensor,
        conditions: Conditions,
        run: Callable[[Tensor], Tensor] | None,
        in_python: Callable[[], Tensor],
    ) -> Tensor:
        """Make a `call` of X alone, whose `run` returns one result, to which it adds the bias."""
        bias = conditions.bias

        def with_bias(rows: Tensor) -> list[Tensor]:
            assert run is not None
            return [run(rows) if bias is None else run(rows).add_(bias)]

        y: Tensor = self.call([x], conditions, run and with_bias, in_python)
        return y

    def _current_front(self, conditions: Conditions) -> Front | None:
        """Return the Front to record in, or None if it is too early or impossible."""
        if self._front is not None and not self._front.stale:
            return self._front
        self._front, self.replay = None, _replay_nothing
        guarded = (guard.value for guard in conditions.guards)
        if any(isinstance(t, Tensor) and t.is_inference() for t in guarded):
            return None  # torch does not count the writes to it
        if (kind := front_type()) is None:
            return None
        stamps, before = [guard.stamp() for guard in conditions.guards], self._stamps
        self._stamps = stamps
        if stamps != before:
            return None
        declared, (guards, held, *rest) = self.signature, conditions
        sizes = len(declared.arguments), declared.exact, declared.numbers
        front: Front = kind(*sizes, [*held], *rest)
        for guard in guards:
            front.guard(*guard)
        self._front = self.replay = front
        self._layouts = dict.fromkeys(self._layouts, True)
        return front


def _replay_nothing(*_: Tensor) -> None:
    """Take the place of a Front."""


def record(
    front: Front | None,
    product: int,
    inputs: Sequence[Tensor],
    run: Callable[..., Sequence[Tensor]],
    *,
    fixed: Sequence[int] = (),
) -> Sequence[Tensor]:
    """Run a planned product, and add it to a Front if the tape explains it.

    front    or None, which records nothing
    product  number of a product of the Signature's backward, from 1 on
    inputs   operands that the product reads, in a layout that `run` reads
    fixed    inputs that launches need not read, because they read tensors derived from them earlier
    """
    if front is None or is_capturing(inputs[0]):
        return run(*inputs)
    return _add(front, product, inputs, run, fixed)[0]


def _add(
    front: Front,
    product: int,
    inputs: Sequence[Tensor],
    run: Callable[..., Sequence[Tensor]],
    fixed: Sequence[int],
) -> tuple[Sequence[Tensor], bool]:
    """Return the results of a product, and whether a Front has taken its recording."""
    addresses = [t.data_ptr() for t in inputs]
    repeated = [address in addresses[:i] for i, address in enumerate(addresses)]
    inputs = [t.clone() if again else t for t, again in zip(inputs, repeated, strict=True)]
    with taping() as tape:
        results = run(*inputs)
    steps = _steps(tape, inputs, results, fixed)
    if steps is None:
        return results, False
    outputs = {id(t) for t in tape.outputs}
    owners = [owner for owner in tape.owners if id(owner) not in outputs]
    added = front.add(product, inputs, *steps, owners, tape.dense, [*results])
    if added is False:
        warnings.warn(
            f"the recording of a product of {list(inputs[0].shape)} gives other bits than the path "
            "in Python, so it is not used: please report this",
            stacklevel=2,
        )
    return results, bool(added)


def _steps(
    tape: Tape, inputs: list[Tensor], results: Sequence[Tensor], fixed: Sequence[int]
) -> tuple[Any, ...] | None:
    """Return `fixed`, `outputs`, `numbers` and `steps` of Front.add.

    None if the launches do not explain all of the call.
    """
    if tape.dense is not None:
        return [*fixed], [], [], []
    operands = [*inputs, *tape.outputs]
    numbers = {t.data_ptr(): i for i, t in enumerate(operands)}
    apart = len(numbers) == len(operands) and 0 not in numbers
    complete = tape.complete and apart and bool(tape.launches)
    places = [numbers.get(t.data_ptr(), -1) - len(inputs) for t in results]
    if not complete or min(places) < 0:
        return None
    if any(tape.outputs[i].numel() != t.numel() for i, t in zip(places, results, strict=True)):
        return None
    starts = {address: (number, 0) for address, number in numbers.items()}
    for view, whole in tape.views:
        start = whole.data_ptr()
        starts[view.data_ptr()] = numbers[start], view.data_ptr() - start
    steps = [_step(launch, starts) for launch in tape.launches]
    patched = {operand for *_, patches, _ in steps for operand, *_ in patches}
    rest = [i for i in range(len(operands)) if i not in patched]
    return (rest, tape.outputs, places, steps) if set(rest) <= {*fixed} else None


def _step(
    launch: tuple[Loaded, Arguments] | ByTorch | LibraryCall, starts: dict[int, tuple[int, int]]
) -> tuple[Any, ...]:
    """Return a launch, and its patches.

    starts  address -> number of an operand, and bytes from its start
    patch   both, and where the address is in the bytes of the arguments
    """
    if isinstance(launch, LibraryCall):
        image = launch.arguments
        return launch.function, 0, 0, 0, [], image, [], _patches(image, starts), None
    if isinstance(launch, ByTorch):
        weight = launch.b if isinstance(launch, MatrixProduct) and launch.fixed else None
        alpha = launch.alpha if isinstance(launch, MatrixProduct) else b""
        tensors = [t for t in launch if isinstance(t, Tensor) and t is not weight]
        return 0, 0, 0, 0, [], alpha, [], [(*starts[t.data_ptr()], 0) for t in tensors], weight
    loaded, (pointers, memory) = launch
    image, base = bytes(memory), ctypes.addressof(memory)
    parameters = [pointer - base for pointer in pointers]
    attributes = [n for n, on in ((COOPERATIVE, loaded.together), (EARLY, loaded.early)) if on]
    shape = loaded.grid, loaded.threads, loaded.shared_bytes
    return loaded.kernel.ptr, *shape, attributes, image, parameters, _patches(image, starts), None


def _patches(image: bytes, starts: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(*start, at) for address, start in starts.items() for at in _find(image, address)]


def _find(image: bytes, address: int) -> Iterable[int]:
    """Yield where an address is in the bytes of arguments; structs may start anywhere."""
    word = address.to_bytes(8, "little")
    at = image.find(word)
    while at >= 0:
        yield at
        at = image.find(word, at + 1)


class PythonNode(torch.autograd.Function):
    """Y [..., n] = run(X [..., k]) without torch's dispatcher, which takes 100 µs."""

    @staticmethod
    def forward(
        ctx: Any,
        signature: Signature,
        derivative: Derivative,
        run: Callable[[Tensor], Tensor],
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        _, _, _, needs_bias, *needed = ctx.needs_input_grad
        products = [p for p in signature.numbers if any(needed[i] for i in p[1])]
        indices = {i for reads, _ in products for i in reads}
        ctx.save_for_backward(*(t if i in indices else None for i, t in enumerate(operands)))
        ctx.derivative = derivative
        ctx.bias_dtype = bias.dtype if bias is not None and needs_bias else None
        x = operands[0]
        return unflatten(run(rows_of(x)), x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, _, *needed = ctx.needs_input_grad
        gradients: Sequence[Tensor | None] = [None] * len(needed)
        dbias = None
        if any(needed):
            gradients = ctx.derivative(None, dy, ctx.saved_tensors, needed)
        if (dtype := ctx.bias_dtype) is not None:
            leading = [*range(dy.dim() - 1)]  # an empty list would sum over all dimensions
            dbias = dy.sum(leading, dtype=dtype) if leading else dy.to(dtype)
        return None, None, None, dbias, *gradients


# Function.apply looks for torch.func's wrappers first, which callers of `node` have done.
node: Callable[..., Tensor] = super(torch.autograd.Function, PythonNode).apply
"""(signature, derivative, run, bias, *operands) -> run(rows of X), which adds the bias.

operands  X, and the tensors that the Signature holds; they have gradients
"""

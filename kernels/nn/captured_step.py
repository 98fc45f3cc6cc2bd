"""A training step that captures itself: after two calls it is one CUDA graph, and the host is free.

    step = CapturedStep(model, optimizer, loss)      loss(model, *inputs) is a scalar
    for inputs in batches:
        value = step(*inputs)

    call 1, 2       eager, on a stream of its own: plans, tuning, the optimizer's state
    call 3          zero_grad, loss, backward and optimizer.step are captured, and replayed
    later calls     inputs are copied into the graph's, and it is replayed

A graph contains addresses and numbers. So each call asks whether they are what they were at its
capture: parameters, buffers and the optimizer's state by address, patterns of block-sparse layers
by what is written into them, the optimizer's settings, autocast, and who is in training mode. If
not, all graphs are dropped, and this call is call 1. A learning rate that changes at every step
should be a tensor on the device, which torch's schedulers write into. Inputs of other sizes have a
graph of their own. On a CPU every call is eager.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels.nn._bsr_pattern import Pattern, pattern_of
from sparsebench.kernels.nn._sharded import is_sharded
from sparsebench.kernels.nn.linear import BlockSparseLinear

EAGER = 2  # calls before a capture


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    value: Tensor
    gradients: list[Tensor | None]


class CapturedStep:
    """A training step as a CUDA graph, for one GPU. Raises Unsupported for a model on several.

    The optimizer must be one that torch captures: SGD, or another with `capturable=True`. What is
    captured must not wait for the device. After a call, `.grad` of each parameter is that of the
    call; inputs have no gradient.
    """

    _graphs: dict[Hashable, _Graph]  # by the sizes of inputs
    _calls: dict[Hashable, int]
    _last: _Graph | None  # whose gradients the parameters have
    _fixed: Any  # the state that all graphs contain
    _kept: list[Pattern]  # whose lists graphs read

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor],
    ) -> None:
        """Capture nothing yet."""
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self._modules = [*model.modules()]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if isinstance(model, nn.parallel.DistributedDataParallel) or any(
            is_sharded(p) for p in self._parameters
        ):
            raise Unsupported(f"expected a model on one GPU, found {type(model).__name__}")
        self._captures = self._parameters[0].is_cuda
        self._stream: torch.cuda.Stream | None = None
        self._forget()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Take a step; return the loss, a scalar without a gradient. Raises Unsupported."""
        if not self._captures:
            return self._step(inputs)
        sizes = tuple((t.shape, t.dtype, t.device) for t in inputs)
        if self._graphs and self._state() != self._fixed:
            self._forget()
        found = self._graphs.get(sizes)
        if found is None:
            calls = self._calls[sizes] = self._calls.get(sizes, 0) + 1
            if calls <= EAGER:
                return self._aside(lambda: self._step(inputs))
            found = self._captured(inputs)
            self._fixed, self._kept = self._state(), [*self._patterns()]
            self._graphs[sizes] = found
        if found is not self._last:
            for parameter, gradient in zip(self._parameters, found.gradients, strict=True):
                parameter.grad = gradient
            self._last = found
        for mine, given in zip(found.inputs, inputs, strict=True):
            mine.copy_(given)
        found.graph.replay()
        return found.value.clone()

    def _step(self, inputs: tuple[Tensor, ...]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        value = self.loss(self.model, *[t.detach() for t in inputs])
        value.backward()
        self.optimizer.step()
        return value.detach()

    def _aside(self, function: Callable[[], Tensor]) -> Tensor:
        """Run on a stream of its own, as torch asks for before a capture."""
        now = torch.cuda.current_stream()
        aside = self._stream = self._stream or torch.cuda.Stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            value = function()
        now.wait_stream(aside)
        value.record_stream(now)
        return value

    def _captured(self, inputs: tuple[Tensor, ...]) -> _Graph:
        mine = tuple(t.detach().clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with capturing(graph):
            value = self._step(mine)
        return _Graph(graph, mine, value, [p.grad for p in self._parameters])

    def _forget(self) -> None:
        self._graphs, self._calls, self._kept = {}, {}, []
        self._last = self._fixed = None

    def _patterns(self) -> Iterator[Pattern]:
        for module in self._modules:
            if isinstance(module, BlockSparseLinear):
                yield pattern_of(module.offsets, module.columns)

    def _state(self) -> Any:
        """Return all that a graph contains, but for its inputs."""
        states, groups = self.optimizer.state.values(), self.optimizer.param_groups
        return (
            [id(pattern) for pattern in self._patterns()],  # of patterns that `_kept` holds
            [t.data_ptr() for m in self._modules for t in _own(m)],
            [t.data_ptr() for state in states for t in state.values() if isinstance(t, Tensor)],
            [_setting(group[name]) for group in groups for name in group if name != "params"],
            [m.training for m in self._modules],
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        )


def _own(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _setting(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value

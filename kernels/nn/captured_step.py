"""A training step that captures itself: its third call makes a CUDA graph, which frees the host.

    step = CapturedStep(model, optimizer, loss)      loss(model, *inputs) is a scalar
    for inputs in batches:
        value = step(*inputs)

    calls 1, 2      eager, on a separate stream: plans, tuning, the optimizer's state
    call 3          captures zero_grad, loss, backward and optimizer.step, and replays them
    later calls     copy the inputs into those of the graph, and replay it

A graph contains addresses and numbers, so each call checks that they are the same as at the
capture: the addresses of parameters, buffers and optimizer state, the patterns of block-sparse
layers, the optimizer's settings, autocast, and the training mode of each module. If one differs,
all graphs are dropped, and the call counts as call 1. A learning rate that changes in every step
should be a tensor on the device, which torch's schedulers write into. Inputs of other sizes get
another graph. On a CPU every call is eager.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels.nn._bsr_pattern import PlannedPattern, pattern_of
from sparsebench.kernels.nn._sharded import is_sharded
from sparsebench.kernels.nn.linear import BlockSparseLinear

EAGER = 2  # calls before a capture


class CapturedGraph(NamedTuple):
    """A captured step: its graph, the inputs and loss that it holds, and all gradients."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    value: Tensor
    gradients: list[Tensor | None]


class CapturedStep:
    """A training step as a CUDA graph, for one GPU. Raises Unsupported for a model on several.

    The optimizer must be capturable by torch: SGD, or another one with `capturable=True`. The step
    must not wait for the device. After a call, each parameter's `.grad` is that of the call; inputs
    have no gradient.
    """

    _graphs: dict[Hashable, CapturedGraph]  # by the sizes of the inputs
    _calls: dict[Hashable, int]
    _last: CapturedGraph | None  # the graph whose gradients the parameters hold
    _captured_state: Any
    _used_patterns: list[PlannedPattern]  # keeps the lists that graphs read

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor],
    ) -> None:
        """Prepare the step without capturing it."""
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
        if self._graphs and self._state() != self._captured_state:
            self._forget()
        graph = self._graphs.get(sizes)
        if graph is None:
            calls = self._calls[sizes] = self._calls.get(sizes, 0) + 1
            if calls <= EAGER:
                return self._on_side_stream(lambda: self._step(inputs))
            graph = self._graphs[sizes] = self._capture(inputs)
            self._captured_state, self._used_patterns = self._state(), [*self._patterns()]
        if graph is not self._last:
            for parameter, gradient in zip(self._parameters, graph.gradients, strict=True):
                parameter.grad = gradient
            self._last = graph
        for buffer, tensor in zip(graph.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        graph.graph.replay()
        return graph.value.clone()

    def _step(self, inputs: tuple[Tensor, ...]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        value = self.loss(self.model, *[t.detach() for t in inputs])
        value.backward()
        self.optimizer.step()
        return value.detach()

    def _on_side_stream(self, function: Callable[[], Tensor]) -> Tensor:
        """Run on a separate stream, as torch requires before a capture."""
        current = torch.cuda.current_stream()
        side = self._stream = self._stream or torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            value = function()
        current.wait_stream(side)
        value.record_stream(current)
        return value

    def _capture(self, inputs: tuple[Tensor, ...]) -> CapturedGraph:
        buffers = tuple(t.detach().clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with capturing(graph):
            value = self._step(buffers)
        return CapturedGraph(graph, buffers, value, [p.grad for p in self._parameters])

    def _forget(self) -> None:
        self._graphs, self._calls, self._used_patterns = {}, {}, []
        self._last = self._captured_state = None

    def _patterns(self) -> Iterator[PlannedPattern]:
        for module in self._modules:
            if isinstance(module, BlockSparseLinear):
                yield pattern_of(module.offsets, module.columns)

    def _state(self) -> Any:
        """Return everything that a graph contains except its inputs."""
        states, groups = self.optimizer.state.values(), self.optimizer.param_groups
        return (
            [id(pattern) for pattern in self._patterns()],  # unique, as `_used_patterns` keeps them
            [t.data_ptr() for m in self._modules for t in _tensors(m)],
            [t.data_ptr() for state in states for t in state.values() if isinstance(t, Tensor)],
            [_setting(group[name]) for group in groups for name in group if name != "params"],
            [m.training for m in self._modules],
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _setting(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value

"""CapturedStep: on a CPU with a stand-in that repeats the step, and on a GPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsebench.errors import Unsupported
from sparsebench.kernels.nn.captured_step import CapturedGraph
from sparsebench.nn import BlockSparseLinear, CapturedStep

K = 64


class Replayed(CapturedStep):
    """A stand-in for a GPU: the graph repeats the step, and captures and replays are counted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._captures, self.captures, self.replays = True, 0, 0

    def _on_side_stream(self, function: Callable[[], Tensor]) -> Tensor:
        return function()

    def _capture(self, inputs: tuple[Tensor, ...]) -> CapturedGraph:
        buffers, value, outer = tuple(t.clone() for t in inputs), torch.zeros(()), self
        self.captures += 1

        class Graph:
            def replay(self) -> None:
                outer.replays += 1
                value.copy_(outer._step(buffers))

        return CapturedGraph(Graph(), buffers, value, [p.grad for p in self._parameters])


def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), target)


def make(kind: Any = Replayed, **options: Any) -> tuple[CapturedStep, Callable[..., Tensor]]:
    """Return a step that captures itself, and a plain step of an equal model."""
    model = nn.Sequential(BlockSparseLinear(K, K, block=16, sparsity=0.5, **options), nn.Dropout(0))
    twin = copy.deepcopy(model)
    steps = []
    for module in (model, twin):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        steps.append((module, optimizer, loss))
    plain = CapturedStep(*steps[1])
    plain._captures = False
    return kind(*steps[0]), plain


def batch(tokens: int = 8, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, K, device=device), torch.randn(tokens, K, device=device)


def test_steps_equal_those_of_a_plain_loop():
    step, plain = make()
    for number in range(6):
        inputs = batch()
        torch.testing.assert_close(step(*inputs), plain(*inputs))
        assert (step.captures, step.replays) == (number > 1, max(0, number - 1))
        for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a.grad, b.grad)  # of the last call


def test_each_size_has_its_own_graph():
    step, plain = make()
    for number in range(12):
        inputs = batch(8 + 4 * (number % 2))
        torch.testing.assert_close(step(*inputs), plain(*inputs))
    assert (step.captures, step.replays) == (2, 8)


def other_pattern(step: CapturedStep) -> None:
    torch.manual_seed(1)
    other = BlockSparseLinear(K, K, block=16, sparsity=0.75)
    step.model[0].set_pattern(other.offsets, other.columns)
    step.optimizer.state.clear()


def write_into_the_index(step: CapturedStep) -> None:
    torch.manual_seed(1)
    other = BlockSparseLinear(K, K, block=16, sparsity=0.5)
    step.model[0].columns.copy_(other.columns)
    step.model[0].offsets.copy_(other.offsets)


def other_rate(step: CapturedStep) -> None:
    step.optimizer.param_groups[0]["lr"] = 0.05


def load_the_optimizer(step: CapturedStep) -> None:
    step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))


def move_the_weights(step: CapturedStep) -> None:
    step.originals = [p.data for p in step.model.parameters()]  # so that no address is reused
    for p in step.model.parameters():
        p.data = p.data.clone()


CHANGES = [
    other_pattern,
    write_into_the_index,
    other_rate,
    load_the_optimizer,
    lambda step: step.model.eval(),
    move_the_weights,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_a_graph_contains_captures_it_again(change):
    step, plain = make()
    for number in range(10):
        if number == 5:
            change(step)
            change(plain)
        inputs = batch()
        torch.testing.assert_close(step(*inputs), plain(*inputs))
    assert (step.captures, step.replays) == (2, 6)


def test_a_step_on_a_cpu_is_eager():
    step, plain = make(CapturedStep)
    for _ in range(4):
        inputs = batch()
        assert torch.equal(step(*inputs), plain(*inputs))


def test_a_model_on_several_gpus_is_refused():
    step, _ = make()
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(Unsupported, match="DistributedDataParallel"):
        CapturedStep(model, step.optimizer, loss)


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_a_gpu_replays_the_same_steps(change):
    step, plain = make(CapturedStep, device="cuda")
    for number in range(10):
        if number == 5:
            change(step)
            change(plain)
        inputs = batch(device="cuda")
        torch.testing.assert_close(step(*inputs), plain(*inputs), rtol=1e-3, atol=1e-4)
    assert len(step._graphs) == 1

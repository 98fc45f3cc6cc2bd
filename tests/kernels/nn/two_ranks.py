"""Checks of layers on two ranks, one process each: gloo on the CPU, or nccl on two GPUs.

Both ranks call every function whose name begins with `check_`, in alphabetical order.
"""

import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sparsebench.errors import FormatError
from sparsebench.kernels.nn import (
    BlockSparseLinear,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)
from sparsebench.kernels.nn._bsr_pattern import index_of

RANKS = 2
WAIT = timedelta(seconds=60)
N, K, HIDDEN, BLOCK = 256, 192, 320, 64


def device() -> torch.device:
    """Return this rank's GPU if there are two, else the CPU."""
    enough = torch.cuda.device_count() >= RANKS
    return torch.device("cuda", dist.get_rank()) if enough else torch.device("cpu")


def dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def make(seed: int, sparsity: float = 0.5, **options: Any) -> nn.Sequential:
    """Return a model of both trainable layers, with pattern and weights drawn from this seed."""
    torch.manual_seed(seed)
    more: dict[str, Any] = {"device": device(), "dtype": dtype(), **options}
    return nn.Sequential(
        BlockSparseLinear(K, N, block=BLOCK, sparsity=sparsity, **more),
        SparseGatedMLP(N, HIDDEN, slots=HIDDEN // 4, **more),
        BlockSparseLinear(N, K, block=(BLOCK, 2 * BLOCK), sparsity=sparsity, **more),
    )


def inputs() -> Tensor:
    """Return the inputs of all ranks; on GPUs with enough tokens for the Hopper kernels."""
    torch.manual_seed(17)
    tokens = 512 if device().type == "cuda" else 8
    return torch.randn(RANKS * tokens, K).to(device(), dtype())


def local(x: Tensor) -> Tensor:
    return x.chunk(RANKS)[dist.get_rank()]


def train(
    model: nn.Module, x: Tensor, steps: int = 2, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    """Train by SGD. The loss is a mean over tokens, so the mean over ranks is the overall mean."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (60 * model(x).float().square().mean()).backward()  # changes all weights by percents
        optimizer.step()
    return optimizer


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def assert_near(actual: Tensor, expected: Tensor, what: str = "y") -> None:
    actual, expected = whole(actual).detach().double(), expected.detach().double()
    eps = 1e-4 if dtype() == torch.float32 else 0.03 if what == "y" else 0.01
    error = (actual - expected).norm()
    assert error <= eps * expected.norm(), f"{what}: off by {error}"


def assert_same_model(actual: nn.Module, expected: nn.Module) -> None:
    """Compare all parameters and buffers, and Y."""
    tensors = dict(expected.state_dict())
    for name, t in actual.state_dict().items():
        assert_near(t, tensors[name], name)
    x = inputs()
    with torch.no_grad():
        assert_near(actual(x), expected(x), "y")


def patterns(model: nn.Module) -> list[BlockSparseLinear]:
    return [layer for layer in model.modules() if isinstance(layer, BlockSparseLinear)]


def sharded(model: nn.Module) -> nn.Module:
    """Shard each layer, and the model."""
    mesh = init_device_mesh(device().type, (RANKS,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def refused(function: Callable[[], Any], message: str) -> None:
    """Expect a FormatError with this message, on both ranks."""
    raised = "nothing"
    try:
        function()
    except FormatError as error:
        raised = str(error)
    assert message in raised, f"expected a FormatError: {message}; found {raised}"


# ---- DistributedDataParallel ----


def check_ddp_gives_all_ranks_the_pattern_of_the_first() -> None:
    """The second rank used to be off by 2.5."""
    model, x = make(seed=dist.get_rank()), inputs()
    model(local(x))  # both ranks have plans
    ddp = DistributedDataParallel(model)
    expected = make(seed=0)
    assert_same_model(model, expected)
    train(ddp, local(x))
    train(expected, x)
    assert_same_model(model, expected)


def check_ddp_refuses_another_pattern_until_wrapped_again() -> None:
    model, expected, other, x = make(seed=1), make(seed=1), make(seed=2, sparsity=0.75), inputs()
    ddp = DistributedDataParallel(model)
    before = copy.deepcopy(model.state_dict())

    def change(module: nn.Module) -> None:
        for layer, source in zip(patterns(module), patterns(other), strict=True):
            layer.set_pattern(source.offsets, source.columns)
            layer.values.data.copy_(source.values)

    train(ddp, local(x), steps=1)
    model.load_state_dict(before)
    message = "DistributedDataParallel"
    refused(lambda: change(model), message)
    refused(lambda: model.load_state_dict(other.state_dict()), message)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name
    del ddp
    change(model)
    change(expected)
    train(DistributedDataParallel(model), local(x))
    train(expected, x)
    assert_same_model(model, expected)


# ---- fully_shard ----


def check_fsdp_trains_as_one_process_does() -> None:
    model, expected, x = sharded(make(seed=3)), make(seed=3), inputs()
    train(model, local(x))
    train(expected, x)
    assert_same_model(model, expected)


def check_full_and_sharded_state_dicts_restore_a_model() -> None:
    x = inputs()
    model = sharded(make(seed=4))
    optimizer = train(model, local(x))
    for full in (True, False):
        options = StateDictOptions(full_state_dict=full)
        state = get_model_state_dict(model, options=options)
        moments = get_optimizer_state_dict(model, optimizer, options=options)
        assert isinstance(state["0.values"], DTensor) != full
        other = sharded(make(seed=5))
        optimizer_of_other = train(other, local(x), steps=1)
        set_model_state_dict(other, state, options=options)
        set_optimizer_state_dict(other, optimizer_of_other, moments, options=options)
        with torch.no_grad():
            assert_near(other(x), model(x))
        for name, t in model.state_dict().items():
            assert torch.equal(whole(other.state_dict()[name]), whole(t)), name


def check_a_checkpoint_loads_with_and_without_fsdp() -> None:
    x, folder = inputs(), Path(os.environ["SHARED"]) / "checkpoint"
    model = sharded(make(seed=6))
    train(model, local(x))
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    for other in (sharded(make(seed=7)), make(seed=7)):
        state = get_model_state_dict(other)
        checkpoint.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state)
        with torch.no_grad():
            assert_near(other(x), model(x))


def check_a_full_state_dict_is_broadcast_from_the_first_rank() -> None:
    x, source = inputs(), make(seed=8)
    state = source.state_dict() if not dist.get_rank() else {}
    model = sharded(make(seed=9))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    with torch.no_grad():
        assert_near(model(x), source(x))


def check_a_model_on_meta_is_sharded_then_filled() -> None:
    x, source = inputs(), make(seed=10)
    model = sharded(make(seed=11, device="meta"))
    model.to_empty(device=device())
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    y = model(local(x))
    assert y.isfinite().all()
    assert y.abs().sum() > 0
    state = get_model_state_dict(source)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    with torch.no_grad():
        assert_near(model(x), source(x))


def check_ranks_that_disagree_on_a_pattern_are_refused() -> None:
    message = "one index on all ranks"
    refused(lambda: sharded(make(seed=dist.get_rank())), message)
    filled = sharded(make(seed=dist.get_rank(), device="meta"))
    filled.to_empty(device=device())
    refused(patterns(filled)[0].reset_parameters, message)
    model, other = sharded(make(seed=12)), make(seed=dist.get_rank())
    layer, source = patterns(model)[0], patterns(other)[0]
    refused(lambda: layer.set_pattern(source.offsets, source.columns), message)


def check_fsdp_accepts_another_pattern_of_as_many_blocks() -> None:
    x = inputs()
    model, expected, other = sharded(make(seed=13)), make(seed=13), make(seed=14)
    train(model, local(x), steps=1)
    train(expected, x, steps=1)
    model.reshard()
    for layer, twin, source in zip(*map(patterns, (model, expected, other)), strict=True):
        moved = layer.set_pattern(source.offsets, source.columns)
        assert torch.equal(moved, twin.set_pattern(source.offsets, source.columns))
        few = index_of(torch.eye(*layer._grid, dtype=torch.bool, device=device()))
        refused(lambda: layer.set_pattern(*few), "fully_shard")  # noqa: B023
    assert_same_model(model, expected)


def check_spense_layers_are_sharded_and_restored() -> None:
    torch.manual_seed(0)
    two_four = torch.randn(N, K) * torch.tensor([1, 0, 1, 0]).repeat(K // 4)
    h = 2 * N
    weights = [torch.randn(s) * torch.tensor([0, 1, 1, 0]).repeat(s[1] // 4) for s in MLP_SHAPES]
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        linear = SpenseLinear.from_dense(two_four.bfloat16(), bias=torch.randn(N), dtype=kind)
        largest = {"largest": 3.0} if kind == torch.float8_e4m3fn else {}
        mlp = SpenseGatedMLP.from_dense(
            *(w.bfloat16() for w in weights), dense=0, dtype=kind, **largest
        )
        assert mlp.hidden_features == h
        source = nn.Sequential(linear, mlp).to(device())
        empty = nn.Sequential(
            SpenseLinear(K, N, dtype=kind), SpenseGatedMLP(N, h, dense=0, dtype=kind)
        ).to(device())
        model, other, x = sharded(copy.deepcopy(source)), sharded(empty), inputs().bfloat16()
        with torch.no_grad():
            assert torch.equal(model(x), source(x))
            for full in (True, False):
                options = StateDictOptions(full_state_dict=full)
                state = get_model_state_dict(model, options=options)
                set_model_state_dict(other, state, options=options)
                assert torch.equal(other(x), source(x))


MLP_SHAPES = (2 * N, N), (2 * N, N), (N, 2 * N)  # gate, up, down


# ---- both ranks ----


CHECKS = {name: check for name, check in sorted(globals().items()) if name.startswith("check_")}


def rank(number: int, folder: str) -> None:
    """Call the checks until one fails, which ends the other rank, too."""
    torch.set_num_threads(1)
    warnings.resetwarnings()  # pytest makes torch's warnings errors
    os.environ["SHARED"] = folder
    backend = "nccl" if torch.cuda.device_count() >= RANKS else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(number)
    start = f"file://{folder}/start"
    dist.init_process_group(backend, init_method=start, rank=number, world_size=RANKS, timeout=WAIT)
    for name, check in CHECKS.items():
        try:
            check()
            dist.barrier()
        except BaseException as error:
            error.add_note(f"in {name} on rank {number}")
            raise
    dist.destroy_process_group()


def run() -> None:
    """Call all checks on two ranks. Raises the error of the first that fails."""
    how = "spawn" if torch.cuda.is_available() else "fork"  # imports take seconds
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(rank, (folder,), nprocs=RANKS, start_method=how)


if __name__ == "__main__":
    run()

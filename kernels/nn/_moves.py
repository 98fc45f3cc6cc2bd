"""What layers must know of optimizers, DistributedDataParallel and fully_shard.

    optimizers              the state of the values moves with the blocks; new blocks get zeros
    DistributedDataParallel averages gradients position by position, and never compares patterns,
                            so a layer within it keeps its pattern; to wrap it again sends one
    fully_shard             shards are gathered before blocks move, and sharded again after

The first two do not register with their parameters, so they are found among the objects of the
garbage collector: one search takes about 17 ms in a process with 200,000 objects.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsebench.formats._format import require


def repack(blocks: Tensor, source: Tensor) -> Tensor:
    """Return [new blocks, ...]: block i is the old block source[i], or zeros if source[i] is -1."""
    if not len(blocks):
        return blocks.new_zeros(len(source), *blocks.shape[1:])
    source = source.to(blocks.device)
    absent = (source < 0).view(-1, *(1,) * (blocks.dim() - 1))
    return blocks[source.clamp(min=0)].masked_fill_(absent, 0)


@contextmanager
def _all_objects() -> Iterator[None]:
    """Show the garbage collector's functions what gc.freeze hides from them."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def state_moves(values: nn.Parameter, source: Tensor) -> Callable[[], None]:
    """Return a function that moves the optimizers' state of a layer's values.

    source  int64 [new blocks], the old position of each block, or -1

    Raises FormatError if an optimizer has state that does not belong to single blocks.
    """
    with _all_objects():
        owners = gc.get_referrers(values) if values.requires_grad else []
    states = [owner[values] for owner in owners if isinstance(owner, dict) and values in owner]
    moves = [
        (state, name, tensor)
        for state in states  # of one optimizer each, by parameter
        if isinstance(state, dict)
        for name, tensor in state.items()
        if _by_block(str(name), tensor, values)
    ]

    def move() -> None:
        after = [repack(gather_shards(tensor), source) for *_, tensor in moves]
        for (state, name, tensor), moved in zip(moves, after, strict=True):
            if moved.shape == tensor.shape:  # a CUDA graph may hold the address
                tensor.copy_(shard_like(moved, tensor))
            else:
                state[name] = moved

    return torch.no_grad()(move)


def _by_block(name: str, state: Any, values: nn.Parameter) -> bool:
    """Return whether state has a part for each block; False for a number, such as a step."""
    tensors = state if isinstance(state, list | tuple) else [state]
    if not any(isinstance(t, Tensor) and t.numel() > 1 for t in tensors):
        return isinstance(state, Tensor) and state.shape == values.shape
    matches = isinstance(state, Tensor) and state.dim() > 1 and len(state) == len(values)
    fits = matches and state.is_floating_point()
    layout = [*state.shape] if isinstance(state, Tensor) else type(state).__name__
    expected = f"expected state in floating point with a part for each of {len(values)} blocks"
    actual = f"found {layout}: make the optimizer after set_pattern"
    require(fits, f"an optimizer's {name}: {expected}, {actual}")
    return True


# ---- ranks ----


def require_outside_ddp(layer: nn.Module) -> None:
    """Raise FormatError if a DistributedDataParallel contains the layer."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and _in_ddp(layer):
        gc.collect()  # one that was dropped may be part of a cycle
        advice = "take the module out, set the pattern, and wrap it again"
        expected = "expected a layer outside of DistributedDataParallel for another pattern"
        require(not _in_ddp(layer), f"{expected}, found one inside: {advice}")


def _in_ddp(layer: nn.Module) -> bool:
    with _all_objects():
        objects = gc.get_objects()
    parallel = {t for t in {*map(type, objects)} if issubclass(t, DistributedDataParallel)}
    wrapped = [thing.module for thing in objects if type(thing) in parallel]
    return any(module is layer for whole in wrapped for module in whole.modules())


# ---- tensors that FSDP2 has divided among ranks (DTensor), and an index that all must share ----


def is_sharded(tensor: Any) -> bool:
    """Return whether this is a DTensor, without an import of torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh")


def gather_shards(tensor: Any) -> Tensor:
    """Return the whole tensor. If it is a DTensor, all ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard a tensor that every rank has in the same way as `like`, without communication."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate() for _ in like.placements]
    whole = DTensor.from_local(tensor, like.device_mesh, replicated, run_check=False)
    return whole.redistribute(like.device_mesh, like.placements)


def require_one_index(values: Any, offsets: Tensor, columns: Tensor) -> None:
    """Raise FormatError on every rank unless all ranks of the values' mesh have the same index."""
    mesh, digest = values.device_mesh, sha256()
    for index in (offsets, columns):
        digest.update(index.cpu().numpy().tobytes())
    number = int.from_bytes(digest.digest()[:7])
    extremes = torch.tensor([number, -number], device=mesh.device_type)
    for dim in range(mesh.ndim):  # after the last dimension, the maxima of all ranks
        maximum = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(extremes, maximum, group=mesh.get_group(dim))
    largest, smallest = extremes.tolist()
    advice = "build the layer from the same seed, pattern or checkpoint on every rank"
    require(largest == -smallest, f"expected one index on all ranks, found several: {advice}")

"""Keep optimizers and other ranks consistent when set_pattern moves the blocks of a layer.

    optimizers              the state of the values moves with the blocks; new blocks get zeros
    DistributedDataParallel every rank must move the same blocks: it averages gradients position by
                            position, and never compares values

Neither registers with its parameters, so both are found among the objects of the garbage collector:
one search takes about 17 ms in a process with 200,000 objects.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsebench.formats._format import require
from sparsebench.kernels.nn._sharded import gather_shards, shard_like

WAIT = timedelta(seconds=60)  # for the other ranks to call set_pattern, too


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


def require_same_moves(
    layer: nn.Module, offsets: Tensor, columns: Tensor, values: Tensor | None
) -> None:
    """Raise FormatError on every rank of a layer's DDP unless all set this index and these values.

    Also raises it if another rank does not call set_pattern within WAIT. Uses the store of the
    process group, because a collective would pair with those of other ranks that do not call.
    """
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return
    for group in _groups(layer):
        ranks = tuple(dist.get_process_group_ranks(group))
        _compare(ranks, _digest(offsets, columns, values))


def _groups(layer: nn.Module) -> Iterator[Any]:
    """Yield the process groups of the DistributedDataParallel modules that contain a layer."""
    with _all_objects():
        objects = gc.get_objects()
    parallel = {t for t in {*map(type, objects)} if issubclass(t, DistributedDataParallel)}
    for ddp in [thing for thing in objects if type(thing) in parallel]:
        if any(module is layer for module in ddp.module.modules()):
            yield ddp.process_group


def _digest(offsets: Tensor, columns: Tensor, values: Tensor | None) -> str:
    digest = sha256()
    for index in (offsets, columns):
        digest.update(index.cpu().numpy().tobytes())
    if values is not None:
        bits = values.contiguous().view(torch.uint8).flatten().long()
        weights = torch.arange(len(bits), device=bits.device) % 65521 + 1
        digest.update(str(int((bits * weights).sum())).encode())
    return digest.hexdigest()


_CALLS = Counter[tuple[int, ...]]()


def _compare(ranks: tuple[int, ...], digest: str) -> None:
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, call = torch.distributed.get_rank(), _CALLS[ranks]
    _CALLS[ranks] += 1
    prefix = f"sparsebench/set_pattern/{ranks}"
    keys = [f"{prefix}/{call}/{other}" for other in ranks]
    store.set(f"{prefix}/{call}/{rank}", digest)
    if call > 1:
        store.delete_key(f"{prefix}/{call - 2}/{rank}")  # all ranks have read it
    expected = f"set_pattern: expected a call with one index and the same values on ranks {ranks}"
    try:
        store.wait(keys, WAIT)
    except RuntimeError:
        require(False, f"{expected}, found ranks that did not call it within {WAIT.seconds} s")
    digests = {store.get(key) for key in keys}
    require(len(digests) == 1, f"{expected}, found {len(digests)} different ones")

"""Tensors that FSDP2 has divided among ranks (DTensor), and an index that all ranks must share.

A DTensor is recognized by its mesh, so that processes without one never import
torch.distributed.tensor.
"""

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import require


def is_sharded(tensor: Any) -> bool:
    """Return whether this is a DTensor."""
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

"""Tensors that FSDP2 has divided among ranks (DTensor), and an index that all ranks must share.

A DTensor is known by its mesh, so that a process without it never imports torch.distributed.tensor.
"""

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import require


def is_sharded(tensor: Any) -> bool:
    """Say whether this is a DTensor."""
    return hasattr(tensor, "device_mesh")


def unsharded(tensor: Any) -> Tensor:
    """Return the whole tensor; all ranks must call it if this is a DTensor."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def as_sharded(tensor: Tensor, like: Any) -> Tensor:
    """Divide a tensor that every rank has as another one is divided; no rank sends anything."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    whole = [Replicate() for _ in like.placements]
    made = DTensor.from_local(tensor, like.device_mesh, whole, run_check=False)
    return made.redistribute(like.device_mesh, like.placements)


def require_one_index(values: Any, offsets: Tensor, columns: Tensor) -> None:
    """Raise FormatError on every rank unless all ranks of the values' mesh have the same index."""
    mesh, digest = values.device_mesh, sha256()
    for index in (offsets, columns):
        digest.update(index.cpu().numpy().tobytes())
    number = int.from_bytes(digest.digest()[:7])
    largest = torch.tensor([number, -number], device=mesh.device_type)
    for dim in range(mesh.ndim):  # of all ranks after the last one
        maximum = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(largest, maximum, group=mesh.get_group(dim))
    most, least = largest.tolist()
    seed = "expected one index on all ranks, found several: build the layer with one seed"
    require(most == -least, f"{seed}, pattern or checkpoint")

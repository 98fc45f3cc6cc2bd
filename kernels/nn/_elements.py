"""Block masks of elements that a model computes in its forward pass.

    elements    [batch, lists, S_q, S_kv]    bool, or 0 and large negative numbers to add to scores

A traced forward pass has no values, so the operators of attention take the elements, and list the
blocks when they first see them (_attention_op.py):

    in Python                  those that there are: `mask_of_elements`, which waits for the device
    on a GPU, by an operator   into shared plans (_shared_plans.py), without waiting

Lists are made once for all layers of a model, until torch counts a write to the elements. A
call that does not wait cannot raise an error about values: see `refused_rows`.
"""

from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import make_lasting
from sparsebench.kernels._common.stamp import StampedValue
from sparsebench.kernels._common.torch_operator import torch_operator

ELEMENTS, TOKEN = "_sparsebench_elements", "_sparsebench_token"  # attributes of the tensor
HIDDEN = -9e3  # of a mask to add; transformers takes -1e4, -9984 in bf16, or the least number


def stamp_of_elements(elements: Tensor) -> Hashable:
    """Return what changes if the elements may have; None in torch.inference_mode, uncounted."""
    if elements.is_inference():
        return None
    token = elements.__dict__.get(TOKEN)
    if not isinstance(token, StampedValue):  # a copy of the tensor has another type here
        token = StampedValue((), [], None)
        setattr(elements, TOKEN, token)
    return token, elements._version, elements.data_ptr()


@torch.inference_mode(False)  # torch counts no writes to tensors that are made in that mode
def mask_of_elements(elements: Tensor, block: int) -> BlockMask:
    """Return the mask of [batch, lists, S_q, S_kv]; the same one until the tensor is written.

    elements  bool; or floating point: 0 for what is allowed, and HIDDEN or less for the rest

    Raises Unsupported for other values.
    """
    stamp = stamp_of_elements(elements), block
    entry = elements.__dict__.get(ELEMENTS)
    if isinstance(entry, StampedValue) and entry.stamp == stamp:
        stored: BlockMask = entry.value
        return stored
    allowed = elements
    if elements.dtype != torch.bool:
        allowed = elements == 0
        if bool(_refused(elements).any()):
            expected = f"a mask of bool, or of 0 and numbers below {HIDDEN:g}"
            raise Unsupported(f"attention: expected {expected}, found a bias")
    mask = BlockMask.from_elements(allowed.contiguous(), block)
    if stamp[0] is not None:
        setattr(elements, ELEMENTS, StampedValue(stamp, [], mask))
    return mask


def refused_rows(elements: Tensor, heads: int) -> Tensor | None:
    """Return the queries with a value that `mask_of_elements` refuses: their output is NaN.

    bool [batch, S_q, heads, 1]; None if the values are bool, or on a CPU, where they are checked
    """
    if not elements.is_cuda or elements.dtype == torch.bool:
        return None
    rows = _refused(elements).any(3).transpose(1, 2)
    return rows.repeat_interleave(heads // rows.shape[2], 2)[..., None]


def _refused(elements: Tensor) -> Tensor:
    return ~((elements == 0) | (elements <= HIDDEN))


@lru_cache(16)
@torch.inference_mode(False)
def whole_mask(
    tokens: tuple[int, int], block: int, batch: int, causal: bool, device: torch.device
) -> BlockMask:
    """Return the mask that allows every element, or every one of the causal rule."""
    rows, columns = (-(-size // block) for size in tokens)
    cells = torch.ones(batch * rows, columns, device=device)
    options: dict[str, Any] = {"block": block, "tokens": [*tokens], "batch": batch}
    return make_lasting(lambda: BlockMask.from_dense(cells, causal=causal, **options), device)


@torch.inference_mode(False)
def _counted_copy(elements: Tensor) -> Tensor:
    """Return a copy to which torch counts writes, also in torch.inference_mode."""
    return elements.clone(memory_format=torch.contiguous_format)


_like = partial(torch.empty_like, memory_format=torch.contiguous_format)
counted_copy = torch_operator("counted_copy", _counted_copy, _like)

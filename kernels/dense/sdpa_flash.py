"""Dense attention by the flash backend of torch, which is FlashAttention 2.

It does not read the mask. On Hopper it is slower than cuDNN (sdpa_cudnn.py); on older GPUs it is
the baseline.
"""

from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels.dense import _sdpa


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )


def _gradients(
    tensors: tuple[Tensor, ...], results: Any, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    _, _, q_starts, k_starts, q_most, k_most, seed, offset, _ = results
    rest = (q_starts, k_starts, q_most, k_most, 0.0, causal, seed, offset)
    parts: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *tensors, *rest, scale=scale
    )
    return parts


KERNEL = _sdpa.forward_kernel(_attend)
BACKWARD = _sdpa.backward_kernel(_attend, _gradients)

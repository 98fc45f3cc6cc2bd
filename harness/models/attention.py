"""Block-sparse attention for transformers: the attention implementation "sparsebench".

    import sparsebench.nn
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="sparsebench")

A model's own window, such as Mistral's, becomes absent blocks. `config.sparse_window` gives a
window to a model without one: a token then attends to this many tokens, including itself. The mask
is built once for each forward pass of the model, and all layers share it and its plans.

Building a mask takes a bool for each pair of a query and a key of one sequence: 268 MB at 16k
tokens. Dropout, soft caps, sinks and biases of scores raise Unsupported.
"""

from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.nn.attention import attention

NAME = "sparsebench"
BLOCK = 64  # queries and keys of a block
REFUSED = "softcap", "s_aux", "position_bias"  # arguments that change scores


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of)


def mask_of(*, mask_function: Any, config: Any = None, **sizes: Any) -> BlockMask:
    """Return the mask that transformers describes by a function of positions and by sizes."""
    from transformers.masking_utils import and_masks, sdpa_mask, sliding_window_overlay

    if window := getattr(config, "sparse_window", None):
        mask_function = and_masks(mask_function, sliding_window_overlay(window))
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    sizes = {**sizes, **skips, "local_size": None}
    allowed = sdpa_mask(mask_function=mask_function, **sizes)
    assert allowed is not None  # no skip is allowed
    return BlockMask.from_elements(allowed, BLOCK)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return O [batch, tokens, H, D] of query, key and value [batch, heads, tokens, D].

    attention_mask  a result of `mask_of`, or bool elements, or elements of 0 and negative numbers

    Raises Unsupported.
    """
    refused = [name for name in REFUSED if options.get(name) is not None]
    if dropout or refused:
        names = ", ".join([*refused, *(["dropout"] if dropout else [])])
        raise Unsupported(f"attention {NAME}: expected plain scores, found {names}")
    if attention_mask is None:
        raise Unsupported(f"attention {NAME}: expected a mask, found none")
    if isinstance(attention_mask, Tensor):
        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        whole = query.shape[0], -1, query.shape[2], -1
        attention_mask = BlockMask.from_elements(allowed.expand(whole).contiguous(), BLOCK)
    keys = attention_mask.tokens[1]
    k, v = (x[:, :, :keys].transpose(1, 2) for x in (key, value))
    return attention(query.transpose(1, 2), k, v, attention_mask, scale=scaling), None

"""Block-sparse attention for transformers: the attention implementation "sparsebench".

    import sparsebench.nn
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="sparsebench")

A model's own window, such as Mistral's, becomes absent blocks. `config.sparse_window` gives a
window to a model without one: a token then attends to this many tokens, including itself. A mask of
the caller, [batch, 1, S_q, S_kv], is taken as it is.

`config.sparse_select = {"keep": 16, "block": 64}`, or with "mass": 0.9, lets each block of queries
of a prompt select its blocks of keys (sparsebench.select_attention). Blocks have 64 keys if it
gives no "block". {"method": "xattention", "mass": 0.9, "stride": 8} names a method of that function
and its options; "first" and "last" are the method's, if not given. It needs whole causal prompts
without padding. A compiled model also needs a cache: without one, transformers makes a mask of
packed sequences. In a model that also has layers without a window, as Gemma, those with one select
nothing.

With "keep", and any method, decoding selects as many keys by the bounds of pages of at most `block`
keys, from a static cache whose length is a multiple of 16 (static_cache.py), also if it is
compiled. Otherwise decoding, and other calls of up to `block` queries with a mask, attend to all
keys.

transformers makes the mask as a tensor, a bool for each pair of a query and a key of one sequence:
268 MB at 16k tokens. So it passes through caches, compiled calls and hooks as any mask does. The
operator of attention lists its blocks once for each forward pass of the model, and all layers share
the lists and their plans.

Dropout, soft caps, sinks and biases of scores raise Unsupported, and so does a model that computes
attention itself, such as Bloom and Swin.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sparsebench._discovery import did_you_mean, unknown
from sparsebench.errors import Unsupported
from sparsebench.harness.models import static_cache
from sparsebench.kernels.nn._elements import counted_copy
from sparsebench.kernels.nn.attention import METHODS, attention_of_elements, select_attention

NAME = "sparsebench"
BLOCK = 64  # queries and keys of a block
POOLED = "pooled"
SELECT = {"method": POOLED, "keep": None, "mass": None, "block": BLOCK}  # of sparse_select
SIZES = "keep", "mass", "block", "first", "last"
REFUSED = "softcap", "s_aux", "position_bias"  # arguments that change scores


def register() -> None:
    """Offer the name, and refuse it for models that would ignore it."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of)
    for method in ("get_correct_attn_implementation", "set_attn_implementation"):
        setattr(PreTrainedModel, method, _checked(getattr(PreTrainedModel, method)))


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of PreTrainedModel that sets an implementation, and first checks the model.

    transformers logs a line at most, and a window would then be ignored.
    """

    @wraps(method)
    def checked(model: Any, name: Any, *args: Any, **options: Any) -> Any:
        if name == NAME:
            for part in (model, *model.modules()):
                if not getattr(part, "_can_set_attn_implementation", lambda: True)():
                    expected = f'"{NAME}": expected a model of transformers\' AttentionInterface'
                    actual = f"found {type(part).__name__}, which computes attention itself"
                    raise Unsupported(f"attn_implementation {expected}, {actual}")
        return method(model, name, *args, **options)

    return checked


def mask_of(*, mask_function: Any, config: Any = None, **sizes: Any) -> Tensor | None:
    """Return the elements that transformers describes by a function of positions and by sizes.

    None with sparse_select, if they are those of the causal rule.
    """
    from transformers.masking_utils import and_masks, sdpa_mask, sliding_window_overlay

    if window := getattr(config, "sparse_window", None):
        mask_function = and_masks(mask_function, sliding_window_overlay(window))
    skips: dict[str, Any] = {"allow_is_bidirectional_skip": False}
    if window or not getattr(config, "sparse_select", None):  # else a whole prompt needs no mask
        skips |= {"allow_is_causal_skip": False, "local_size": None}
    allowed: Any = sdpa_mask(mask_function=mask_function, **{**sizes, **skips})
    if allowed is None:
        return None
    traced = torch.compiler.is_dynamo_compiling()  # such code cannot ask for its mode
    elements: Tensor = counted_copy(allowed) if traced or allowed.is_inference() else allowed
    return elements


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return O [batch, tokens, H, D] of query, key and value [batch, heads, tokens, D].

    attention_mask  [batch, 1 or heads, S_q, S_kv]: bool, or 0 and large negative numbers. Without
                    one, all elements are allowed, or those of the causal rule, as SDPA decides

    Raises Unsupported.
    """
    refused = [name for name in REFUSED if options.get(name) is not None]
    if dropout or refused:
        names = ", ".join([*refused, *(["dropout"] if dropout else [])])
        raise Unsupported(f"attention {NAME}: expected plain scores, found {names}")
    config, queries = getattr(module, "config", None), query.shape[2]
    window = getattr(config, "sparse_window", None)
    if window and not torch.compiler.is_compiling():
        _require_window(module, attention_mask)
    local = bool(options.get("sliding_window"))
    mixed = local and "full_attention" in (getattr(config, "layer_types", None) or ())
    selection, causal = {} if mixed else _selection(config), False
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(causal) and queries > 1
        keys = queries if causal else key.shape[2]
    else:
        size = query.shape[0], attention_mask.shape[1], queries, attention_mask.shape[3]
        if attention_mask.shape != size:
            attention_mask = attention_mask.expand(size)
        keys = size[3]
    if selection and selection["keep"] and not local:  # the keys of a window move in their cache
        o = _over_pages(query, key, value, attention_mask, causal, selection, scaling)
        if o is not None:
            return o, None
    q, k, v = query.transpose(1, 2), *(x[:, :, :keys].transpose(1, 2) for x in (key, value))
    if selection and causal and queries > _bound(selection):
        if selection["keep"]:
            blocks = -(-queries // selection["block"])
            selection["keep"] = min(selection["keep"], blocks)
        return select_attention(q, k, v, causal=True, scale=scaling, **selection), None
    if selection and attention_mask is not None and queries > selection["block"]:
        few = f"{selection['block']} queries at most"
        expected = f"whole causal prompts without padding or window, or {few}"
        raise Unsupported(f"sparse_select: expected {expected}; found a mask of {queries}")
    options = {"block": BLOCK, "causal": causal, "scale": scaling}
    return attention_of_elements(q, k, v, attention_mask, **options), None


def _over_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    selection: dict[str, Any],
    scale: float | None,
) -> Tensor | None:
    """Add what a call appends to the pages of a static cache, and attend to them if it decodes."""
    queries = query.shape[2]
    prompt = causal and key.shape[2] > queries  # of a cache that has room for more
    if prompt and not torch.compiler.is_compiling():
        static_cache.make_pages(key, selection["block"])
    pages = static_cache.pages_of(key)
    if pages is None or not (prompt or (mask is not None and mask.shape[1] == 1)):
        return None
    if mask is None:
        lengths = pages.table.new_full((len(key),), queries)
        static_cache.append(pages, key, lengths, queries)
        return None
    allowed = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
    static_cache.append(pages, key, static_cache.lengths_of(allowed), queries)
    if queries > 1:
        return None
    return static_cache.decode(pages, query, key, value, allowed, selection, scale)


def _selection(config: Any) -> dict[str, Any]:
    """Return the options of select_attention that a config has; none without sparse_select."""
    if not (value := getattr(config, "sparse_select", None)):
        return {}
    fields = value if isinstance(value, dict) else {}
    name = fields.get("method", POOLED)
    if isinstance(name, str) and name not in METHODS:  # a downloaded file imports no other package
        raise Unsupported(f"sparse_select: method: {unknown('a method', name, METHODS)}")
    method = METHODS[name if isinstance(name, str) else POOLED]
    options = {**SELECT, "first": method.first, "last": method.last}
    if wrong := [key for key in fields if key not in options and key not in method.options]:
        names = [*options, *method.options]
        close = did_you_mean(str(wrong[0]), names)
        expected = f"{', '.join(names)} with {name}, found {wrong[0]!r}{close}"
        raise Unsupported(f"sparse_select: expected {expected}")
    options |= fields
    if not isinstance(name, str) or not _is_selection(options):
        such = 'sparse_select such as {"method": "pooled", "keep": 16, "mass": 0.9, "block": 64}'
        raise Unsupported(f"attention {NAME}: expected {such}, found {value!r}")
    return options


def _is_selection(options: dict[str, Any]) -> bool:
    """Return whether these are options of select_attention, whatever the length of a prompt."""
    keep, mass, block, first, last = (options[name] for name in SIZES)
    whole = all(type(n) is int and n >= 0 for n in (keep or 0, block, first, last))
    if not whole or block == 0 or (keep is not None and keep < max(1, first + last)):
        return False
    return keep is not None if mass is None else type(mass) in (int, float) and 0 < mass <= 1


def _bound(selection: dict[str, Any]) -> int:
    """Return the most queries of a prompt that keeps all of its blocks, whatever their scores."""
    forced = selection["first"] + selection["last"]
    blocks = selection["keep"] if selection["mass"] is None else forced
    return int(blocks * selection["block"])


def _require_window(module: Any, attention_mask: Tensor | None) -> None:
    """Raise Unsupported if transformers makes no mask for a module, and so none with the window."""
    file = vars(sys.modules.get(type(module).__module__, object))
    makers = (name for name in file if name.startswith("create_") and "mask" in name)
    if attention_mask is None or not any(makers):
        kind = type(module).__name__
        raise Unsupported(f"attention {NAME}: expected a mask for sparse_window, {kind} makes none")

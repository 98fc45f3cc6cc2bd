"""Block-sparse attention as a function of tensors.

    o = sparsebench.attention(q, k, v, mask)

The mask lists the blocks of keys that each block of queries attends to (formats/block_mask.py). The
first call with a mask and sizes plans its kernels, and may time some (_attention_op.py); the
plans stay with the mask, so reuse it. A mask whose blocks are selected on the device
(`BlockMask.from_scores`, `select_attention`) may change in each call: all masks of its sizes share
the plans. Gradients flow to q, k and v. Calls can be compiled and captured.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench._discovery import load, package_names
from sparsebench.errors import Unsupported
from sparsebench.formats._format import require_whole
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.tape import current_tape
from sparsebench.kernels._common.transforms import is_traced
from sparsebench.kernels.attention.methods._method import FOLDER, Method
from sparsebench.kernels.nn._attention_op import (
    arguments_of,
    attend,
    attend_on_tape,
    attend_recorded,
    recordings_of,
    require_operands,
)
from sparsebench.kernels.nn._elements import mask_of_elements, whole_mask
from sparsebench.kernels.nn._whole_calls import whole_call


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float | None = None
) -> Tensor:
    """Return softmax(scale Q K.T) V over the elements that a mask allows, shaped like q.

    q      [batch, S_q, H, D], or [S_q, H, D] for one sequence; fp16, bf16 or fp32
    k, v   [batch, S_kv, H_kv, D], or [S_kv, H_kv, D]; H is a multiple of H_kv
    mask   for the same sequences and tokens; H is a multiple of its lists
    scale  factor of the scores, above 0; by default D ** -0.5

    torch.autocast casts q, k and v. The output of a query without an allowed key is 0. A block that
    no query selects affects no result, even if it holds NaN. Calls with one mask share counters, so
    they must not overlap on the device: each stream needs a mask of its own. Raises Unsupported.
    """
    o, _ = _results(q, k, v, mask, scale)
    return o[0] if q.dim() == 3 else o


METHODS: dict[str, Method] = {name: load(FOLDER, name) for name in sorted(package_names(FOLDER))}
"""Methods that select blocks, by name; load(FOLDER, name) also finds those of other packages."""


def select_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: int | None = None,
    mass: float | None = None,
    method: str = "pooled",
    block: int | None = None,
    causal: bool = False,
    first: int | None = None,
    last: int | None = None,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """Return `attention` over the blocks of keys that a method scores highest.

    q, k, v, scale  as for `attention`, [batch, tokens, heads, D]
    keep            most blocks of keys of a block of queries, `first` and `last` included
    mass            a block of queries keeps the fewest blocks whose weights add up to this: a
                    softmax of the method's scores. At most `keep`, if that is given
    method          how blocks are scored: a file of kernels/attention/methods, with its formula
                        pooled      mean query by mean key, for each KV head; pool="mean" or "max",
                                    or pooled_q=None, pooled_k=None [batch, H_kv, blocks, D]
                        xattention  sums of antidiagonals, for each head; stride=16, norm=1.0
                        vsa         cubes of a video, and a coarse branch; video=None, gate=None
                        nsa, moba   the selected branch of `nsa_attention`, and `moba_attention`:
                                    for each query
    block           queries and keys of a block: 128 by default, 64 for vsa and nsa, 512 for moba
    first, last     blocks that are kept in any case: those that the queries see first and last; 1
                    and 1 by default, none for vsa, 1 and 2 for nsa, 0 and 1 for moba
    options         of the method

    Scores are in fp32, and the choice has no gradient. A block of queries selects by all its
    queries, so with `causal` a selection, but no key, depends on later tokens of the same blocks.
    A block whose score is NaN is selected only as one of the first or the last. Waits for the
    device only in the first two calls of new sizes, which plan and record (_whole_calls.py).
    Raises Unsupported, FormatError, and SuiteError for a method that does not exist.
    """
    how = METHODS.get(method) or load(FOLDER, method)
    options |= {"method": method, "keep": keep, "mass": mass, "causal": causal, "scale": scale}
    options["block"] = how.block if block is None else block
    options["first"] = how.first if first is None else first
    options["last"] = how.last if last is None else last
    call = partial(whole_call, _select) if how.launches else _select
    return call(*cast(q, k, v), **options)


def _select(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: str,
    block: int,
    causal: bool,
    scale: float | None,
    keep: int | None,
    mass: float | None,
    first: int,
    last: int,
    **options: Any,
) -> Tensor:
    """Return `select_attention` of operands that autocast leaves as they are."""
    how = METHODS.get(method) or load(FOLDER, method)
    require_whole("block", block)
    require_operands(q, k, v, (*q.shape[:2], *k.shape[1:2]), 1, q.device)
    if not q.numel() or not k.numel():
        shapes = f"q {list(q.shape)}, k {list(k.shape)}"
        raise Unsupported(f"select_attention: expected at least one sequence, found {shapes}")
    how.require(method, options)
    factor = factor_of(q, scale)
    bounds: dict[str, Any] = {"mass": mass, "first": first, "last": last, "causal": causal}
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        scored = how.score(q, k, v, scale=factor, block=block, causal=causal, **options)
        tokens, sides = [scored.q.shape[1], scored.k.shape[1]], [how.queries or block, block]
        grid: dict[str, Any] = {"block": sides, "tokens": tokens, "keys": scored.keys}
        mask = BlockMask.from_scores(scored.scores, keep, **bounds, **grid)
        return scored.finish(attention(scored.q, scored.k, scored.v, mask, scale=scale))


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return `attention`, and the natural logarithm of each row's sum, fp32 [batch, H, S_q].

    Rows without an allowed key have -inf. The second result has no gradient; [H, S_q] for one
    sequence. Raises Unsupported.
    """
    o, lse = _results(q, k, v, mask, scale)
    lse = lse.view(o.shape[0], o.shape[2], o.shape[1])
    return (o[0], lse[0]) if q.dim() == 3 else (o, lse)


def attention_of_elements(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    elements: Tensor | None,
    *,
    block: int,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return `attention` of q, k and v [batch, tokens, heads, D] over elements in blocks.

    elements  [batch, lists, S_q, S_kv], bool or as `mask_of_elements` takes them. Without them, all
              are allowed, or with `causal` those up to each query; then S_q is S_kv

    A call that is traced or captured waits for no value of the elements. If it runs on a GPU, the
    output of a query with a value that `mask_of_elements` refuses is NaN. Raises Unsupported.
    """
    shape = (q.shape[0], 1, q.shape[1], k.shape[1]) if elements is None else elements.shape
    batch, lists, *tokens = shape
    queries, keys = tokens
    device = q.device if elements is None else elements.device
    q, k, v = cast(q, k, v)
    require_operands(q, k, v, (batch, queries, keys), lists, device)
    if causal and queries != keys:
        raise Unsupported(f"attention: expected as many keys as queries, found {tokens}")
    if is_traced() or (elements is not None and is_capturing(q)):
        sizes = [*tokens, block, block, batch, lists, int(causal), 0, 0]
        arrays = [] if elements is None else [elements]
        o: Tensor = attend(q, k, v, arrays, sizes, factor_of(q, scale))[0]
        return o
    if elements is None:
        mask = whole_mask((queries, keys), block, batch, causal, device)
    else:
        mask = mask_of_elements(elements, block)
    return attention(q, k, v, mask, scale=scale)


def _results(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return O [batch, S_q, H, D] and the LSE [batch * H, S_q]. Raises Unsupported."""
    q, k, v = (x.unsqueeze(0) if x.dim() == 3 else x for x in (q, k, v))
    if not isinstance(mask, BlockMask):
        kind = f"{type(mask).__module__}.{type(mask).__name__}"
        raise Unsupported(f"attention: expected sparsebench's BlockMask, found {kind}")
    q, k, v = cast(q, k, v)
    given = scale if scale is None else float(scale)
    if not torch.compiler.is_compiling() and current_tape() is not None:
        require_operands(q, k, v, (mask.batch, *mask.tokens), mask.lists, mask.columns.device)
        o, lse = attend_on_tape(q, k, v, mask, factor_of(q, given))
        return o, lse
    by_call = mask.keep and mask.bits is not None  # a recorded call reads the columns alone
    eager = q.is_cuda and not torch.compiler.is_compiling() and not by_call
    recordings = recordings_of(mask, given) if eager else None
    if recordings is not None:
        fast = recordings.replay(*arguments_of(mask, q, k, v))
        if fast is not None:
            o, lse = fast
            return o, lse
    require_operands(q, k, v, (mask.batch, *mask.tokens), mask.lists, mask.columns.device)
    return attend_recorded(recordings, q, k, v, mask, factor_of(q, given))


def factor_of(q: Tensor, scale: float | None) -> float:
    """Return the factor of the scores: `scale`, or SDPA's. Raises Unsupported."""
    factor: float = q.shape[3] ** -0.5 if scale is None else scale
    if not 0 < factor < torch.inf:
        raise Unsupported(f"attention: expected a scale above 0, and finite, found {scale}")
    return factor


def cast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Return the operands in the dtype of torch.autocast, as SDPA takes them, if it is on."""
    device = operands[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch raises for meta
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in operands)

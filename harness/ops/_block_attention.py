"""Attention over the blocks of a mask, shared by the ops of attention.py.

    q, o, do   [batch * m, heads * D]             token-major: heads of a token side by side
    k, v       [batch * context, kv_heads * D]    head h reads KV head h * kv_heads // heads
    lse        [batch * heads, m]                 natural log of the sum of exponentials, fp32
    mask       [batch * lists * q_blocks, kv_blocks]  cells of ones and zeros (formats/block_mask)

A mask is expanded to elements for a few queries of one head at a time, because all elements would
take 34 GB for 32 heads and 32k tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from sparsebench.formats._blocks import areas
from sparsebench.formats._format import sides_of
from sparsebench.harness.inputs.grid import Stack
from sparsebench.harness.ops._op import Fields, Sample, Values, require_field, require_groups
from sparsebench.results.record import Problem

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores that are held at once: on a GPU they take 512 MB in fp64."""
CHEAP = 1 << 30  # pairs of a query and a key whose fp64 answer takes an H100 about 0.1 s
FEW = 256  # heads of all sequences: each takes about 1 ms even if it has few pairs
SHARE = 8  # one in so many KV heads is in a sample, and one at least
# If at most so large a share of a mask is present, a part has ROWS queries at most, and only the
# keys that one of them selects: 16 to 20 % of 128k keys if each block keeps 2 %.
SPARSE, ROWS = 1 / 8, 512
STEPS = 16  # a causal part has 1/16 of the queries or ROWS: then 6 % of all pairs are in the future


class AttentionFields(Fields):
    """A problem of attention: `batch` sequences of m queries and `context` keys each.

    context   keys of a sequence; None means m
    block     queries and keys of a block of the mask
    causal    a query sees the keys up to its own position; the last query is at the last key
    lists     "heads": each head has its own list of blocks; "kv_heads": the heads of a KV head
              share one; "one": all heads share one
    scale     factor of the scores; None means head_dim ** -0.5
    video     frames, rows and columns of a video with m tokens, for the pattern video_window
    sparsity  fraction of absent blocks; if causal, among the blocks that are not in the future
    """

    dtype: Literal["fp16", "bf16", "fp32"]
    m: PositiveInt
    context: PositiveInt | None = None
    batch: PositiveInt = 1
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    causal: bool = False
    lists: Literal["heads", "kv_heads", "one"] = "heads"
    scale: float | None = Field(default=None, gt=0)
    video: Annotated[list[PositiveInt], Field(min_length=3, max_length=3)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError for heads that cannot be grouped."""
        require_groups(self.heads, self.kv_heads)
        of_m = not self.video or prod(self.video) == self.m
        require_field(of_m, f"video as factors of m, {self.m}", self.video)
        return self


def sizes(fields: Values) -> dict[str, Any]:
    """Return the fields, the sizes of the operands, and the geometry of the masks."""
    (m, context), (b_q, b_k) = tokens_of(fields), sides_of(fields["block"])
    batch, heads, kv_heads = fields["batch"], fields["heads"], fields["kv_heads"]
    frames = fields.get("video")
    video = (frames[0], frames[1], frames[2]) if frames else None
    lists = {"heads": heads, "kv_heads": kv_heads, "one": 1}[fields["lists"]]
    return {
        **fields,
        "queries": batch * m,
        "keys": batch * context,
        "q_width": heads * fields["head_dim"],
        "kv_width": kv_heads * fields["head_dim"],
        "lse_rows": batch * heads,
        "mask_rows": batch * lists * -(-m // b_q),
        "kv_blocks": -(-context // b_k),
        "masks": Stack(batch * lists, (m, context), (b_q, b_k), fields["causal"], video),
    }


def tokens_of(fields: Values) -> tuple[int, int]:
    """Return the queries and the keys of a sequence."""
    return fields["m"], fields["context"] or fields["m"]


def format_params(fields: Values) -> dict[str, Any]:
    """Return the parameters of formats/block_mask for a problem's mask."""
    block, tokens = list(sides_of(fields["block"])), list(tokens_of(fields))
    return {"block": block, "tokens": tokens} | {name: fields[name] for name in ("batch", "causal")}


def full(problem: Problem) -> dict[str, int]:
    """Return the elements and the keys of a mask without absent blocks; see `counts`."""
    m, context = tokens_of(problem.fields)
    pairs = m * context
    if problem["causal"]:  # the last query has all keys, the first all but the later queries' own
        before = max(context - m, 0)
        pairs = (context * (context + 1) - before * (before + 1)) // 2
    return {
        "mask": problem["batch"] * problem["heads"] * pairs,
        "keys": problem["batch"] * problem["kv_heads"] * context,
    }


def counts(problem: Problem, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Count what a mask allows.

    mask  allowed pairs of a query and a key, summed over sequences and query heads
    keys  keys that a query selects, summed over sequences and KV heads
    """
    mask, fields = weights["mask"], dict[str, Any](problem.fields)
    area = areas(tokens_of(fields), sides_of(fields["block"]), fields["causal"], mask.device)
    lists = (mask != 0).view(-1, *area.shape)
    elements = sum(int(area[present].sum()) for present in lists)
    return {
        "mask": elements * problem["heads"] * problem["batch"] // len(lists),
        "keys": int(selected_keys(mask, fields).sum()),
    }


class HeadPart(NamedTuple):
    """Some queries of one head of one sequence, and all keys that they may see.

    q, kv   index of the queries in q, and of the keys and values in k and v
    row     index of the queries in lse
    first   how many of the first keys each query sees
    hidden  bool [queries, keys - first]: which of the other keys each query does not see
    """

    q: tuple[slice, slice]
    kv: tuple[slice | Tensor, slice]
    row: tuple[int, slice]
    first: int
    hidden: Tensor

    @property
    def blind(self) -> Tensor:
        """Return which queries see no key, bool [queries, 1]."""
        return self.hidden.all(-1, True) & (self.first == 0)

    def hide(self, table: Tensor, value: float) -> Tensor:
        """Overwrite the elements of hidden keys in a table [queries, keys], and return it."""
        table[:, self.first :].masked_fill_(self.hidden, value)
        return table


def cells_of(mask: Tensor, fields: Values) -> Tensor:
    """Return the blocks of a mask, bool [batch, lists, q_blocks, kv_blocks]."""
    rows = -(-fields["m"] // sides_of(fields["block"])[0])
    return (mask != 0).view(fields["batch"], -1, rows, mask.shape[1])


def selected_keys(mask: Tensor, fields: Values) -> Tensor:
    """Return which keys some query of a KV head selects, bool [batch, context, kv_heads].

    With the causal rule, a block's keys count up to the last one that a query of its rows sees.
    """
    (m, context), (b_q, b_k) = tokens_of(fields), sides_of(fields["block"])
    cells, keys = cells_of(mask, fields), torch.arange(context, device=mask.device)
    ahead = context - m if fields["causal"] else context  # query q sees keys up to q + ahead
    ends = (torch.arange(b_q, m + b_q, b_q, device=mask.device).clamp(max=m) + ahead).int()
    batch, groups = fields["batch"], min(cells.shape[1], fields["kv_heads"])
    of_blocks = (cells * ends[:, None]).reshape(batch, groups, -1, mask.shape[1]).amax(2)
    by_group = keys < of_blocks[:, :, keys // b_k]
    return by_group.repeat_interleave(fields["kv_heads"] // groups, 1).mT


def without_unselected(mask: Tensor, fields: Values, *tensors: Tensor) -> list[Tensor]:
    """Return K and V with zeros in the keys that no query selects.

    A sum over all keys of a sequence multiplies those by 0, and 0 times NaN is NaN.
    """
    heads = fields["kv_heads"]
    unselected = ~selected_keys(mask, fields).reshape(-1, heads, 1)
    return [x.view(len(x), heads, -1).masked_fill(unselected, 0).view(x.shape) for x in tensors]


def parts(mask: Tensor, fields: Values) -> Iterator[HeadPart]:
    """Yield all queries of all heads, ELEMENTS pairs at a time."""
    (m, context), (b_q, b_k) = tokens_of(fields), sides_of(fields["block"])
    heads, kv_heads, width = fields["heads"], fields["kv_heads"], fields["head_dim"]
    cells, each_key = cells_of(mask, fields), torch.arange(context, device=mask.device)
    lists, sparse, full = cells.shape[1], bool(cells.float().mean() <= SPARSE), bool(cells.all())
    ahead = context - m if fields["causal"] else context  # query q sees keys up to q + ahead
    most = ROWS if sparse else max(ROWS, m // STEPS) if fields["causal"] else m + b_q
    most = min(most, ELEMENTS[mask.device.type] // context)  # and rounded down to whole blocks
    step = max(1, most // b_q) * b_q

    def columns(head: int) -> slice:
        return slice(head * width, (head + 1) * width)

    for b in range(fields["batch"]):
        for head in range(heads):
            of_head = cells[b, head * lists // heads]
            for start in range(0, m, step):
                end = min(start + step, m)
                rows = torch.arange(start, end, device=mask.device)
                keys = each_key[: max(0, end + ahead)]
                if sparse:
                    keys = keys[of_head[start // b_q : -(-end // b_q)].any(0)[keys // b_k]]
                first = max(0, min(start + ahead + 1, len(keys))) if full else 0
                hidden = keys[first:] > rows[:, None] + ahead
                if not full:
                    hidden |= ~of_head[rows // b_q][:, keys // b_k]
                at = b * context
                of_kv = at + keys if sparse else slice(at, at + len(keys))
                of_q = slice(b * m + start, b * m + end), columns(head)
                row = b * heads + head, slice(start, end)
                of_kv_head = of_kv, columns(head * kv_heads // heads)
                yield HeadPart(of_q, of_kv_head, row, first, hidden)


class Heads(NamedTuple):
    """Some of the KV heads, and the query heads that read them."""

    kv: list[int]
    query: list[int]

    @classmethod
    def draw(cls, fields: Values, seed: int) -> Self:
        """Draw one in SHARE KV heads, at least one."""
        count = max(1, fields["kv_heads"] // SHARE)
        kv = sorted(Random(seed).sample(range(fields["kv_heads"]), count))
        group = fields["heads"] // fields["kv_heads"]
        return cls(kv, [head * group + i for head in kv for i in range(group)])


def in_columns(x: Tensor, every: int, some: list[int]) -> Tensor:
    """Return some heads of x [tokens, every * D]."""
    return x.view(len(x), every, -1)[:, some].flatten(1)


def in_rows(x: Tensor, every: int, some: list[int], outer: int) -> Tensor:
    """Return some heads of x [outer * every * rows, D]."""
    return x.view(outer, every, -1, x.shape[1])[:, some].reshape(-1, x.shape[1])


def sample(problem: Problem, operands: Mapping[str, Tensor], seed: int) -> Sample | None:
    """Return the problem of one in SHARE KV heads, with all tokens, if all heads take long."""
    fields, (m, context) = dict[str, Any](problem.fields), tokens_of(problem.fields)
    batch, heads, kv_heads = fields["batch"], fields["heads"], fields["kv_heads"]
    cheap = batch * heads * m * context <= CHEAP and batch * heads <= FEW
    if cheap or kv_heads == 1:
        return None
    some = Heads.draw(fields, seed)
    lists = {"heads": (heads, some.query), "kv_heads": (kv_heads, some.kv), "one": (1, [0])}
    operands_of_part = {
        name: in_columns(x, kv_heads, some.kv)
        if name in ("k", "v")
        else in_columns(x, heads, some.query)
        for name, x in operands.items()
        if name not in ("mask", "lse")
    }
    operands_of_part["mask"] = in_rows(operands["mask"], *lists[fields["lists"]], batch)
    if "lse" in operands:
        operands_of_part["lse"] = in_rows(operands["lse"], heads, some.query, batch)
    return Sample(
        seed,
        replace(problem, fields={**fields, "heads": len(some.query), "kv_heads": len(some.kv)}),
        operands_of_part,
        shape=(batch * m, heads * fields["head_dim"]),
        part=lambda out: in_columns(out, heads, some.query),
        text=f"KV heads {', '.join(map(str, some.kv))}",
    )


def scale_of(fields: Values) -> float:
    """Return the factor of the scores."""
    return float(fields["scale"] or fields["head_dim"] ** -0.5)


def scores(q: Tensor, k: Tensor, part: HeadPart, scale: float) -> Tensor:
    """Return the scores [queries, keys] of a part, -inf where a key is hidden."""
    return part.hide(torch.addmm(q.new_zeros(1), q, k.mT, beta=0, alpha=scale), -torch.inf)


def longest_sum(mask: Tensor, fields: Values) -> int:
    """Return the most keys that a query selects, at least 1."""
    most = int((mask != 0).sum(1).max()) * sides_of(fields["block"])[1]
    return max(min(most, tokens_of(fields)[1]), 1)


def queries_and_keys(problem: Problem, nnz: Mapping[str, int]) -> tuple[int, int]:
    """Return the elements of q, and those of the keys that some query selects."""
    queries = prod(problem[name] for name in ("batch", "m", "heads", "head_dim"))
    return queries, problem["head_dim"] * nnz["keys"]

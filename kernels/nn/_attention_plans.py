"""Offer the kernels of block-sparse attention for a mask, and plan the chosen one.

    Hopper, 16 bits
      forward    attention_wgmma, attention_triton
      backward   attention_wgmma_backward, attention_triton_backward
    GPU from compute capability 8.0, and TRITON_INTERPRET=1
      forward    attention_triton
      backward   attention_triton_backward
    any of these, up to 16 queries of a sequence
      forward    attention_split, attention_triton; not attention_wgmma, because binding it takes
                 the host 100 µs, which is longer than the call
    CPU          torch, with every element of the mask: a reference for small masks

selection.py chooses the fastest in a search, or else the first one in this list. All of them give
the same bits each time. Plans are made for a mask and the sizes of q, k and v. Calls of one plan
must run one after the other on the device, as they do on one stream, because some kernels keep
counters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.cuda import on_tape
from sparsebench.kernels._common.selection import Candidate, NoConfig, Operator, config_of
from sparsebench.kernels._common.triton import Template, choose_path, unsupported_row
from sparsebench.kernels._common.tuned_table import multiprocessors
from sparsebench.kernels.attention import (
    attention_split,
    attention_triton,
    attention_triton_backward,
    attention_wgmma,
    attention_wgmma_backward,
)
from sparsebench.kernels.attention._lists import (
    Lists,
    lists_of,
    shared_heads,
    transposed_lists_of,
)
from sparsebench.kernels.attention._shapes import Bound, Shape, table_sizes, unsupported
from sparsebench.results.record import Problem

OFFERED = 6  # configurations of one engine
KERNELS: dict[str, Any] = {
    "attention_split": attention_split,
    "attention_triton": attention_triton,
    "attention_triton_backward": attention_triton_backward,
    "attention_wgmma": attention_wgmma,
    "attention_wgmma_backward": attention_wgmma_backward,
}
ENGINES = tuple(KERNELS)


class Call(NamedTuple):
    """Sizes of q, k and v, and the factor of the scores. With the mask, they determine the plan."""

    op: Literal["attention", "attention_backward"]
    shape: Shape
    scale: float

    @property
    def problem(self) -> Problem:
        """Return what `unsupported` of a kernel reads."""
        fields: dict[str, Any] = {
            "dtype": self.shape.dtype,
            "head_dim": self.shape.head_dim,
            "scale": self.scale,
        }
        return Problem(self.op, fields)


class Mask:
    """A mask and what kernels derive from it, each once, for all their plans."""

    def __init__(self, mask: BlockMask) -> None:
        """Keep the mask."""
        self.mask = mask
        self._transposed: dict[int, Lists] = {}

    @cached_property
    def lists(self) -> Lists:
        """Return the lists of key blocks."""
        return lists_of(self.mask)

    def transposed(self, kv_heads: int) -> Lists:
        """Return the lists of query blocks."""
        if kv_heads not in self._transposed:
            self._transposed[kv_heads] = transposed_lists_of(self.mask, kv_heads)
        return self._transposed[kv_heads]


def operator_of(mask: BlockMask) -> Operator:
    """Return the plans of a mask."""
    owner, device = Mask(mask), mask.columns.device

    def problem(call: Call) -> dict[str, Any]:
        sizes = asdict(table_sizes(call.shape, mask))
        shape = call.shape
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        density = float(f"{sizes['density']:.2g}")
        kinds = {"causal": mask.causal, "bits": mask.bits is not None, "lists": mask.lists}
        return {"op": call.op, **heads, **kinds, **sizes, "density": density}

    def offer(call: Call, choice: Mapping[str, Any] | None) -> list[Iterator[Candidate]]:
        if device.type == "cpu" and not knobs.runtime.interpret:
            reference: Any = partial(_Torch, mask, call)
            return [iter([Candidate("torch", NoConfig(), reference)])]
        if reason := unsupported(call.problem, device):
            raise Unsupported(reason)
        names = [choice["kernel"]] if choice else engines_of(call, device)
        return [_candidates(name, call, owner, choice) for name in names]

    return Operator(ENGINES, offer, problem, device)


def engines_of(call: Call, device: torch.device) -> list[str]:
    """Return the kernels that may run a call, the likeliest first."""
    few = call.shape.q_tokens <= attention_split.MOST_QUERIES
    if call.op == "attention" and few:
        return ["attention_split", "attention_triton"]
    backward = "_backward" if call.op == "attention_backward" else ""
    names = [f"attention_wgmma{backward}", f"attention_triton{backward}"]
    if KERNELS[names[0]].unsupported(call.problem, device):
        return names[1:]
    return names


def _candidates(
    name: str, call: Call, owner: Mask, choice: Mapping[str, Any] | None
) -> Iterator[Candidate]:
    """Yield the configurations of one kernel, the likeliest first; only a choice's, if any."""
    kernel, shape, device = KERNELS[name], call.shape, owner.mask.columns.device
    shared = shared_heads(owner.mask, shape.heads, shape.kv_heads)
    if name.startswith("attention_wgmma"):
        product: Any = _Wgmma
        sizes: tuple[Any, ...] = (shape, shared)
    else:
        path = choose_path(None, unsupported_row(shape.head_dim, shape.itemsize), device)
        product, sizes = _Triton, (shape, shared, path)
        if name == "attention_split":
            sizes += (multiprocessors(device),)
    configs = [config_of(kernel, choice)] if choice else kernel.configurations(*sizes)
    for config in configs[:OFFERED]:
        yield Candidate(name, config, partial(product, kernel, call, owner, config))


class _Wgmma:
    """A kernel in CUDA C++ to call: it is bound at each call, and its order of work is kept."""

    code = pack = order = None

    def __init__(self, kernel: Any, call: Call, owner: Mask, config: Any) -> None:
        """Order the work of the kernel."""
        self.work = kernel.work_of(owner.mask, call.shape, config)
        rest = {"scale": call.scale, "config": config, "work": self.work}
        if call.op == "attention_backward":
            rest["separate"] = True  # torch demands that the results of an operator share no memory
        self.bound = partial(kernel.launch, mask=owner.mask, shape=call.shape, **rest)

    def run(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Return O and the LSE, or dQ, dK and dV, on torch's current stream."""
        if is_capturing(operands[0]):
            keep(self)
        bound: Bound[Any] = self.bound(operands)
        bound.program()
        on_tape(owners=(self,))  # `bound` puts what it has allocated on the tape
        return bound.outputs


class _Triton:
    """A Triton kernel to call, which is bound once."""

    pack = order = None

    def __init__(self, kernel: Any, call: Call, owner: Mask, config: Any) -> None:
        """Bind the kernel to tensors without data, which each call replaces."""
        shape = call.shape
        q_rows, kv_rows = shape.batch * shape.q_tokens, shape.batch * shape.kv_tokens
        dtype = DTYPE_OF[shape.dtype]

        def like(rows: int, columns: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device="meta")

        q, k = (
            like(rows, heads * shape.head_dim)
            for rows, heads in ((q_rows, shape.heads), (kv_rows, shape.kv_heads))
        )
        lists: Any
        operands, lists = [q, k, torch.empty_like(k)], owner.lists
        if call.op == "attention_backward":
            lse = like(shape.batch * shape.heads, shape.q_tokens, torch.float32)
            operands += [torch.empty_like(q), lse, torch.empty_like(q)]
            lists = lists, owner.transposed(shape.kv_heads)
        bound: Bound[Any] = kernel.launch(operands, owner.mask, shape, call.scale, config, lists)
        self.code = None
        self.template = Template([bound.program], bound.inputs, bound.outputs)

    def run(self, *operands: Tensor) -> list[Tensor]:
        """Return O and the LSE, or dQ, dK and dV, on torch's current stream."""
        if is_capturing(operands[0]):
            keep(self)
        return self.template(*operands)


DTYPE_OF = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _Torch:
    """Attention in torch with every element of the mask, on a CPU."""

    code = pack = order = None

    def __init__(self, mask: BlockMask, call: Call) -> None:
        """Expand the mask. Raises FormatError if it has too many elements."""
        self.call, self.allowed = call, mask.expand(call.shape.heads)
        self.unseen = ~self.allowed.any(2)[..., None]  # keys that no query of a head selects

    def run(self, *operands: Tensor) -> list[Tensor]:
        """Return O and the LSE, or dQ, dK and dV."""
        if self.call.op == "attention":
            return self._forward(*operands)
        return self._backward(*operands)

    def _by_head(self, x: Tensor) -> Tensor:
        """Return [batch, H, tokens, D] in fp32; key heads are repeated."""
        d, batch = self.call.shape.head_dim, self.call.shape.batch
        heads = x.unflatten(1, (-1, d)).unflatten(0, (batch, -1)).transpose(1, 2).float()
        repeated: Tensor = heads.repeat_interleave(self.call.shape.heads // heads.shape[1], 1)
        return repeated

    def _keys(self, x: Tensor) -> Tensor:
        """Return k or v by head; zeros, even for NaN, where no query selects a key."""
        return self._by_head(x).masked_fill(self.unseen, 0)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = self._by_head(q) @ self._keys(k).mT * self.call.scale
        return scores.masked_fill(~self.allowed, -torch.inf)

    def _flat(self, x: Tensor, like: Tensor) -> Tensor:
        """Return [batch, H, tokens, D] as rows of tokens; groups of heads are added."""
        heads = like.shape[1] // self.call.shape.head_dim
        grouped: Tensor = x.unflatten(1, (heads, -1)).sum(2)
        return grouped.transpose(1, 2).reshape(like.shape).to(like.dtype)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        scores = self._scores(q, k)
        lse = scores.logsumexp(-1)
        p = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
        return [self._flat(p @ self._keys(v), q), lse.flatten(0, 1)]

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor
    ) -> list[Tensor]:
        log_sum = lse.view(self.call.shape.batch, -1, lse.shape[1], 1)
        log_sum = log_sum.clamp(min=torch.finfo(lse.dtype).min)
        p = (self._scores(q, k) - log_sum).exp()
        of_do = self._by_head(do)
        delta = (of_do * self._by_head(o)).sum(-1, keepdim=True)
        ds = p * (of_do @ self._keys(v).mT - delta) * self.call.scale
        return [
            self._flat(ds @ self._keys(k), q),
            self._flat(ds.mT @ self._by_head(q), k),
            self._flat(p.mT @ of_do, v),
        ]

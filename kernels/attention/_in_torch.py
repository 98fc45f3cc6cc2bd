"""Attention and its gradients in torch, as a reference: what a CPU runs."""

import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine


class _Torch:
    """Attention in torch with every element of the mask, on a CPU."""

    def __init__(self, mask: BlockMask, call: AttentionCall) -> None:
        """Expand the mask. Raises FormatError if it has too many elements."""
        self.call, self.allowed = call, mask.expand(call.shape.heads)
        self.unseen = ~self.allowed.any(2)[..., None]  # keys that no query of a head selects

    def _by_head(self, x: Tensor) -> Tensor:
        """Return [batch, H, tokens, D] in fp32; key heads are repeated."""
        d, batch = self.call.shape.head_dim, self.call.shape.batch
        heads = x.unflatten(1, (-1, d)).unflatten(0, (batch, -1)).transpose(1, 2).float()
        repeated: Tensor = heads.repeat_interleave(self.call.shape.heads // heads.shape[1], 1)
        return repeated

    def _keys(self, x: Tensor) -> Tensor:
        """Return k or v by head; zeros, even for NaN, where no query selects a key."""
        return self._by_head(x).masked_fill(self.unseen, 0)

    def _flat(self, x: Tensor, like: Tensor) -> Tensor:
        """Return [batch, H, tokens, D] as rows of tokens; groups of heads are added."""
        heads = like.shape[1] // self.call.shape.head_dim
        grouped: Tensor = x.unflatten(1, (heads, -1)).sum(2)
        return grouped.transpose(1, 2).reshape(like.shape).to(like.dtype)

    def _weigh(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each key for each query, and the LSE."""
        scores = self._by_head(q) @ self._keys(k).mT * self.call.scale
        scores = scores.masked_fill(~self.allowed, torch.finfo(scores.dtype).min)
        lse = scores.logsumexp(-1).masked_fill(~self.allowed.any(-1), -torch.inf)
        return scores.softmax(-1).masked_fill(~self.allowed, 0), lse

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return O and the LSE."""
        p, lse = self._weigh(q, k)
        return [self._flat(p @ self._keys(v), q), lse.flatten(0, 1)]

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
        """Return dQ, dK and dV; the rest are O, the LSE and dO."""
        (p, _), do = self._weigh(q, k), self._by_head(rest[-1])
        dp = do @ self._keys(v).mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * self.call.scale
        dk, dv = ds.mT @ self._by_head(q), p.mT @ do
        return [self._flat(ds @ self._keys(k), q), self._flat(dk, k), self._flat(dv, v)]


def _in_torch(w: ListedMask, call: AttentionCall, config: NoConfig) -> Product:
    """Plan attention in torch. Raises FormatError if the mask has too many elements."""
    reference = _Torch(w.mask, call)
    compute = reference.forward if call.op == "attention" else reference.backward

    def run(*operands: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", enabled=False):  # the products are in fp32
            return compute(*operands)

    return Product(run)


IN_TORCH = {
    op: attention_engine("torch", op, lambda w, call: [NoConfig()], _in_torch, lambda *_: None)
    for op in ("attention", "attention_backward")
}

"""Scales of fp8 products, which kernels apply to their sums (scales.cuh)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.errors import Unsupported


@dataclass(frozen=True)
class Scales:
    """fp32 factors of fp8 sums, one for each feature [n] and each token [m]; None is 1.

    Features are rows of W.
    """

    features: Tensor | None = None
    tokens: Tensor | None = None

    def require(self, n: int, m: int, dtype: torch.dtype) -> None:
        """Raise Unsupported unless the scales fit n features, m tokens and the operands' dtype."""
        pairs = ("features", self.features, n), ("tokens", self.tokens, m)
        for name, scale, size in pairs:
            if scale is not None and (dtype.itemsize > 1 or not _fits(scale, size)):
                raise Unsupported(
                    f"expected {size} contiguous fp32 scales of {name}, with fp8 operands; "
                    f"found {scale.dtype} {list(scale.shape)}, {dtype}"
                )

    @property
    def tensors(self) -> list[Tensor]:
        return [scale for scale in (self.features, self.tokens) if scale is not None]

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the addresses of both; 0 for None."""
        features, tokens = (0 if s is None else s.data_ptr() for s in (self.features, self.tokens))
        return features, tokens


def _fits(scales: Tensor, size: int) -> bool:
    return scales.dtype == torch.float32 and scales.shape == (size,) and scales.is_contiguous()


UNSCALED = Scales()

"""Tile shapes of bsr_triton that won a sweep on an H200.

A shape is (tokens, features, stages, warps, order). In the order "rows", neighbouring programs take
different block rows; in "tokens", different tokens. "S" means swapped (bsr_triton.Config). Few
stages leave room for more programs on an SM, which wins if block rows are short.
"""

Shape = tuple[int, int, int, int, str]
# fmt: off
MANY_TOKENS: dict[int, tuple[Shape, ...]] = {
    16: ((256, 16, 8, 8, "rows"), (256, 16, 5, 4, "rows"), (256, 32, 4, 4, "rows"),
         (256, 64, 4, 4, "rows"), (256, 128, 8, 8, "rows")),
    32: ((256, 32, 5, 4, "rows"), (256, 32, 3, 4, "rows"), (128, 32, 3, 4, "rows"),
         (256, 64, 4, 4, "rows S"), (128, 128, 6, 4, "rows")),
    64: ((256, 64, 5, 4, "rows S"), (256, 64, 2, 4, "rows S"), (128, 64, 3, 4, "rows S"),
         (128, 64, 2, 4, "rows S"), (128, 64, 2, 4, "tokens")),
    128: ((128, 128, 3, 4, "rows"), (128, 128, 3, 4, "tokens"), (128, 128, 2, 4, "rows S"),
          (128, 128, 2, 4, "tokens S")),
}
"""Winners for more than 1024 tokens, by the height of a row tile."""

SOME_TOKENS: dict[int, tuple[Shape, ...]] = {
    16: ((256, 16, 5, 4, "tokens"), (128, 16, 5, 4, "tokens"), (256, 64, 4, 4, "rows"),
         (128, 128, 4, 4, "rows")),
    32: ((256, 32, 5, 4, "tokens"), (128, 32, 5, 4, "tokens"), (256, 64, 4, 4, "rows S")),
    64: ((256, 64, 5, 4, "tokens S"), (128, 64, 4, 4, "tokens S"), (128, 64, 3, 4, "tokens S"),
         (64, 64, 6, 4, "tokens")),
    128: ((128, 128, 3, 4, "tokens"), (128, 64, 4, 4, "tokens S"), (64, 128, 4, 4, "tokens"),
          (64, 64, 6, 4, "tokens")),
}
"""Winners for 65 to 1024 tokens, by the height of a row tile."""

BY_POINTERS = (
    (256, 16, 8), (128, 16, 4), (256, 32, 8), (64, 32, 4), (128, 64, 4), (64, 64, 4), (128, 128, 8),
)
# fmt: on
"""The shapes to try without TMA: (tokens, features, warps)."""

FP32 = ((64, 64, 8), (64, 32, 4), (32, 32, 4), (64, 16, 4), (32, 16, 4))
"""The same for fp32, without tensor cores."""

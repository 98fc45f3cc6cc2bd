"""What the Triton kernels share: the path by which a call reads operands, and shapes of tiles.

The shapes of bsr_triton won a sweep on an H200. A shape is (tokens, features, stages, warps,
order). In the order "rows", neighbouring programs take different block rows; in "tokens", different
tokens. "S" means swapped (bsr_triton.Config). Few stages leave room for more programs on an SM,
which wins if block rows are short.
"""

from typing import Any

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.triton import (
    Path,
    choose_path,
    options,
    unsupported_alignment,
    unsupported_row,
    whole_tile,
)
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.bsr._call import BsrCall

LEAST = 64  # M of wgmma: wgrad gathers narrower blocks

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


def constants_of(kernel: Any, config: Any, **more: int) -> dict[str, Any]:
    """Return a kernel's constants, which are fields of its configuration or `more`, and options."""
    fields = {name.upper(): value for name, value in vars(config).items()}
    fields |= {"TMA": config.path == "tma", **more}
    constants = {name: fields[name] for name in kernel.arg_names if name in fields}
    return constants | options(config.warps, config.path)


def path_of(w: Bsr, call: BsrCall) -> Path:
    """Return TMA if the device has it and blocks are whole tiles in rows of 16 bytes."""
    (r, c), size, wgrad = w.block, call.dtype.itemsize, call.op == "wgrad"
    if (whole_tile(r), max(LEAST if wgrad else 0, whole_tile(c))) != (r, c):
        reason: str | None = f"blocks of {r}x{c} are not whole tiles"
    else:
        rows = () if wgrad else (call.width, c)
        reasons = [unsupported_row(columns, size) for columns in rows]
        reason = next(filter(None, reasons), None) or unsupported_alignment(*call.activations)
    return choose_path(reason, w.columns.device)


def require_path(path: Path, w: Bsr, call: BsrCall) -> None:
    """Raise Unsupported if TMA cannot read a call's operands."""
    if path == "tma" != path_of(w, call):
        refuse("expected the path pointers, found tma")

"""The contract of a method: how blocks of keys are scored for blocks of queries.

    q, k, v ──> score ──> scores ──> BlockMask.from_scores ──> attention ──> finish ──> O

A file here with METHOD is a method of `select_attention(..., method="FILE")` and of the kernel
attention_selected. What selects, lists and attends is the same for all of them. So a method decides
three things: the scores, the order in which attention reads its operands, and what becomes of its
output. Each works on the device, waits for nothing, and can be captured into a CUDA graph.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import NamedTuple

from torch import Tensor

from sparsebench._discovery import did_you_mean
from sparsebench.errors import Unsupported

FOLDER = "kernels.attention.methods"


def unchanged(o: Tensor) -> Tensor:
    """Return the output of attention as it is."""
    return o


class Scored(NamedTuple):
    """What attention needs after scoring.

    scores   [batch, lists, q_blocks, kv_blocks], fp32 and without a gradient: logits, so a `mass`
             is one of their softmax
    q, k, v  [batch, tokens, heads, D], in the order of the blocks
    finish   output in that order -> result, shaped like the caller's q
    keys     bool [S_kv]: False for padding; None without any
    """

    scores: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    finish: Callable[[Tensor], Tensor] = unchanged
    keys: Tensor | None = None


@dataclass(frozen=True)
class Method:
    """A method, and what a call does by default.

    score        (q, k, v, *, scale, block, causal, bias, **options) -> Scored; raises Unsupported.
                 The bias, if any, is shaped like the scores and added to them
    block        keys of a block, and its queries
    queries      of a block, if they are not as many
    launches     whether all that `score` computes is on the tape (_common/tape.py), or it says that
                 the tape is not complete: then calls may be recorded
    first, last  blocks that each row keeps in any case
    options      what `score` takes besides, each with a default
    """

    score: Callable[..., Scored]
    block: int = 128
    first: int = 1
    last: int = 1
    queries: int | None = None
    launches: bool = False
    options: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Read the names of the options once: torch.compile cannot look them up."""
        parameters = signature(self.score).parameters.values()
        optional = (each.name for each in parameters if each.default is not Parameter.empty)
        object.__setattr__(self, "options", tuple(name for name in optional if name != "bias"))

    def require(self, name: str, options: Iterable[str]) -> None:
        """Raise Unsupported with one line if an option is none of the method, called `name`."""
        if wrong := [option for option in options if option not in self.options]:
            expected = f"the options {', '.join(self.options)}" if self.options else "no options"
            close = did_you_mean(wrong[0], self.options)
            raise Unsupported(f"method {name}: expected {expected}, found {wrong[0]}{close}")

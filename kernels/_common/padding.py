"""Pad tokens, as users do, for a library that takes only multiples of some number.

         X [m, k]         whole [rows, k]
        +--------+        +--------+
        | tokens |  --->  | tokens |   copied by each launch
        +--------+        |   0    |   written once, in `prepare`
                          +--------+

The copy is part of the launch, because users pay for it. The first m rows of the result are Y. A
row of a padded case has the padded number of tokens in its choice.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Activations X [m, k], and the buffer [rows, k] that a launch copies them to, or X itself."""

    x: Tensor
    whole: Tensor

    def filled(self) -> Tensor:
        """Enqueue the copy of X, and return the padded activations; X if nothing is padded."""
        if self.whole is not self.x:
            self.whole[: len(self.x)].copy_(self.x)
        return self.whole

    @property
    def choice(self) -> dict[str, int]:
        """Return the entry of a row's choice: the padded number of tokens, if there is one."""
        return {} if self.whole is self.x else {"tokens": len(self.whole)}


def padded(x: Tensor, rows: int) -> Tokens:
    return Tokens(x, x if rows == len(x) else x.new_zeros(rows, x.shape[1]))


def multiple_of(size: int, count: int) -> int:
    return count + -count % size

"""A gain as a curve over the tokens at once, so that a verdict changes only where a curve crosses.

    gain   ●────●                  ●  a batch of this model that was measured
                 ╲                 ○  beyond those, and if there is none: an estimate
    1.05   ───────╲──────
                   ●- - - ○        between two points: straight in log(tokens) and log(gain)
           1   16  64    256

Decoding and prompts are two curves. Beyond its last point a curve is flat.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log

from sparsebench.results.advice.step_model import BOUND, DECODED, ESTIMATE, LOOK, MEASURED, Gain

BATCHES = (1, 16, 64, 256, 1024, 4096, 16384)  # tokens of the estimates
BASES = MEASURED, LOOK, ESTIMATE, BOUND  # the least certain comes last


@dataclass(frozen=True)
class Curve:
    """Gains that were measured, by tokens, and the estimate for any other tokens."""

    measured: Mapping[int, Gain]
    estimate: Callable[[int], Gain]

    def points(self, tokens: int) -> list[int]:
        """Return the tokens of all points of the curve that `tokens` are on."""
        decodes = tokens <= DECODED
        measured = [at for at in self.measured if (at <= DECODED) == decodes]
        ends = min(measured, default=DECODED), max(measured, default=0)
        estimated = [at for at in BATCHES if (at <= DECODED) == decodes]
        beyond = [at for at in estimated if not measured or not ends[0] < at < ends[1]]
        return sorted({*measured, *beyond})

    def at(self, tokens: int) -> Gain:
        """Return the gain of `tokens`: that of a point, or between its neighbours."""
        points = self.points(tokens)
        left = max((at for at in points if at <= tokens), default=points[0])
        right = min((at for at in points if at >= tokens), default=points[-1])
        a, b = (self.measured.get(at) or self.estimate(at) for at in (left, right))
        if left == right:
            return a
        share = log(tokens / left) / log(right / left)
        ends = zip((a.value, a.low, a.high), (b.value, b.low, b.high), strict=True)
        value, low, high = (one ** (1 - share) * other**share for one, other in ends)
        basis = max(a.basis, b.basis, key=BASES.index)
        of_points = f"{a.short} at {left} and {b.short} at {right}"
        between = "" if basis in (ESTIMATE, BOUND) else of_points
        kernels = tuple(dict.fromkeys(a.kernels + b.kernels))
        shapes = min(filter(None, (a.shapes, b.shapes)), default=0)  # 0: it was measured
        rests_on = a.runs + b.runs, kernels, shapes
        return Gain(value, low, high, basis, a.part or b.part, between, *rests_on)

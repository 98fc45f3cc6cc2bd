"""The metrics of claims: each is an increasing function of one ratio per process.

    r  =  quantity of the baseline / quantity of the subject

    speedup       x   r of the times                   paired round by round (statistics/ratio.py)
    of_ideal      %   100 r (1 - s) of the times       relative to 1 / (1 - s), the speedup of a
                                                       kernel without waste at sparsity s
    energy_saved  %   100 (1 - 1 / r) of the energy    of one hot call
    memory_saved  %   100 (1 - 1 / r) of the memory    peak on the device, prepare and first call
    loss_saved    %   100 (1 - 1 / r) of the loss      of a training, in nats per held-out byte
    storage       x   r of the bytes of the weights    as stored, indices included

So the interval of r over processes gives the interval of every metric.
"""

from collections.abc import Callable
from dataclasses import dataclass

SIGNS = {"x": "×", "%": " %"}
"""How a unit is written after a number."""


@dataclass(frozen=True)
class Metric:
    """A metric.

    column    the quantity
    of        the value from r and the density 1 - s, and `back` its inverse
    template  the text of a value, with {} for the number
    """

    unit: str
    column: str
    of: Callable[[float, float], float]
    back: Callable[[float, float], float]
    template: str


def _ratio(column: str, template: str) -> Metric:
    return Metric("x", column, lambda r, d: r, lambda v, d: v, template)


def _saving(column: str, template: str) -> Metric:
    return Metric(
        unit="%",
        column=column,
        of=lambda r, d: 100 * (1 - 1 / r),
        back=lambda v, d: 1 / max(1e-9, 1 - v / 100),
        template=template,
    )


METRICS: dict[str, Metric] = {
    "speedup": _ratio("time", "a speedup of {}"),
    "of_ideal": Metric(
        unit="%",
        column="time",
        of=lambda r, d: 100 * r * d,
        back=lambda v, d: v / 100 / d,
        template="{} of the ideal speedup",
    ),
    "energy_saved": _saving("energy_j", "{} of the energy saved"),
    "memory_saved": _saving("peak_bytes", "{} of the memory saved"),
    "loss_saved": _saving("loss", "{} of the loss saved"),
    "storage": _ratio("stored_bytes", "weights smaller by {}"),
}

"""What a claim may be about: each metric is a rising function of one ratio a process.

    r  =  quantity of the baseline / quantity of the subject

    speedup       x   r of the times                   paired block by block (statistics.py)
    of_ideal      %   100 r (1 - s) of the times       of 1 / (1 - s), which a kernel reaches that
                                                       wastes nothing; s is the cell's sparsity
    energy_saved  %   100 (1 - 1 / r) of the energy    of one hot call
    memory_saved  %   100 (1 - 1 / r) of the memory    most on the device, prepare and first call
    loss_saved    %   100 (1 - 1 / r) of the loss      of a training, in nats a byte held out
    storage       x   r of the bytes of the weights    as stored, the indices included

So one interval, that of r over processes, gives the interval of every metric.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric: its unit, the column that r is of, and the function of r and of the density 1 - s.

    back  its inverse
    none  its value where baseline and subject are equal; None of one that also asks for the density
    said  what a cell has that has a value, {}
    """

    unit: str
    column: str
    of: Callable[[float, float], float]
    back: Callable[[float, float], float]
    none: float | None
    said: str


SIGNS = {"x": "×", "%": " %"}
"""How a unit is written behind a number."""


def _saved(ratio: float, density: float) -> float:
    return 100 * (1 - 1 / ratio)


def _of_saved(percent: float, density: float) -> float:
    return 1 / max(1e-9, 1 - percent / 100)


def _ratio(ratio: float, density: float) -> float:
    return ratio


METRICS: dict[str, Metric] = {
    "speedup": Metric("x", "time", _ratio, _ratio, 1.0, "a speed-up of {}"),
    "of_ideal": Metric(
        "%",
        "time",
        lambda r, d: 100 * r * d,
        lambda v, d: v / 100 / d,
        None,
        "{} of the ideal speed-up",
    ),
    "energy_saved": Metric("%", "energy_j", _saved, _of_saved, 0.0, "{} of the energy saved"),
    "memory_saved": Metric("%", "peak_bytes", _saved, _of_saved, 0.0, "{} of the memory saved"),
    "loss_saved": Metric("%", "loss", _saved, _of_saved, 0.0, "{} of the loss saved"),
    "storage": Metric("x", "stored_bytes", _ratio, _ratio, 1.0, "weights smaller by {}"),
}

"""A simulated GPU: the time of a call by a formula, with noise as measured on a real GPU.

    time    = max(launch, bytes / bandwidth, FLOPs / rate) / efficiency(contender)
    sample  = time x exp(card + regret + process + drift + step + noise)

    card      of one contender on one card, which is a seed: normal; wider at the power limit
    regret    of a search's choice over the best one; pinned with the choice. Half-normal, or that
              of one of WAYS, spread evenly, which a process times with an error
    process   of one contender in one process: normal
    drift     of the process's time line, so it moves all contenders of a round alike: AR(1)
    step      likewise: in some contests the clock changes at a random moment
    noise     of one sample: normal; larger for shorter calls

A product bound by FLOPs takes UNPRUNED times as long with unpruned weights, under each load: these
draw more power. Dense contenders are more efficient than any sparse one that the spec does not
name, so that no speedup over the same zeros exceeds 1 / (1 - sparsity), but for noise.

Every draw comes from a seed. A YAML file describes the device; the defaults are an NVIDIA H200's,
and h100.yaml and l4.yaml beside this file can be named without a path (`sim:l4`).
Over ten processes with clocks not locked, its samples had an interquartile range of 6.3 % at 4.5
µs, 2.5 % at 18 µs and 0.5 % above 100 µs. Ratios differed by 0.3 to 0.6 %. Drift and steps are
assumed.

    schema: sparsebench/sim@1
    seed: 7
    efficiency: {bsr/bsr_triton: 0.6}
    faults: [{when: kernel=bsr_triton m=64, fault: crash, process: 1}]
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

from sparsebench.harness.bench.sampling import CHAIN, ROUNDS, SAMPLES_PER_ROUND
from sparsebench.harness.plan.suite import parse
from sparsebench.results.record import POWER_LIMITED, Contender

IQR_OF_SD = 1.349  # interquartile range of a normal distribution, in standard deviations
# A search has WAYS choices; in units of the regret, the slowest is SLOWEST above the fastest, and
# BLUR is the error of timing one. At a regret of 1 %, 33 of 48 are within 10 % of the fastest;
# among cuBLAS's choices on an H200, 12 to 40 are.
WAYS, SLOWEST, BLUR = 48, 15.0, 2.1
# At the power limit, cards differ by more: 0.65 % beside 0.37 % in five pairs of published runs.
LIMITED_CARD = 1.8
# Ranges, by a hash of the label, for a contender that the spec does not name.
DENSE_EFFICIENCY, SPARSE_EFFICIENCY = (0.85, 0.9), (0.3, 0.8)

# For 4096 x 4096 x 4096 at 90 % zeros, by load: in a contest, half loaded, back to back.
UNPRUNED = {"": 1.07, "half": 1.1, "full": 1.15}

Share = Annotated[float, Field(ge=0, le=1)]
Array = NDArray[np.float64]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Fault(_Model):
    """A planned fault of the cases that meet `when` (as for --only), in one process or all.

    crash     the process dies
    failed    the case raises
    """

    when: str
    fault: Literal["crash", "failed"]
    process: NonNegativeInt | None = None


class Rates(_Model):
    """TFLOP/s of matrix products: what cuBLAS reaches at best on an H200, rounded.

    fp8 and int8 are None for a GPU that cannot multiply them.
    """

    fp16: PositiveFloat = 800.0
    bf16: PositiveFloat = 800.0
    tf32: PositiveFloat = 400.0
    fp32: PositiveFloat = 50.0
    fp8: PositiveFloat | None = 1500.0
    int8: PositiveFloat | None = 1500.0


class Spec(_Model):
    """A simulated GPU. Sizes of noise are relative: 0.01 is 1 %.

    capability  compute capability; kernels that need a newer one are unsupported
    launch_us   least device time of a call; host_us: the same, as called from Python; next_us: of a
                layer that follows another in one graph (assumed)
    noise       interquartile range of samples by µs of a call, interpolated over log µs
    drift       standard deviation of the drift, with a memory of `drift_samples`
    step        size of a clock step; step_odds: fraction of contests with one
    process     standard deviation, over processes, of the log ratio of two contenders
    card        standard deviation, over cards, of the log ratio of two contenders
    limited     share of a contest's time at the power limit
    regret      standard deviation, over searches, of the log time of the choice
    efficiency  by a contender's label; a twin has its original's
    """

    schema_: Literal["sparsebench/sim@1"] = Field(default="sparsebench/sim@1", alias="schema")
    seed: int = 0
    gpu: str = "H200"
    capability: Annotated[str, Field(pattern=r"^\d+\.\d$")] = "9.0"
    bandwidth_gb_per_s: PositiveFloat = 4100.0
    matrix_tflops: Rates = Rates()
    launch_us: PositiveFloat = 4.5
    host_us: PositiveFloat = 12.0
    next_us: PositiveFloat = 1.5
    l2_bytes: NonNegativeInt = 62914560
    noise: dict[PositiveFloat, Share] = Field(
        default={4.5: 0.063, 18.0: 0.025, 100.0: 0.005}, min_length=1
    )
    drift: Share = 0.006
    drift_samples: PositiveFloat = 400.0
    step: Share = 0.02
    step_odds: Share = 0.3
    process: Share = 0.004
    card: Share = 0.0
    limited: Share = 0.0
    regret: Share = 0.0
    efficiency: dict[str, PositiveFloat] = {}
    faults: list[Fault] = []

    @property
    def identity(self) -> str:
        return f"sim-{self.seed}"


def read(device: str) -> Spec:
    """Return the spec of `sim` (all defaults), `sim:NAME` or `sim:FILE.yaml`."""
    name = device.partition(":")[2]
    file = Path(name if name.endswith(".yaml") else Path(__file__).with_name(f"{name}.yaml"))
    return parse(name, file.read_text(), Spec) if name else Spec()


def call_us(
    spec: Spec, contender: Contender, dtype: str, flops: float, read_bytes: float, scope: str
) -> float:
    """Return the time of a call in a contest without noise: the formula's first line."""
    least_us = {"op": spec.host_us, CHAIN: spec.next_us}.get(scope, spec.launch_us)
    memory_us = read_bytes / spec.bandwidth_gb_per_s / 1e3
    compute_us = flops / (getattr(spec.matrix_tflops, dtype) or inf) / 1e6
    compute_us *= UNPRUNED[""] if contender.is_unpruned else 1.0
    return max(least_us, memory_us, compute_us) / _efficiency(spec, contender)


def card_effects(spec: Spec, draw: np.random.Generator, shape: tuple[int, ...] = ()) -> Array:
    """Return the log times of contenders on some cards, over their mean on all cards."""
    wider = LIMITED_CARD if spec.limited > POWER_LIMITED else 1.0
    return np.asarray(draw.normal(0, wider * spec.card / np.sqrt(2), shape))


def ways(spec: Spec, draw: np.random.Generator, shape: tuple[int, ...] = ()) -> Array:
    """Return log times [*shape, WAYS], over the fastest, of the choices of a search."""
    times: Array = draw.uniform(0, SLOWEST * spec.regret, (*shape, WAYS))
    least: Array = times.min(axis=-1, keepdims=True)
    return times - least


def blur(spec: Spec, times: Array, draw: np.random.Generator) -> Array:
    """Return these log times as one search measures them."""
    return times + draw.normal(0, BLUR * spec.regret, times.shape)


def samples(
    spec: Spec, times_us: Sequence[float], draw: np.random.Generator, *, processes: int = 1
) -> Array:
    """Return µs [processes, contenders, ROUNDS, SAMPLES_PER_ROUND] of one contest.

    `times_us` are the contenders' times without noise. Every round runs all contenders in a new
    random order, SAMPLES_PER_ROUND samples each, as on a real device (timing.py).
    """
    times = np.asarray(times_us, dtype=np.float64)
    shape = processes, ROUNDS, len(times), SAMPLES_PER_ROUND
    line = _time_line(spec, draw, processes, prod(shape[1:])).reshape(shape)
    turns = draw.random(shape[:3]).argsort(axis=2)
    shared = np.take_along_axis(line, turns[..., None], axis=2)
    process = draw.normal(0, spec.process / np.sqrt(2), (processes, 1, len(times), 1))
    noise = draw.normal(0, 1, shape) * _noise(spec, times)[:, None]
    taken: Array = times[:, None] * np.exp(process + shared + noise)
    return taken.swapaxes(1, 2)


def _efficiency(spec: Spec, contender: Contender) -> float:
    label = replace(contender, twin=False, weights="pruned").label
    dense = contender.format == "dense"
    low, high = DENSE_EFFICIENCY if dense else SPARSE_EFFICIENCY
    digest = hashlib.sha256(label.encode()).digest()
    return spec.efficiency.get(label, low + (high - low) * digest[0] / 255)


def _time_line(spec: Spec, draw: np.random.Generator, processes: int, length: int) -> Array:
    decay = float(np.exp(-1 / spec.drift_samples))
    line = draw.normal(0, spec.drift, (length, processes))
    line[1:] *= np.sqrt(1 - decay**2)
    back = 1  # line[t] is the sum of the last `back` terms, weighted: doubled until it is whole
    while back < length:
        line[back:] += decay**back * line[:-back]
        back *= 2
    step = spec.step * draw.choice([-1, 1], processes) * (draw.random(processes) < spec.step_odds)
    moment = draw.integers(0, length, processes)
    return line.T + step[:, None] * (np.arange(length) >= moment[:, None])


def _noise(spec: Spec, times_us: Array) -> Array:
    points = sorted(spec.noise.items())
    iqr = np.interp(np.log(times_us), np.log([us for us, _ in points]), [iqr for _, iqr in points])
    return np.asarray(iqr / IQR_OF_SD)

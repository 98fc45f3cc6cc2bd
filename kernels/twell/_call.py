"""The calls of a feed-forward layer with few active hidden units, and the engines that run them.

    op ffn    Y = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T      gate Wg, up Wu
    op mlp    Y = act(X @ Wu.T) @ Wd.T                     gate Wu, up None

A product runs with (x, gate, up, wd_t): X and Y [m, k], the others [n, k], all contiguous at 16
bytes. A unit's rows of gate, up and Wd.T have k contiguous values each: kernels read whole rows.
Plans depend on sizes alone. The list of choices also has the number of active units per token,
because it decides which engine is the fastest.
"""

from collections.abc import Callable, Sequence
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, NoConfig, Operator, OperatorCall, bucket
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.results.record import Problem

NAMES = {DTYPES[name]: name for name in ("fp16", "bf16", "fp32")}
MOST_K = 4096  # limited by the registers for X and for the sums of Y


class TwellCall(NamedTuple):
    """A layer of n hidden units for up to m tokens.

    squared  act is relu2, which is relu squared, instead of relu
    gated    op ffn, otherwise mlp
    slots    for active units per token on average, in lists for training (ffn_step_sparse)
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    squared: bool
    gated: bool = True
    slots: int = 0

    @property
    def problem(self) -> Problem:
        """Return the problem of a suite that has this call."""
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        rest = {"activation": self.activation, "dtype": NAMES.get(self.dtype, str(self.dtype))}
        return Problem("ffn" if self.gated else "mlp", {**sizes, **rest})

    @property
    def activation(self) -> str:
        """Return the name of act."""
        return "relu2" if self.squared else "relu"


def units_on(x: Tensor, gate: Tensor) -> int:
    """Return the active units per token of X on average, as a power of two; waits for the device.

    With 4096 tokens of 5632 units, sparse products are 2.2 times as fast as dense ones if 8 units
    are active, and slower if 113 are.
    """
    average = float((x @ gate.T > 0).sum() / len(x))
    return int(2 ** round(log2(max(average, 1))))


def twell_engine(
    name: str,
    choices: Callable[[TwellCall], Sequence[Any]],
    plan: Callable[[torch.device, TwellCall, Any], Product],
    unsupported: Callable[[Problem, torch.device], str | None],
    config: type = NoConfig,
    consumes: str = "cvse",
) -> Engine:
    """Return an engine of op ffn; its weight, as `plan` reads it, is the device of the weights."""

    def offered(device: torch.device, call: TwellCall) -> Sequence[Any]:
        return choices(call)

    def unsupported_call(device: torch.device, call: TwellCall) -> str | None:
        return unsupported(call.problem, device)

    given = name, "ffn", consumes, config
    return gpu_engine(*given, offered, plan, unsupported, bind, unsupported_call)


def operator_of(
    engines: tuple[Engine, ...],
    active: int,
    device: torch.device,
    likeliest: Callable[[TwellCall], Sequence[Engine]] | None = None,
) -> Operator:
    """Return the plans of layers in which so many units per token are active."""

    def problem(call: TwellCall) -> dict[str, Any]:
        """Return sizes and layout as a line of the store has them."""
        fields = {"op": f"twell.{call.problem.op}", "dtype": NAMES.get(call.dtype, "")}
        sizes = {"activation": call.activation, "m": call.m, "n": call.n, "k": call.k}
        return {**fields, **sizes, "density": float(f"{active / call.n:.2g}")}

    return Operator(engines, lambda call: device, problem, device, likeliest)


def bind(
    operands: Operands,
    engines: tuple[Engine, ...],
    likeliest: Callable[[TwellCall], Sequence[Engine]] | None = None,
) -> OperatorCall:
    """Return the call of a suite's operands, with a copy of Wd.T."""
    x, w = operands.activations["x"], operands.weights
    gate, up = _values(w["wg" if "wg" in w else "wu"]), _values(w["wu"]) if "wg" in w else None
    wd_t, squared = _values(w["wd"]).t().contiguous(), operands.problem["activation"] == "relu2"
    n, k = gate.shape
    call = TwellCall(bucket(len(x)), n, k, x.dtype, squared, up is not None)
    operator = operator_of(engines, units_on(x, gate), x.device, likeliest)
    return OperatorCall(operator, call, (x,), lambda product: (gate, up, wd_t))


def _values(weight: Any) -> Tensor:
    assert isinstance(weight, Dense)
    return weight.values


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why no CUDA kernel of this family can run the problem on the device, or None."""
    activation, n, k = problem["activation"], problem["n"], problem["k"]
    if activation not in ("relu", "relu2"):
        return f"expected activation relu or relu2, found {activation}"
    if n % 8 or k % 8 or not n or not k:
        return f"expected n and k to be multiples of 8, found n {n} and k {k}"
    if k > MOST_K:
        return f"expected k up to {MOST_K}, found {k}"
    return unsupported_on_hopper(problem, device)

"""The contract of engines on operands whose products are exact, and what a kernel refuses.

test_engine_contract.py runs every engine on a GPU. Tests of a family run some of theirs on a CPU,
by the emulation in tests/emulation/.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.operator import Engine, OperatorCall
from sparsebench.kernels._common.tape import taping
from sparsebench.kernels._kernel import NAMES, Operands, output_dtype, poison
from sparsebench.results.record import Problem

CONFIGS = 6  # of an engine for each example


class Example(NamedTuple):
    """Sizes of a product, the part of W's blocks that is stored, and their rows and columns."""

    m: int
    n: int
    k: int
    part: float
    block: tuple[int, int] = (1, 1)

    def dense(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return W: small integers. In five rows of blocks, one is empty and one is full."""
        generator, (r, c) = torch.Generator().manual_seed(self.m), self.block
        down, across = -(-self.n // r), -(-self.k // c)
        stored = torch.rand(down, across, generator=generator) < self.part
        stored[1::5] |= self.part > 0
        stored[::5] &= down == 1
        w = torch.randint(1, 3, (self.n, self.k), generator=generator)
        w *= 1 - 2 * torch.randint(2, (self.n, self.k), generator=generator)
        w *= stored.repeat_interleave(r, 0).repeat_interleave(c, 1)[: self.n, : self.k]
        return w.to(device, dtype)


PACK: dict[str, Callable[[Example, Tensor], Any]] = {
    "bitmap": lambda example, dense: Bitmap.from_dense(dense),
    "bsr": lambda example, dense: Bsr.from_dense(dense, block=[*example.block]),
    "csr": lambda example, dense: Csr.from_dense(dense),
}


def run_engine(
    engine: Engine,
    example: Example,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    configs: Sequence[Any] = (),
) -> int:
    """Check an engine's configurations on an example, and return how many it has.

    The plan for m tokens also runs fewer, of a matrix whose rows have gaps, and into a given `out`.
    Beside the operands lies NaN.
    """
    w = PACK[engine.consumes](example, example.dense(dtype, device))
    bound = bound_to(engine, w, example.m, dtype)
    weight = bound.operator.weight(bound.call)
    if not configs:
        try:
            configs = engine.choices(weight, bound.call)[:CONFIGS]
        except Unsupported:
            return 0
    few = max(2 * example.m // 3, 1)
    for config in configs:
        product = engine.plan(weight, bound.call, config)
        stored = bound.weights(product)
        for activations in (bound.activations, [with_gaps(a, few) for a in bound.activations]):
            right = exact(engine.op, w, *activations)
            with taping() as tape:
                y = product.run(*activations, *stored)
            assert not tape.complete or tape.dense is not None or tape.outputs[-1] is y
            torch.testing.assert_close(y, right, rtol=0, atol=0, msg=f"{example}, {config}")
            out = torch.empty_like(y)
            poison(out)
            assert product.run(*activations, *stored, out=out) is out
            torch.testing.assert_close(out, right, rtol=0, atol=0, msg=f"{example}, {config}")
    return len(configs)


def bound_to(engine: Engine, w: Format, m: int, dtype: torch.dtype) -> OperatorCall:
    """Bind an engine to a weight, and to activations of small integers."""
    (n, k), device = w.shape, next(iter(w.arrays().values())).device
    columns = {"linear": {"x": k}, "linear_dgrad": {"dy": n}, "linear_wgrad": {"dy": n, "x": k}}
    activations = {
        name: torch.randint(-2, 3, (m, size), device=device).to(dtype)
        for name, size in columns[engine.op].items()
    }
    problem = Problem(engine.op, {"dtype": NAMES[dtype], "m": m, "n": n, "k": k})
    operands = Operands(problem, {"w": w}, activations, torch.matmul)
    if engine.op == "linear_wgrad":
        assert isinstance(w, Bsr | Csr)
        pattern = replace(w, values=torch.full_like(w.values, torch.nan))  # never read
        operands = replace(operands, weights={}, pattern=pattern)
    return engine.bind(operands, (engine,))


def with_gaps(a: Tensor, few: int) -> Tensor:
    """Return the first rows of a matrix, at multiples of 16 bytes, with NaN between and after."""
    (m, columns), step = a.shape, 16 * (a.shape[1] // 16 + 1)
    wide = a.new_full((m, step), torch.nan)
    wide[:few, :columns] = a[:few]
    return wide[:few, :columns]


def exact(op: str, w: Any, *activations: Tensor) -> Tensor:
    """Return the product in fp64, rounded once."""
    first, dtype = activations[0].double(), activations[0].dtype
    if op == "linear_wgrad":
        values: Tensor = w.sample((first.T @ activations[1].double()).to(dtype)).values
        return values
    dense = w.to_dense().double()
    return (first @ (dense.T if op == "linear" else dense)).to(output_dtype(dtype))


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the Unsupported that a call raises."""
    with pytest.raises(Unsupported) as raised:
        call()
    return str(raised.value)

"""How wrong may an output be and still be right? `python -m tests.tools.tolerances` prints a table.

A linear layer of 1024 x 1024 x 1024 is computed in fp64, spoiled in one way, and rounded once to
the output's dtype. Bisection finds the largest fault that bench/correctness.py accepts.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparsebench.harness.bench.correctness import Expected, check, roundings
from sparsebench.harness.inputs.bits import fill
from sparsebench.harness.ops.linear import definition, spread
from sparsebench.kernels._kernel import DTYPES, OUTPUTS

SIZE = 1024
NAMES = "fp32", "tf32", "fp16", "bf16", "fp8"
STEPS = 24


class Product:
    """W, X and the right answer; `accepts` judges a fault, which gives an output in fp64."""

    def __init__(self, name: str, size: int = SIZE) -> None:
        operands = [torch.empty(size, size, dtype=DTYPES[name]) for _ in "wx"]
        for operand, seed in zip(operands, "wx", strict=True):
            fill(operand, 0, seed)
        self.w, self.x = (operand.double() for operand in operands)
        self.right, self.size = definition(self.w, self.x), size
        products, sums = roundings(name, rounds_inputs=False)
        sizes = self.right, spread(self.w, self.x), OUTPUTS[name], size, products, sums
        self.expected = Expected(*sizes, plain=definition(*operands))
        self.sd = float(self.right.std())

    def accepts(self, out: Tensor) -> bool:
        return check(out.to(self.expected.dtype), self.expected).reason is None

    def largest(self, spoiled: Callable[[float], Tensor]) -> float:
        """Return the largest fault up to 1 that is accepted."""
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.accepts(spoiled(middle)) else (low, middle)
        return low

    def without_smallest(self, values: Tensor, part: float) -> Tensor:
        """Return the values, of which this part, the smallest, is zero."""
        count = int(part * values.numel())
        if not count:
            return values
        return values.where(values.abs() > values.abs().flatten().kthvalue(count).values, 0)

    def scaled(self, factor: float, rows: slice, columns: slice) -> Tensor:
        out = self.right.clone()
        out[rows, columns] *= 1 + factor
        return out

    def off(self, by: float) -> Tensor:
        """Return an output whose element of median size is this many sd away."""
        out = self.right.clone()
        out.view(-1)[out.abs().flatten().argsort()[out.numel() // 2]] += by * self.sd
        return out

    def faults(self) -> Iterator[tuple[str, float]]:
        """Yield what is wrong, and the largest of its kind that is accepted."""
        whole, some = slice(None), slice(64, 128)
        without = self.without_smallest
        count, zeros = self.size**2, self.largest(lambda p: without(self.right, p))
        yield "elements that are 0, %", 100 * int(zeros * count) / count
        yield "one element off by, sd of the output", self.largest(self.off)
        for name, rows, columns in (
            ("one row scaled by, %", slice(7, 8), whole),
            ("one block of 64 x 64 scaled by, %", some, some),
            ("the whole output scaled by, %", whole, whole),
        ):
            yield name, 100 * self.largest(lambda s, r=rows, c=columns: self.scaled(s, r, c))
        dropped = self.largest(lambda p: definition(without(self.w, p), self.x))
        yield "smallest weights left out, %", 100 * int(dropped * count) / count
        yield "terms of k left out", int(self.size * self.largest(self.shortened))

    def shortened(self, part: float) -> Tensor:
        """Return the product without this part of the terms of k."""
        terms = self.size - int(part * self.size)
        return definition(self.w[:, :terms], self.x[:, :terms])


def main() -> None:
    columns = [dict(Product(name).faults()) for name in NAMES]
    print("| |", " | ".join(NAMES), "|")
    print("|" + "---|" * (1 + len(NAMES)))
    for fault in columns[0]:
        print("|", fault, "|", " | ".join(f"{column[fault]:.2g}" for column in columns), "|")


if __name__ == "__main__":
    main()

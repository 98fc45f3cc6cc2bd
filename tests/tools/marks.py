"""Marks: what a test needs, and what `make test` leaves to `make test-all`."""

import shutil
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest

needs_cupy = pytest.mark.skipif(not find_spec("cupy"), reason="needs CuPy")
needs_gxx = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


def sampled(cases: Iterable[Any], *places: int) -> list[Any]:
    """Return the cases of a parametrised test, exhaustive but for those kept: the first, if none.

    A negative number counts from the end.
    """
    listed = list(cases)
    stay = {place % len(listed) for place in places or (0,)}
    return [case if i in stay else exhaustive(case) for i, case in enumerate(listed)]


def crossed(*factors: Sequence[Any]) -> list[Any]:
    """Return the product of the factors, exhaustive but for a diagonal that has every value.

    [a, b, c] and [1, 2]: a1 b2 c1 stay, a2 b1 c2 are left out.
    """
    longest = max(map(len, factors))
    sizes = [range(len(values)) for values in factors]
    stay = {tuple(i % len(size) for size in sizes) for i in range(longest)}
    return [
        case if places in stay else exhaustive(case)
        for places, case in zip(product(*sizes), product(*factors), strict=True)
    ]


def exhaustive(case: Any) -> Any:
    """Return a case that `make test` leaves out."""
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)

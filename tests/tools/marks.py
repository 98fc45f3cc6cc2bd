"""Marks: what a test needs, and what `make test` leaves to `make test-all`."""

import shutil
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import combinations, product
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
    """Return every pair of values of two factors, exhaustive but for a diagonal with every value.

    [a, b, c] and [1, 2]: a1 b2 c1 stay, a2 b1 c2 are left out. Of three factors, a combination
    without a pair that is new is not there.
    """
    sizes = [range(len(values)) for values in factors]
    stay = {tuple(i % len(size) for size in sizes) for i in range(max(map(len, factors)))}
    covered = {pair for places in stay for pair in combinations(enumerate(places), 2)}
    cases = []
    for places, case in zip(product(*sizes), product(*factors), strict=True):
        pairs = {*combinations(enumerate(places), 2)}
        if places in stay:
            cases.append(case)
        elif pairs - covered:
            cases.append(exhaustive(case))
            covered |= pairs
    return cases


def exhaustive(case: Any) -> Any:
    """Return a case that `make test` leaves out."""
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)

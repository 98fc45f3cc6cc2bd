"""Marks by which `make test` runs a sample of what `make test-all` runs whole."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *kept: int) -> list[Any]:
    """Return the cases of a parametrised test, exhaustive but for those kept: the first, if none.

    A negative number counts from the end.
    """
    listed = list(cases)
    stay = {place % len(listed) for place in kept or (0,)}
    return [case if i in stay else exhaustive(case) for i, case in enumerate(listed)]


def exhaustive(case: Any) -> Any:
    """Return a case that `make test` leaves out."""
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)

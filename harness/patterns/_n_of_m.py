"""Shared by the patterns that keep the best N of each M elements along k."""

from sparsebench.errors import SuiteError
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def n_of_m(name: str, kept: int, group: int) -> Pattern:
    """Return the pattern `name`. A suite may write $kept and $group in the params of a format."""

    def rule(weight: Weight) -> Rule:
        if weight.k % group:
            expected = f"expected k to be a multiple of {group}"
            raise SuiteError(f"pattern {name}: {expected}, found {weight.k}")
        return Rule(weight.elements, group=group, counts=(kept,))

    return Pattern(rule, lambda fields: {"kept": kept, "group": group})

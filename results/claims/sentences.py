"""What verdicts say of cells and limits, each a part of a sentence."""

from math import log

import numpy as np

from sparsebench.results.claims.cells import Cell, said
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Claim, Test
from sparsebench.results.formatting import are
from sparsebench.results.statistics import FEWEST, more_processes


def capital(text: str) -> str:
    """Begin a sentence with a capital."""
    return text[:1].upper() + text[1:]


def limit(test: Test) -> str:
    """Write what is tested: `1.25×`."""
    return f"{test.limit:g}{SIGNS[test.unit]}"


def asked(test: Test) -> str:
    """Say what is asked for: `at least 1.25× is asked for`."""
    return f"{'at least' if test.at_least is not None else 'at most'} {limit(test)} is asked for"


def has(test: Test, cell: Cell) -> str:
    """Say of what a value is: `27.1 % [26.8, 27.3] of the ideal speed-up`."""
    end = f" over that of {test.over}" if test.over else ""
    return said(test, cell, METRICS[test.metric].said + end)


def not_measured(count: int) -> str:
    """Say how many cells are not measured."""
    return f"{are(count, 'cell')} not measured"


def nothing(claim: Claim, test: Test) -> str:
    """Say why a test has no cell."""
    if test.of_file:
        return f"no file of `{'train-lm --pattern' if test.trained else 'whole'}` was given"
    measure = claim.measured(test)
    files = f"; {measure.suite} takes files, --data" if measure and measure.data else ""
    return f"nothing is measured yet{files}"


def more(test: Test, cell: Cell) -> str:
    """Say how many more processes would decide a cell that is astride the limit."""
    if cell.processes < FEWEST:
        return ""
    at = log(METRICS[test.metric].back(test.limit, cell.density))
    count = more_processes(np.array(cell.logs) - at, margin=0.0)
    if not count:
        return "; more processes would not decide"
    return f"; {count} more process{'' if count == 1 else 'es'} would decide"

"""Claims by name: those of the package, those of other packages, and any file.

suites/claims/NAME.yaml                  NAME
entry point of sparsebench.claims        a package whose *.yaml files are claims
a path that ends in .yaml                that file
"""

from collections import Counter
from importlib.resources.abc import Traversable

from sparsebench._discovery import documents
from sparsebench.errors import SuiteError
from sparsebench.harness.plan.suite import document
from sparsebench.results.claims.schema import ClaimFile, parse


def claims() -> dict[str, Traversable]:
    """Return the file of every claim by its name. Raises SuiteError if a name occurs twice."""
    return documents("suites.claims")


def load(name: str) -> ClaimFile:
    """Read a claim by name or from a file. Raises SuiteError with the file and the line."""
    return parse(*document("suites.claims", "claim", name))


def chosen(names: list[str]) -> list[ClaimFile]:
    """Read the claims of these names, or all known claims without any."""
    selected = [load(name) for name in names or claims()]
    twice = [name for name, count in Counter(each.name for each in selected).items() if count > 1]
    if twice:
        raise SuiteError(f"expected each claim once, found {min(twice)} twice")
    return selected

"""Claims by name: those of the package, those of other packages, and any file.

suites/claims/NAME.yaml                  NAME
entry point of sparsebench.claims        a package whose *.yaml files are claims
a path that ends in .yaml                that file
"""

from collections import Counter
from importlib.resources.abc import Traversable
from pathlib import Path

from sparsebench._discovery import documents, unknown
from sparsebench.errors import SuiteError
from sparsebench.results.claims.schema import ClaimFile, parse, read


def claims() -> dict[str, Traversable]:
    """Return the file of every claim by its name. Raises SuiteError if a name occurs twice."""
    return documents("suites.claims")


def load(name: str) -> ClaimFile:
    """Read a claim by name or from a file. Raises SuiteError with the file and the line."""
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    packaged = claims()
    if name not in packaged:
        raise SuiteError(unknown("a file.yaml or a known claim", name, packaged))
    return parse(packaged[name].name, packaged[name].read_text("utf-8"))


def chosen(names: list[str]) -> list[ClaimFile]:
    """Read the claims of these names, or all known claims without any."""
    selected = [load(name) for name in names or claims()]
    twice = [name for name, count in Counter(each.name for each in selected).items() if count > 1]
    if twice:
        raise SuiteError(f"expected each claim once, found {min(twice)} twice")
    return selected

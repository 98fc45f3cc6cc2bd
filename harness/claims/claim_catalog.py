"""Claims by name: those of the package, of other packages, and any file.

suites/claims/NAME.yaml                  NAME
entry point of sparsebench.claims        a package, whose *.yaml are claims
a path that ends in .yaml                that file
"""

from importlib.resources.abc import Traversable
from pathlib import Path

from sparsebench._discovery import did_you_mean, documents
from sparsebench.errors import SuiteError
from sparsebench.results.claims.schema import ClaimFile, parse, read


def claims() -> dict[str, Traversable]:
    """Return the file of every claim by its name. Raises SuiteError where a name is taken twice."""
    return documents("suites.claims")


def load(name: str) -> ClaimFile:
    """Return a claim by name or by file; SuiteError says the file and the line of what is wrong."""
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    known = claims()
    if name not in known:
        hint = did_you_mean(name, known)
        raise SuiteError(f"expected a file.yaml or one of {', '.join(known)}; found {name!r}{hint}")
    return parse(known[name].name, known[name].read_text("utf-8"))


def chosen(names: list[str]) -> list[ClaimFile]:
    """Return the claims of these names; all that are known, if none is given."""
    found = [load(name) for name in names or claims()]
    twice = {w.name for w in found if [o.name for o in found].count(w.name) > 1}
    if twice:
        raise SuiteError(f"expected each claim once, found {min(twice)} twice")
    return found

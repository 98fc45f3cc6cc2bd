"""The text of a suite, claim or campaign by name, without an import of torch."""

from pathlib import Path

from sparsebench._discovery import documents, unknown
from sparsebench.errors import SuiteError
from sparsebench.results import files


def document(folder: str, what: str, name: str) -> tuple[str, str]:
    """Return where a suite, claim or campaign is, and its text: a packaged one, or a file.yaml."""
    packaged = documents(folder)
    if name in packaged:
        return packaged[name].name, packaged[name].read_text("utf-8")
    if not name.endswith((".yaml", ".yml")):
        lister = "claims list" if what == "claim" else "list"
        raise SuiteError(unknown(f"a file.yaml or a known {what}", name, sorted(packaged), lister))
    if not files.utf8(name):
        raise SuiteError(f"expected a {what} with a name in UTF-8, found {name!r}")
    return name, files.text(Path(name), files.YAML_BYTES, SuiteError)

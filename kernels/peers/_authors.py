"""Code of other authors that is no package: from a folder that the user names.

    sparsebench run SUITE --peers DIR          or $SPARSEBENCH_PEERS

DIR is a checkout, or a folder with checkouts of any name. A peer knows its own by a file in it. It
runs with the user's rights, as any installed package does: name a folder that you trust. Its files
are never copied, and a row has their digest.
"""

import hashlib
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

VARIABLE = "SPARSEBENCH_PEERS"


def checkout(marker: str) -> Path | None:
    """Return the checkout that has this file, the first by name; None where there is none."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    return next((at for at in (folder, *sorted(folder.glob("*"))) if (at / marker).is_file()), None)


def missing(marker: str, repository: str) -> str | None:
    """Say what a peer needs and does not find, or None."""
    if checkout(marker):
        return None
    found = os.environ.get(VARIABLE)
    where = f"found none with {marker} in {found}" if found else "found no --peers"
    return f"needs a checkout of {repository} below --peers DIR; {where}"


def imported(file: Path) -> Any:
    """Import a Python file of a checkout, once in a process."""
    name = f"_authors_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def digest(folder: Path) -> str:
    """Return a digest of the names and the bytes of a folder's source files."""
    kinds = (".py", ".cu", ".cuh", ".cpp", ".h")
    known = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in kinds):
        known.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return known.hexdigest()[:16]

"""What compiles cleanly: one digest per test file, source, compiler and target.

    tests/kernels/bsr/test_bsr_small.py bsr/bsr_small.cu nvcc compute_90a ── 9f8e7d6c5b4a
                    │                        │               │                    │
                    └────── their code, and all Python of the family ─────────────┘

If record.txt has the digest, nothing is compiled. Otherwise the test compiles what it asks for and
checks it. Configurations come from the Python of a family and from the test, so a digest covers
these, without comments and docstrings. `make compiled` writes record.txt after all tests marked
`compiles` passed.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from sparsebench.kernels._common.source_code import bare_python
from tests.tools.paths import KERNELS, ROOT

RECORD = Path(__file__).with_suffix(".txt")

test_file = Path()  # of the test that runs now (conftest.py)
lookups: set[str] = set()  # lines of the record, by that test


def in_record(source: str, family: Path, compiler: str, target: str, *parts: object) -> bool:
    """Return whether the record says that this test compiles a source without complaint.

    source    the name of a source, for the reader of the record
    family    its folder, whose Python makes the configurations
    compiler  its name
    target    what is compiled for
    parts     what else decides: the compiler's version, the code of the source
    """
    code = [python_of(test_file), *map(python_of, sorted(family.glob("*.py"))), *parts]
    digest = hashlib.sha256("\0".join(map(str, code)).encode()).hexdigest()[:12]
    line = f"{test_file.relative_to(ROOT)} {source} {compiler} {target} {digest}"
    lookups.add(line)
    return line in recorded()


@cache
def python_of(file: Path) -> str:
    """Return the code of a Python file without comments and docstrings."""
    return bare_python(file.read_text())


def family_of(module: str) -> Path:
    """Return the folder of a kernel's module: sparsebench.kernels.bsr.bsr_triton -> kernels/bsr."""
    return KERNELS / module.split(".")[2]


@cache
def recorded() -> frozenset[str]:
    """Return the lines of the record; none if there is no record."""
    return frozenset(RECORD.read_text().splitlines()) if RECORD.exists() else frozenset()


def write(lines: Iterable[str]) -> str:
    """Write the record and say what changed."""
    new, old = frozenset(lines), recorded()
    RECORD.write_text("".join(f"{line}\n" for line in sorted(new)))
    return f"{len(new & old)} sources as before, {len(new - old)} new, {len(old - new)} removed"

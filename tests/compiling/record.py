"""What compiles cleanly, by digest, so that only what changed is compiled again.

    digest of source, configuration, compiler ── in record.txt ────> nothing to do
                                              └─ not there ───────> compile it and judge it

A test that passes vouches for every digest that it asked for. `make compiled` writes record.txt
anew, of what the tests marked `compiles` ask for and nothing else. An entry of other code or of
another compiler is never asked for: it does no harm, and goes with the next `make compiled`.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

RECORD = Path(__file__).with_suffix(".txt")
LETTERS = 12  # of a digest, 48 bits: two of 10,000 compiles agree once in five million records

asked: list[str] = []  # by the test that runs now (conftest.py)


def known(*parts: object) -> bool:
    """Say whether a compile of these parts is in the record; a test that passes vouches for it."""
    text = "\0".join(map(str, parts))
    digest = hashlib.sha256(text.encode()).hexdigest()[:LETTERS]
    asked.append(digest)
    return digest in recorded()


@cache
def recorded() -> frozenset[str]:
    """Return the digests of the record; none if it is not there."""
    return frozenset(RECORD.read_text().split()) if RECORD.exists() else frozenset()


def write(digests: Iterable[str]) -> str:
    """Write the record anew and say what changed."""
    new, old = frozenset(digests), recorded()
    RECORD.write_text("".join(f"{digest}\n" for digest in sorted(new)))
    return f"{len(new & old)} compiles known, {len(new - old)} new, {len(old - new)} stale: removed"

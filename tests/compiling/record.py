"""What compiles cleanly: a line per source, compiler and target, with a digest per compile.

    bsr/bsr_small.cu nvcc compute_90a 9f8e7d6c 5b4a3f2e ...
     │                │    │           └ the source's code, its constants, the compiler's version
     └ its family     │    └ what is compiled for
                      └ nvcc or triton

If record.txt has the digest, nothing is compiled. Otherwise the test compiles it and checks it. A
digest covers what the compiler reads and what the test asks of the result, without comments. Thus
a change to the Python of a family compiles only the configurations that are new. `make compiled`
writes record.txt from all tests marked `compiles`.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

RECORD = Path(__file__).with_suffix(".txt")
DIGITS = 8

lookups: set[str] = set()  # "SOURCE COMPILER TARGET DIGEST", by the test that runs now


def in_record(source: str, compiler: str, target: str, *parts: object) -> bool:
    """Return whether the record says that a source compiles without complaint.

    source    FAMILY/NAME
    compiler  its name
    target    what is compiled for
    parts     what decides: the compiler's version, the code, its constants, what is asked
    """
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:DIGITS]
    entry = f"{source} {compiler} {target} {digest}"
    lookups.add(entry)
    return entry in recorded()


@cache
def recorded() -> frozenset[str]:
    """Return the entries of the record; none if there is no record."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    groups = [line.split() for line in lines]
    return frozenset(" ".join([*words[:3], digest]) for words in groups for digest in words[3:])


def write(entries: Iterable[str]) -> str:
    """Write the record and say what changed."""
    new, old = frozenset(entries), recorded()
    groups = defaultdict(list)
    for entry in sorted(new):
        group, _, digest = entry.rpartition(" ")
        groups[group].append(digest)
    RECORD.write_text("".join(f"{group} {' '.join(d)}\n" for group, d in groups.items()))
    return f"{len(new & old)} compiles as before, {len(new - old)} new, {len(old - new)} removed"

"""Rewrite the `source` digests of kernels/tuned/*.json to the present code of the kernels.

    python -P tests/tools/stamp.py --machine-code-is-unchanged

An entry of a table is used only while its digest is that of the kernel's code, so a rename in the
Python of a kernel disables it. Run same_code.py first: it shows that the machine code is the same.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from sparsebench.kernels._common import tuned_table


def stamp(file: Path) -> int:
    """Give each entry of a table the digest of its kernel's present code; return the changes."""
    table = tuned_table.read(file)
    entries = [replace(entry, source=tuned_table.source(entry.kernel)) for entry in table.entries]
    if removed := sorted({entry.kernel for entry in entries if not entry.source}):
        raise SystemExit(f"{file}: expected kernels that exist, found {', '.join(removed)}")
    tuned_table.write(file, replace(table, entries=entries))
    return sum(
        before.source != now.source for before, now in zip(table.entries, entries, strict=True)
    )


def main() -> None:
    """Stamp the package's tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machine-code-is-unchanged", action="store_true", required=True)
    parser.parse_args()
    for file in sorted(tuned_table.folders()["package"].glob("*.json")):
        print(f"{file.name}: {stamp(file)} entries stamped")


if __name__ == "__main__":
    main()

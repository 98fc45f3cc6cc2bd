"""Compute the published figures again from rows.jsonl.gz, without importing the project.

    python -m tests.outsider [SITE ...]    print each figure that the rows do not give; exit 1

The pages are README.md and results/published/README.md of this checkout (readme.py), and those of
sites (site.py). A figure must agree with the rows (rows.py, ratios.py) to its last digit.
"""

import sys
from pathlib import Path

from tests.outsider.readme import TALLY, captions, published
from tests.outsider.rows import HOME, ROOT
from tests.outsider.site import answer, claimed, grids, listed_runs

READERS = {
    "index.html": grids,
    "runs.html": listed_runs,
    "formats/*": grids,
    "kernels/*": grids,
    "claims/*.html": claimed,
    "*/*/index.html": answer,
}


def main(sites: list[str]) -> int:
    """Print what the rows do not give, on the pages of the checkout and of sites."""
    page, readme = (HOME / "README.md").read_text(), (ROOT / "README.md").read_text()
    wrong = [*published(page), *captions(page), *captions(readme)]
    for site in map(Path, sites):
        for pattern, reader in READERS.items():
            for file in sorted(site.glob(pattern)):
                if file.parent.parent.name != "runs":  # these lead to the runs
                    wrong += [f"{file.relative_to(site)}: {each}" for each in reader(file)]
    counts = ", ".join(f"{count} {name}" for name, count in TALLY.items())
    print(*wrong, f"{TALLY.total()} figures ({counts}), {len(wrong)} not found", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

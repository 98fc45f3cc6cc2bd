"""Write the pages that show published results: python -m sparsebench.reports.published [--check].

    results/published  ─>  results/published/README.md  and the marked blocks of other pages

`--check` writes nothing, names each page that differs from its bundles, and exits 1 if one does.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.reports.picture import picture
from sparsebench.reports.published._again import elsewhere, energy, twins
from sparsebench.reports.published._pages import pages
from sparsebench.reports.published._runs import Published, published
from sparsebench.reports.published._summary import (
    PICTURE,
    PICTURED,
    digests,
    figure,
    headline,
    list_of_runs,
    modelled,
    pruned,
    terminal,
    trained,
    widened,
)
from sparsebench.reports.published._table import Table, rendered
from sparsebench.reports.published.tables import PERHAPS, QUESTIONS, SECTIONS

ROOT = Path(__file__).resolve().parents[2]  # of a checkout: bundles are in no wheel
HEAD = """# Published runs

Written from the bundles by `python -m sparsebench.reports.published`; change nothing here by hand.

A speed-up is the ratio of times in the same contest, block by block, device time with a cold L2
cache (`results/frame.py`). In brackets is the 95 % interval (Hodges-Lehmann) from 6 processes on,
and below that the range over processes. One process gives a value without a range. Fewer than 6
processes are a look, not a verdict. "dense" marks a portfolio that chose a dense kernel: its figure
is not of a sparse format. `+` after a commit says that there were uncommitted changes.
`make site` writes the report of every run, as a site.

In the list of runs, "power-limited" counts the cases with a contest during which the board lowered
its clock, to keep its power limit, for over a fifth of the time. A contest's contenders share that.
"Slow peers" counts the cases of peers that another run on this kind of GPU timed more than 10 %
faster, and gives the largest factor: leads over them are too large by as much.

The campaign `suites/campaigns/published.yaml` measures everything at one commit. The list names the
commit of each run; where it is another one, CHANGELOG.md says why. Runs named `-sim` are modelled,
not measured.
"""
RUNS = {
    "The same kernel twice": "twins",
    "The same plan on two cards": "again",
    "Energy of a call": "energy",
}
FILES = {
    "Training with block-sparse weights": "widths",
    "A whole model with few units on": "models",
}
ABOUT = {
    "twins": """Every run times a kernel twice in the same contest (an A/A pair). Such a pair came
out different if the interval of its ratio leaves out 1; chance alone gives 5 %.""",
    "again": """Cell by cell, the speed-up on the second card over that on the first. Reproduced: at
least 95 % of the cells have the same outcome, or speed-ups as close as processes of one card are
(`results/comparison.py`). With the configurations of the first run a dense baseline may not be at
its best on the other card; such a run repeats the first, and is no evidence of its own.""",
    "energy": """By the counter of the board over 2 s of calls with a warm cache. The median of the
processes, and in brackets the least and the greatest. Dense is the baseline that used least.""",
}
DIGESTS = """The SHA-256 of its manifest names a bundle. `sparsebench validate` holds published runs
against this list. So does `sha256sum --check`, which is given these lines in this folder."""


def main() -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sparsebench.reports.published")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if one differs")
    check = parser.parse_args().check
    try:
        found = [*differing(ROOT, published(ROOT))] if check else write(ROOT)
    except ResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    advice = "differs from the published bundles; run python -m sparsebench.reports.published"
    for path in found:
        print(f"{path.relative_to(ROOT)}: {advice if check else 'written'}")
    return int(check and bool(found))


def write(root: Path) -> list[Path]:
    """Draw the picture and every page of a checkout from its bundles; return what has changed.

    ResultError, before anything is written, says what cannot be drawn.
    """
    runs = published(root)
    found = differing(root, runs)
    for path, text in found.items():
        path.write_text(text, "utf-8")
    if PICTURED not in runs:  # then no page shows it, or `differing` has said so
        return [*found]
    place = root / PICTURE
    before = place.read_bytes() if place.exists() else b""
    picture(runs[PICTURED].cases, place)
    return [*found, *([place] if place.read_bytes() != before else [])]


def differing(root: Path, runs: Mapping[str, Published]) -> dict[Path, str]:
    """Return the pages that differ from the bundles, with the text that they should have."""
    made = blocks(root, runs)
    return {
        path: text
        for path, text in pages(root, whole(made), made)
        if not path.exists() or path.read_text("utf-8") != text
    }


def blocks(root: Path, runs: Mapping[str, Published]) -> dict[str, str]:
    """Return what a page may ask for, by name: every table, and what is no table of cases."""
    home = root / "results/published"
    return {
        "headline": headline(QUESTIONS, runs),
        "figure": figure(runs),
        "terminal": terminal(runs),
        "again": elsewhere(runs),
        "twins": twins(runs),
        "energy": energy(runs),
        "runs": list_of_runs(runs),
        "digests": digests(runs),
        **{table.name: rendered(table, runs) for table in drawn(runs)},
        "pruning": "\n\n".join(map(pruned, sorted((home / "pruning").glob("*.json")))),
        "units": "\n\n".join(map(trained, sorted((home / "sparsity").glob("*.json")))),
        "widths": "\n\n".join(map(widened, sorted((home / "training").glob("*.json")))),
        "models": "\n\n".join(map(modelled, sorted((home / "whole").glob("*.json")))),
    }


def drawn(runs: Mapping[str, Published]) -> list[Table]:
    """Return the tables to draw, each of the runs that are there; those of PERHAPS need not be."""
    gone = PERHAPS - runs.keys()
    every = (table for part in SECTIONS.values() for table in part)
    left = (replace(t, runs=tuple(name for name in t.runs if name not in gone)) for t in every)
    return [table for table in left if table.runs]


def whole(made: Mapping[str, str]) -> str:
    """Return results/published/README.md, of blocks under their headings."""
    parts = [HEAD.rstrip(), "## Headline", made["headline"], made["figure"]]
    parts += ["## Runs", made["runs"], DIGESTS, made["digests"]]
    for title, tables in SECTIONS.items():
        known = [made[table.name] for table in tables if table.name in made]
        parts += [f"## {title}", *known] if known else []
    parts += ["## What pruning costs", made["pruning"]]
    parts += ["## How few units stay on after training", made["units"]]
    for title, name in (*RUNS.items(), *FILES.items()):
        parts += [f"## {title}", ABOUT.get(name, ""), made[name]] if made[name] else []
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())

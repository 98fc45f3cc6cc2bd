"""Write the Markdown that shows published results: python -m sparsebench.reports.published.

    results/published/GPU/RUN ─> results/published/README.md   headline, list of runs, digests
                              ─> results/published/advice.json rows of `sparsebench advise`
                              ─> results/published/attention.json   of `advise --attention`
                              ─> results/published/cells.json.gz   of `sparsebench find`
                              ─> results/between_cards.json    the variation between cards
                              ─> README.md, pruning/README.md  the text between two marks:

        <!-- published: figure -->
        <!-- end -->

Everything else is on the site (reports/site), which `make site` writes from the same bundles.
With --check nothing is written: the command names each page that differs from the bundles and
exits with 1 if there is one.
"""

import argparse
import gzip
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from rich.console import Console

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.reports import advice, cells, costs, defaults
from sparsebench.reports.coverage import COVERAGE, STRATA, coverage_tables, explanation
from sparsebench.reports.gpu_time import gpu_time
from sparsebench.reports.grids import about_view, sentences, weights
from sparsebench.reports.headline import (
    QUESTIONS,
    PublishedRun,
    confirmations_of,
    headline,
    kind_of,
    read,
)
from sparsebench.reports.headline_changes import headline_changes
from sparsebench.reports.picture import picture
from sparsebench.reports.site.cards import run_lines
from sparsebench.reports.tables import markdown_table
from sparsebench.reports.terminal import RunAnswer
from sparsebench.results.advice.crossings import FILE as ATTENTION
from sparsebench.results.advice.crossings import AttentionEvidence, collect_attention
from sparsebench.results.advice.measured_layers import Evidence, collect_evidence
from sparsebench.results.comparison import repeats
from sparsebench.results.comparison.sides import short_card
from sparsebench.results.files import unzip
from sparsebench.results.formatting import brackets, conditions, selection
from sparsebench.results.run import bundle
from sparsebench.results.run.provenance import commit_of, flat
from sparsebench.results.statistics import between_cards
from sparsebench.results.tables.families import is_ours
from sparsebench.results.tables.frame import KEYS
from sparsebench.results.tables.grid import findings

Runs = Mapping[str, PublishedRun]

ROOT = Path(__file__).resolve().parents[1]  # root of the checkout; wheels hold no bundles
HOME = "results/published"
ADVICE = "advice.json"
PICTURE, PICTURED = f"{HOME}/speedup.svg", "sparsity-4096"
APART = 1.1  # a peer is slow above this ratio to its time in another run
BLOCK, COLUMNS, LINES = "64", 72, 11  # the terminal example: block size, width and lines
BLOCKED = ("README.md", f"{HOME}/pruning/README.md")  # pages with blocks between marks
OPENING = re.compile(r"<!-- published: (\S+) -->\n")
BLOCK_OF_PAGE = re.compile(r"(<!-- published: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAGE = """# Published runs

`python -m sparsebench.reports.published` writes this page from the bundles. Do not edit it.
`make site` writes a site from the same bundles, with a report of every run and a page for every
format, kernel and claim. Its page of runs has a chart of what changed over commits.

A speedup is a ratio of times that were measured in the same contest, round by round: device time
with a cold L2 cache (`results/tables/frame.py`). Brackets hold the 95 % confidence interval
(Hodges-Lehmann) if a run has 6 processes or more, the range over processes if it has fewer, and
the quartiles of the rounds if it has one. A run of fewer than 6 processes is a look, not a verdict.
The interval of a verdict includes the variation between runs: between cards of one kind, days and
versions of the harness. It is estimated from the cases below that two cards measured.

If a call takes less than 20 µs and its run measured chains, the table has two speedups: of the call
in a chain of eight layers in one CUDA graph, and of an isolated call. Other short calls
are marked `isolated`: the time to start a kernel pulls their speedup towards 1.

## Headline

A speedup is over the fastest dense kernel of the contest, with the unpruned weights if the contest
has them. The best peer is the fastest kernel of others in it, apart from dense ones on the pruned
weights. If that is a dense one, at 1.0×, no sparse peer is faster. `measured alone` is the speedup
in a run that confirms the run of the line, and `not yet` if there is none. `in all runs` is the
range over all runs on that kind of GPU, replaced ones included. It is over dense on the same zeros,
because older runs have no unpruned weights.

{headline}

{figure}

## What changed

Each headline beside the one that it replaced. Both are read by the same statistics. The change is
that of the case that is the headline now; before, another case may have been faster. A cause is a
recorded difference: the measure, the weights or the kernel of the baseline, our kernel, and, if the
change of the same case is settled, what `sparsebench compare` names for it.

{changes}

## How often does a second card agree?

{agreement}

## What do users get?

{defaults}

## GPU time

Minutes from start to end of the runs whose numbers a page shows. A run holds the GPU for all of
them, also while the host compiles kernels and checks outputs. It counts in each page that shows it.

{gpu_time}

## Runs

The campaign `suites/campaigns/published.yaml` measures most of these runs again, at one commit.
The list gives the commit of each run, because not all have been replaced yet. A `+` after a commit
means that the checkout had uncommitted changes.

- *power-limited* counts cases. A case counts if, in at least one of its contests, the power limit
  lowered the board's clock for more than a fifth of the time. All contenders of a contest
  share that clock.
- *slow peers* counts cases of peers for which another run, on the same kind of GPU, measured a time
  more than 10 % shorter; the number after it is the largest factor. Leads over these peers are
  too large by up to that factor.

{runs}

A bundle is identified by the SHA-256 of its manifest. `sparsebench validate` compares published
runs with this list, and so does `sha256sum --check README.md`, run in this folder. Runs below
`earlier` were replaced by newer ones.

{digests}
"""


def main() -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sparsebench.reports.published")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page differs"
    )
    check = parser.parse_args().check
    try:
        changed = [*differing(ROOT, read(ROOT))] if check else write(ROOT)
    except ResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = "differs from the published bundles; run python -m sparsebench.reports.published"
    for path in changed:
        print(f"{path.relative_to(ROOT)}: {command if check else 'written'}")
    return int(check and bool(changed))


def write(root: Path) -> list[Path]:
    """Write every page of a checkout and the figure, and return the files that changed.

    Raises ResultError before anything is written if a page cannot be made.
    """
    runs = read(root)
    changed = differing(root, runs)
    if (cards := root / "results" / between_cards.FILE) in changed:
        write_file(cards, changed[cards])
        between_cards.packaged_variation.cache_clear()
        runs = read(root)  # with the new variation in every interval
        changed = {cards: changed[cards], **differing(root, runs)}
    for path, text in changed.items():
        write_file(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    image = root / PICTURE
    before = image.read_bytes() if image.exists() else b""
    picture(runs[PICTURED].cases, image)
    return [*changed, *([image] if image.read_bytes() != before else [])]


def differing(root: Path, runs: Runs) -> dict[Path, str]:
    """Return the pages that differ from the bundles, each with the text that it should have.

    Raises ResultError if a page names an unknown block or leaves one open.
    """
    parts: dict[str, Callable[[Runs], str]] = {"headline": headline}
    parts |= {"finding": finding, "figure": figure, "runs": list_of_runs, "digests": digests}
    parts |= {"terminal": terminal, "changes": headline_changes, "defaults": defaults.markdown}
    texts = {name: make(runs) for name, make in parts.items()}
    of_runs = [(run, Path(run.home).relative_to(HOME).as_posix()) for run in runs.values()]
    evidence = collect_evidence(of_runs, root / HOME)
    attention = collect_attention(of_runs, root / HOME)
    every_cell, pairs = cells_of(runs), repeated_cases(runs)
    texts["agreement"] = agreement(pairs)
    texts["gpu_time"] = time_of_pages(runs, evidence, attention, every_cell, pairs)
    texts["costs"] = costs.markdown(evidence)
    brief = advice.in_brief(evidence, runs[PICTURED].device)
    texts["advice"] = f"**Should I prune?** {brief}"
    pages = {root / HOME / "README.md": PAGE.format(**texts)}
    pages |= {path: _fill(path, texts) for path in map(root.joinpath, BLOCKED) if path.exists()}
    linked = {path: _relative_links(text, root, path) for path, text in pages.items()}
    linked[root / HOME / ADVICE] = evidence.text
    linked[root / HOME / ATTENTION] = attention.text
    linked[root / HOME / cells.FILE] = cells.text_of(every_cell)
    linked[root / "results" / between_cards.FILE] = repeats.text_of(pairs)
    return {path: text for path, text in linked.items() if not path.exists() or _text(path) != text}


def cells_of(runs: Runs) -> list[dict[str, Any]]:
    """Return the cells of all runs."""
    homes = (Path(run.home).relative_to(HOME).as_posix() for run in runs.values())
    parts = [run_lines(run, home) for run, home in zip(runs.values(), homes, strict=True)]
    every = pd.concat([part for part in parts if len(part)], ignore_index=True)
    return cells.cells(every)


def time_of_pages(
    runs: Runs,
    evidence: Evidence,
    attention: AttentionEvidence,
    every_cell: Sequence[cells.CellRecord],
    pairs: pd.DataFrame,
) -> str:
    """Return the GPU time behind each page as a Markdown table."""
    names = {Path(run.home).relative_to(HOME).as_posix(): name for name, run in runs.items()}
    headlines = [runs[question.run] for question in QUESTIONS]
    pages = {
        "the figure and the first answer of README.md": [PICTURED],
        "Headline, with the runs that confirm it": [
            name for run in headlines for name in (run.name, *confirmations_of(run, runs))
        ],
        "Should I prune? Prune or quantize?": [
            *(names[layer.run] for layer in evidence.measured),
            *(names[step.run] for step in evidence.steps),
        ],
        "From which length on?": [
            names[point.run] for curve in attention.curves for point in curve.points
        ],
        "the first page of the site, and the search of cells": [
            names[cell["run"]] for cell in every_cell
        ],
        "How often does a second card agree?": [*pairs.run_a, *pairs.run_b],
        "All runs": [*runs],
    }
    return gpu_time(runs, pages)


def _text(path: Path) -> str:
    return unzip(path, cells.BYTES).decode() if path.suffix == ".gz" else path.read_text("utf-8")


def list_of_runs(runs: Runs) -> str:
    """Return a Markdown table with one line per published run."""
    columns = ["run", "suite", "part (`--only`)", "GPU", "card", "problems", "cases", "processes"]
    columns += ["time", "date", "commit", "kind", "A/A pairs", "power-limited", "slow peers"]
    slow = _slow_peers(runs)
    return markdown_table(columns, [[*_about(run), slow[name]] for name, run in runs.items()])


def digests(runs: Runs) -> str:
    """Return the SHA-256 of the manifest of each run, and of replaced ones, for sha256sum."""
    shown = {Path(run.home).relative_to(HOME): run.run.path for run in runs.values()}
    home = ROOT / HOME
    earlier = {
        run.parent.relative_to(home): run.parent for run in home.glob("*/earlier/*/*/run.json")
    }
    paths = {**shown, **dict(sorted(earlier.items()))}
    lines = [f"{bundle.identity(path)}  {name / bundle.MANIFEST}" for name, path in paths.items()]
    return "\n".join(["```", *lines, "```"])


def finding(runs: Runs) -> str:
    """Return the README's first sentences: what the formats of the pictured run show."""
    run = runs[PICTURED]
    first = run.views[0]
    best = max(first.grid.cases, key=lambda case: float(case["gain"]))
    text = " ".join(sentences(findings(first.grid)))
    held, link = brackets(first.lines.gain_interval), f"[{run.name}](/{run.home})"
    where = f"{about_view(first)}; {held}; {link}; {conditions(best)}"
    return f"**{text}** Measured on {run.device} ({where})."


def figure(runs: Runs) -> str:
    """Return the README's figure and its caption."""
    run = runs[PICTURED]
    return (
        f"![Speedup over cuBLAS against sparsity on {run.device}](/{PICTURE})\n\n"
        f"Bands are 95 % intervals over {run.processes} processes, and the dotted line is "
        f"1 / (1 - sparsity) ([{run.name}](/{run.home}), over dense{weights(run.views[0].lines)})."
    )


def agreement(cases: pd.DataFrame) -> str:
    """Return how often a second card agrees, in sentences and two Markdown tables."""
    tables = zip((STRATA, COVERAGE), coverage_tables(cases), strict=True)
    parts = [" ".join(explanation(cases)), *(markdown_table(*table) for table in tables)]
    return "\n\n".join(parts)


def repeated_cases(runs: Runs) -> pd.DataFrame:
    """Return the cases that two cards measured (results/comparison/repeats.py)."""
    return repeats.repeats(repeats.verdicts(run, name) for name, run in runs.items())


def terminal(runs: Runs) -> str:
    """Return the first lines that `sparsebench run` prints, for one block of the pictured run."""
    run = runs[PICTURED]
    cases = run.cases[run.cases.block == BLOCK]
    suite = yaml.safe_load((ROOT / "suites" / f"{run.run.state['suite']}.yaml").read_text("utf-8"))
    titled = replace(run.run, suite={**run.run.suite, "title": suite["title"]})  # today's wording
    text = StringIO()
    console = Console(file=text, width=COLUMNS, color_system=None, force_terminal=False)
    console.print(RunAnswer(run.of(cases, titled)))
    lines = [*text.getvalue().splitlines()[:LINES], "..."]
    return "\n".join(["```", *(line.rstrip() for line in lines), "```"])


def _about(run: PublishedRun) -> list[str]:
    cases, state = run.cases[~run.cases.twin.astype(bool)], run.run.state
    timed = cases[cases.status == "ok"]
    limited = timed.mark.str.contains("power-limited").sum()
    minutes, seconds = divmod(round(state["seconds"]), 60)
    only = selection(state["flags"]["only"]).replace("|", "\\|")
    facts = flat(run.run.environment)
    cards = {short_card(value) for name, value in facts.items() if name.endswith("gpu.uuid")}
    dirty = " +" if facts.get("dirty") == "True" else ""
    return [
        f"[{run.name}](/{run.home})",
        state["suite"],
        f"`{only}`" if only else "",
        run.device,
        ", ".join(sorted(cards)),
        *map(str, (cases.problem_id.nunique(), len(cases), run.processes)),
        f"{minutes} min {seconds} s" if minutes else f"{seconds} s",
        state["started"][:10],
        commit_of(run.run.path, run.run.environment)[:7] + dirty,
        kind_of(run.processes),
        run.noise.reliability[0],
        f"{limited} of {len(timed)}",
    ]


def _slow_peers(runs: Runs) -> dict[str, str]:
    """Count, for each run, the peers' cases that another run on that kind of GPU timed faster."""
    parts = [run.timed.assign(gpu=run.device, run=name) for name, run in runs.items()]
    every = pd.concat([part for part in parts if len(part)], ignore_index=True)
    peers = every[~every.kernel.map(is_ours).astype(bool)]
    factors = peers.median_us / peers.groupby(["gpu", *KEYS]).median_us.transform("min")
    slow = factors[factors > APART].groupby(peers.run)
    counts = {name: f"{len(group)}, to {group.max():.2f}" for name, group in slow}
    return {name: counts.get(name, "0") for name in runs}


def _fill(path: Path, texts: Mapping[str, str]) -> str:
    """Return a page with every block filled."""
    page = path.read_text("utf-8")
    closed = {block.start() for block in BLOCK_OF_PAGE.finditer(page)}
    for mark in OPENING.finditer(page):
        if mark[1] not in texts:
            raise ResultError(f"{path}: expected a block of {', '.join(texts)}; found {mark[1]!r}")
        if mark.start() not in closed:
            raise ResultError(f"{path}: expected <!-- end --> after {mark[0].strip()}, found none")
    return BLOCK_OF_PAGE.sub(lambda block: f"{block[1]}{texts[block[2]]}\n{block[4]}", page)


def _relative_links(text: str, root: Path, page: Path) -> str:
    """Make links that start at the root of the checkout relative to the page."""

    def relative(link: re.Match[str]) -> str:
        return f"]({Path(os.path.relpath(root / link[1], page.parent)).as_posix()})"

    return re.sub(r"\]\(/([^)]+)\)", relative, text)


if __name__ == "__main__":
    sys.exit(main())

"""A dense product of few tokens never takes longer than that of more, in published rows.

A kernel for 64 tokens computes 16 as well, so a baseline that takes longer for 16 is not at its
best. Differences within MARGINS mean nothing: they are the largest differences of A/A pairs in one
process, as seen on H200s.
"""

from pathlib import Path

import pytest

from sparsebench.results.run import store
from sparsebench.results.tables.cases import summary
from sparsebench.results.tables.cliffs import ratios
from sparsebench.results.tables.frame import frame
from tests.tools.marks import exhaustive
from tests.tools.paths import PUBLISHED

MARGINS = {8.0: 0.042, 20.0: 0.062, 100.0: 0.036, float("inf"): 0.02}  # up to µs: relative
KNOWN = {  # by GPU or version, and run: cache, m, and the m that took less
    "2026-11-25-84a765b/calls": [("hot", 1, 64)],  # searched with a cold cache
    "2026-11-25-84a765b/spense-decode-again": [("cold", 16, 64)],  # inherited configurations
    # torch.compile, which takes 9 us longer than the baseline in both
    "nvidia-h200/claims-layers-moe-2026-inside-experts": [("cold", 1, 16)],
    # torch._grouped_mm with 32 experts, 3 % in routings that each process drew; not the fastest
    "nvidia-h200/experts-large": [("cold", 64, 256)],
}
SAMPLE = {*KNOWN, "nvidia-h200/decode", "nvidia-h100-80gb-hbm3/tokens"}


@pytest.mark.parametrize(
    "path",
    [
        run if "/".join(run.parts[-2:]) in SAMPLE else exhaustive(run)
        for run in (file.parent for file in sorted(PUBLISHED.rglob("run.json")))
        if "/".join(run.parts[-2:]) in KNOWN or "earlier" not in run.parts
    ],
    ids=lambda path: str(path.relative_to(PUBLISHED)),
)
def test_no_published_dense_product_of_few_tokens_is_slower_than_one_of_more(path: Path) -> None:
    rows = [
        row
        for row in store.read(path).rows
        if row.case.contender.baseline and row.case.contender.format == "dense"
        if row.scope == "kernel"
    ]
    cases, slower = summary(frame(rows)), []
    for cache, group in cases[cases.median_us.notna()].groupby("cache"):
        for line in ratios(group).itertuples():
            margin = next(margin for us, margin in MARGINS.items() if line.least_us < us)
            if line.ratio > 1 + margin:
                slower.append((cache, line.m, line.more))
    assert slower == KNOWN.get("/".join(path.parts[-2:]), [])

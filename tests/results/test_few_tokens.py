"""A dense product of few tokens never takes longer than that of more, in published rows.

A kernel for 64 tokens computes 16 as well, so a baseline that takes longer for 16 is not at its
best. Differences within MARGINS mean nothing: they are the largest differences of A/A pairs in one
process, as seen on H200s.
"""

import pytest

from sparsebench.results.run import store
from sparsebench.results.tables.analysis import Analysis, analyse
from sparsebench.results.tables.cliffs import ratios
from tests.tools.paths import PUBLISHED

MARGINS = {8.0: 0.042, 20.0: 0.062, 100.0: 0.036, float("inf"): 0.02}  # up to µs: relative
KNOWN = {  # by GPU or version, and run: cache, m, and the m that took less
    "2026-11-25-84a765b/calls": [("hot", 1, 64)],  # searched with a cold cache
    "2026-11-25-84a765b/spense-decode-again": [("cold", 16, 64)],  # inherited configurations
    # torch.compile, which takes 9 us longer than the baseline in both
    "nvidia-h200/claims-layers-moe-2026-inside-experts": [("cold", 1, 16)],
    # torch._grouped_mm with 8 experts, 15 and 3 % in routings that each process drew; 64 tokens
    # take 665 to 745 us in six processes, and 423 us with the other dense kernel
    "nvidia-h200/experts-large": [("cold", 64, 256), ("cold", 16, 256)],
}
SAMPLE = [*KNOWN, "nvidia-h200/decode", "nvidia-h100-80gb-hbm3/tokens"]


def slower(run: Analysis) -> list[tuple[str, int, int]]:
    """Return the dense products that took longer than one of more tokens, as KNOWN has them."""
    cases, lines = run.estimates, []
    dense = cases.baseline.astype(bool) & (cases.format == "dense") & (cases.scope == "kernel")
    for cache, group in cases[dense & cases.median_us.notna()].groupby("cache"):
        for line in ratios(group).itertuples():
            margin = next(margin for us, margin in MARGINS.items() if line.least_us < us)
            if line.ratio > 1 + margin:
                lines.append((cache, line.m, line.more))
    return lines


@pytest.mark.parametrize("name", SAMPLE)
def test_no_published_dense_product_of_few_tokens_is_slower_than_one_of_more(name: str) -> None:
    (path,) = (file.parent for file in PUBLISHED.rglob(f"{name}/run.json"))
    assert slower(analyse(store.read(path))) == KNOWN.get(name, [])

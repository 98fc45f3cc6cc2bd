"""A dense product of few tokens never takes longer than that of more, in published rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sparsebench.results import store
from sparsebench.results.frame import frame
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from tests.results.few_tokens import slower_with_fewer
from tests.tools.marks import exhaustive
from tests.tools.paths import PUBLISHED

FIELDS = {"n": 64, "k": 32, "dtype": "bf16", "pattern": "blocks", "sparsity": 0.9, "block": 16}
FIRST = 3  # the version of rows whose dense baselines were searched among cuBLASLt's algorithms
KNOWN = {  # by GPU or version, and run: cache, m, and the m that took less
    "2026-11-25-84a765b/calls": [("hot", 1, 64)],  # searched with a cold cache
    "2026-11-25-84a765b/spense-decode-again": [("cold", 16, 64)],  # inherited configurations
    # torch.compile, which takes 9 us longer than the baseline in both
    "nvidia-h200/claims-layers-moe-2026-inside-experts": [("cold", 1, 16)],
    # torch's own product, whose library does not search
    "nvidia-h100-80gb-hbm3/tokens": [("cold", 16, 64)],
}

SAMPLE = {"nvidia-h200/decode", *KNOWN}


def row(m: int, time_us: float, kernel: str = "cublas", **changed: Any) -> Row:
    fields = {**FIELDS, "m": m, **{n: v for n, v in changed.items() if n in FIELDS}}
    rest = {n: v for n, v in changed.items() if n not in FIELDS}
    case = Case(Problem("linear", fields), Contender("dense", kernel, baseline=True))
    return Row(**{"case": case, "status": Status.OK, "samples_us": (time_us,) * 4, **rest})


def doubts(*rows: Row) -> list[tuple[int, int]]:
    lines = slower_with_fewer(frame(rows))
    return [*zip(lines.m.astype(int), lines.more_m.astype(int), strict=True)]


def test_fewer_tokens_that_take_longer_are_found_beside_the_fastest_of_more() -> None:
    assert doubts(row(16, 70.0), row(32, 68.0), row(64, 66.0), row(256, 90.0)) == [(16, 64)]
    assert doubts(row(1, 80.0), row(16, 75.0), row(64, 60.0)) == [(1, 64), (16, 64)]


def version(path: Path) -> int:
    """Return the version of a run's rows."""
    zipped = path / "rows.jsonl.gz"
    with gzip.open(zipped, "rt") if zipped.exists() else (path / "rows.jsonl").open() as file:
        return int(json.loads(file.readline())["schema"].split("@")[1])


@pytest.mark.parametrize(
    "path",
    [
        run if "/".join(run.parts[-2:]) in SAMPLE else exhaustive(run)
        for run in (file.parent for file in sorted(PUBLISHED.rglob("run.json")))
        if version(run) >= FIRST
    ],
    ids=lambda path: str(path.relative_to(PUBLISHED)),
)
def test_no_published_dense_product_of_few_tokens_is_slower_than_one_of_more(path: Path) -> None:
    lines = slower_with_fewer(frame(store.read(path).rows))
    doubtses = [*zip(lines.cache, lines.m, lines.more_m, strict=True)]
    assert doubtses == KNOWN.get("/".join(path.parts[-2:]), []), lines.to_string()

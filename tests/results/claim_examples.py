"""An invented claim that tests change, and cells with the ratios that a test gives."""

from collections.abc import Sequence

import numpy as np
import yaml

from sparsebench.results.claims.cells import ClaimCell, with_value
from sparsebench.results.claims.schema import Claim
from sparsebench.results.claims.verdict import Basis

CLAIM = """\
schema: sparsebench/claim@1
title: Blocks are faster
statement: It is twice as fast as dense
verbatim: true
source: {title: A page, url: "https://example.org/a", date: "2026", kind: paper, checked: Made up.}
hardware: {scope: named, gpus: [H200]}
conditions:
  dtype: {published: fp16, ours: bf16}
measure:
  problems:
    - {op: linear, m: 4096, n: 4096, k: 4096, dtype: bf16, pattern: blocks, block: 64,
       sparsity: [0.5, 0.8]}
  contenders:
    - {format: bsr, kernel: bsr_triton, params: {block: $block}}
  baselines:
    - {format: dense, kernel: cublas}
tests:
  - name: over dense
    subject: {format: bsr}
    baseline: {format: dense}
    metric: speedup
    at_least: 2
    unit: x
    quantifier: exists
"""
DEVICES = {
    Basis.AS_PUBLISHED: "NVIDIA H200",
    Basis.SAME_ARCHITECTURE: "NVIDIA H100 80GB HBM3",
    Basis.OTHER_GPU: "NVIDIA B200",
    Basis.PROXY: "NVIDIA H200 NVL",
}


def claimed(**changed: object) -> Claim:
    """Return CLAIM with another test, hardware or anything else."""
    data = yaml.safe_load(CLAIM)
    test = {k: v for k, v in changed.items() if k in {"at_least", "at_most", "claimed"}}
    test |= {k: v for k, v in changed.items() if k in {"quantifier", "proxy", "metric", "unit"}}
    if "at_most" in test:
        del data["tests"][0]["at_least"]
    data["tests"][0] |= test
    data |= {k: v for k, v in changed.items() if k not in test}
    return Claim.model_validate(data)


def cell(claim: Claim, ratios: Sequence[float], problem: str = "p", **changed: object) -> ClaimCell:
    """Return a cell of these ratios, one a process."""
    facts: dict[str, object] = {
        "test": "over dense",
        "problem": problem,
        "run": "a-run",
        "device": DEVICES[Basis.AS_PUBLISHED],
        "confirms": False,
        "reliable": True,
        "commit": "",
        "fields": {"op": "linear", "m": 4, "level": 0.5},
        "case_ids": (f"{problem} subject", f"{problem} baseline"),
        "reason": "",
    }
    blank = ClaimCell(**(facts | changed))  # type: ignore[arg-type]
    logs = [np.array([np.log(ratio)]) for ratio in ratios]
    return blank if blank.reason else with_value(claim.tests[0], blank, logs)


def spread(middle: float, percent: float = 1.0, processes: int = 8) -> list[float]:
    """Return ratios around a middle, evenly."""
    return [middle * (1 + percent / 100 * step) for step in np.linspace(-1, 1, processes)]

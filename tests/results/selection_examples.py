"""Rows of attention that selects its keys, over lengths, with the gains that a test gives."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.results.advice.crossings import AttentionEvidence, SelectionCurve, curves_of
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run.store import StoredRun
from sparsebench.results.selection_files import Passes, SelectionOutcome, SelectionQuality
from sparsebench.results.tables.analysis import analyse

FA3 = Contender("dense", "fa3", baseline=True)
TWIN = replace(FA3, baseline=False, twin=True)
CUDNN = Contender("dense", "sdpa_cudnn")
ALONE = Contender("block_mask", "attention_wgmma")
NOISE = (-0.02, -0.01, -0.005, 0.005, 0.01, 0.02)  # of a log, by process

Gains = Mapping[int, float]


def selected(selects: str, kernel: str = "attention_selected") -> Contender:
    return Contender("block_mask", kernel, options={"selects": selects})


def rows(gains: Gains, contender: Contender, **fields: Any) -> list[Row]:
    """Return contests of six processes, one for each length, with a gain over the faster dense."""
    decoding = contender.kernel == "attention_decode"
    about = {"heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 16 if decoding else 1}
    about |= {"causal": True, "lists": "kv_heads", "scale": None, "dtype": "bf16"}
    about |= {"pattern": "top_k_blocks", "sparsity": 0.9, "block": [1, 64] if decoding else 64}
    result = []
    for length, gain in gains.items():
        sizes = {"m": 1, "context": length} if decoding else {"m": length, "context": None}
        of_length = {n: v[length] if isinstance(v, dict) else v for n, v in fields.items()}
        problem = Problem("attention", {**about, **sizes, **of_length})
        times = (FA3, 100.0, 0), (TWIN, 100.0, 0), (CUDNN, 120.0, 0), (ALONE, 10.0, 0)
        for process, noise in enumerate(NOISE):
            for each, us, factor in (*times, (contender, 100 / gain, 1)):
                choice = {"rows": 64, **each.options}
                samples = (us * float(np.exp(noise * factor)),) * 4
                case = Case(problem, each)
                facts = {"device": "cpu 1", "clock": "graph", "choice": choice, "sparsity": 0.9}
                result.append(Row(case, Status.OK, process, samples_us=samples, **facts))
    return result


def curves(*every: Row, name: str = "h200/attention-select") -> list[SelectionCurve]:
    state = {"suite": "attention-select", "status": "finished", "started": "2026"}
    state |= {"flags": {"device": "cuda:0", "only": "", "replicates": 6}}
    environment = {"gpu": {"name": "NVIDIA H200", "uuid": "GPU-1"}}
    run = StoredRun(Path("a-run"), {"title": "s"}, "", environment, state, [*every])
    return curves_of([(analyse(run), name)])


GAINS = {2048: 0.5, 4096: 0.8, 8192: 1.6, 32768: 4.0}


def evidence() -> AttentionEvidence:
    dense, few = Passes(2.0, 1.0, 100.0), Passes(2.25, 0.875, 50.0)
    outcomes = [SelectionOutcome(1.0, None, dense, dense), SelectionOutcome(0.1, 4, few, few)]
    about = "m.gguf", "0" * 64, "a text", "NVIDIA H200", "bfloat16", 4096, 4094, 254, 64, 18, 3
    quality = SelectionQuality("sparsebench/selection@1", *about, "token", outcomes)
    return AttentionEvidence(curves(*rows(GAINS, selected("pooled"))), [quality])

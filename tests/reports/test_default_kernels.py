"""What users get: cliffs in the number of tokens, and slower kernels by default."""

import gzip
import json
from collections import Counter
from statistics import median
from typing import Any

import pytest

from sparsebench.reports.figures import remarks
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables import default_kernels as chosen
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.families import by_default
from tests.reports.test_report import DENSE, run
from tests.tools.paths import PUBLISHED

FIELDS: dict[str, Any] = {"n": 512, "k": 512, "dtype": "bf16", "pattern": "blocks", "block": 64}
BSR = {"block": 64}
USERS = Contender("bsr", "default", BSR)
FEW: dict[str, Any] = {"m": 8, "n": 64, "k": 64, "dtype": "bf16", "activation": "relu", "active": 2}


def rows(problem: Problem, *timed: tuple[Contender, float]) -> list[Row]:
    """Return the rows of eight processes; all times of a process drift alike."""
    choices = {"default": {"kernel": "bsr_small"}, "best_of": {"chosen": "dense, cublas"}}
    return [
        Row(
            Case(problem, contender),
            Status.OK,
            replicate=replicate,
            samples_us=(time * (1 + replicate / 100),) * 3,
            sparsity=0.9,
            choice=choices.get(contender.kernel, {}),
        )
        for replicate in range(8)
        for contender, time in timed
    ]


@pytest.mark.parametrize(("slow", "cases"), [(1.04, 0), (1.2, 1)])
def test_a_case_that_takes_longer_than_one_of_more_tokens_is_listed(slow, cases) -> None:
    table = []
    for m in range(1, 16):
        time = 100.0 + m if m != 7 else slow * 108.0
        problem = Problem("linear", {**FIELDS, "m": m, "sparsity": 0.9})
        table += rows(problem, (USERS, time), (DENSE, 150.0))
    text = str(remarks.draw(analyse(run(table))))
    assert f"{cases} of 28 cases" in text
    assert ("m 7" in text, "and m 8 takes" in text) == (bool(cases), bool(cases))


@pytest.mark.parametrize(("us", "within"), [(10.7, 1), (10.9, 0)])
def test_what_users_get_is_compared_with_the_fastest_kernel_of_its_format(us, within) -> None:
    problem = Problem("linear", {**FIELDS, "m": 8, "sparsity": 0.9})
    rivals = [
        (Contender("bsr", "bsr_triton", BSR), 12.0),
        (Contender("bsr", "bsr_small", BSR), 10.0),
        (Contender("bsr", "bsr_strips", {"block": 32}), 5.0),
        (Contender("csr", "csr_cuda"), 6.0),
        (Contender("bsr", "best_of", BSR), 3.0),
    ]
    table = rows(problem, (DENSE, 20.0), (USERS, us), *rivals)
    slower = "In 1 of 1 cases users get a slower kernel by default, which takes up to 1.09 times"
    findings = chosen.sentence(analyse(run(table)).timed)
    assert findings.startswith(slower) if not within else findings == ""


def test_a_layer_is_named_by_the_kernels_of_all_its_products() -> None:
    gate, up = {"kernel": "bsr_wgmma"}, {"kernel": "bsr_small"}
    assert by_default("bsr", {"wg": gate, "wu": up, "wd": gate}) == (
        "bsr_wgmma + bsr_small (by default)"
    )
    assert by_default("bsr", {}) == "BSR (by default)"


def test_kernels_of_few_active_units_are_rivals_whatever_they_store() -> None:
    users, rival = (Contender("twell", "default"), 6.0), (Contender("cvse", "ffn_few"), 5.9)
    table = rows(Problem("ffn", FEW), (DENSE, 9.0), users, rival)
    assert len(chosen.pairs(analyse(run(table)).timed)) == 1


# Cells of published runs in which layers chose a slower kernel (kernels/nn/NOTES.md): peers in the
# same format, W that a layer in training packs in every call, and X that it scales.
SLOWER = {"dlmc": 21, "spense-ffn": 1, "training": 2, "unstructured": 2}


def test_layers_choose_a_kernel_about_as_fast_as_the_fastest_in_other_published_cells() -> None:
    by_cell: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for path in sorted(f.parent for f in PUBLISHED.glob("nvidia-*/*/run.json")):
        text = gzip.decompress((path / "rows.jsonl.gz").read_bytes())
        if b'"kernel":"default"' not in text:
            continue
        for line in text.splitlines()[1:]:
            row = json.loads(line)
            contender = row["case"]["contender"]
            plain = row["status"] == "ok" and not row["reference"] and not contender["twin"]
            if plain and row["scope"] == "kernel":
                place = path.name, json.dumps(row["case"]["problem"]), row["cache"]
                cell = *place, contender["format"], json.dumps(contender["params"])
                times = by_cell.setdefault(cell, {}).setdefault(contender["kernel"], [])
                times.append(median(row["samples_us"]))
    medians = {
        cell: {name: median(us) for name, us in times.items()} for cell, times in by_cell.items()
    }
    both = {cell: us for cell, us in medians.items() if "default" in us and len(us) > 1}
    assert len(both) >= 286
    slow = [cell for cell, us in both.items() if us["default"] > 1.03 * min(us.values()) + 0.5]
    assert Counter(name for name, *_ in slow) == SLOWER

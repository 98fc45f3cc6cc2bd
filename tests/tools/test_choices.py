import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparsebench.kernels._common.choices import package_folder
from sparsebench.kernels.bitmap import bitmap_mma, bitmap_pairs
from sparsebench.kernels.bsr import experts_triton
from sparsebench.kernels.nn import _bsr_engines, _dense_copy, _frozen_op, _spense_engines
from sparsebench.kernels.spense import experts_wgmma
from sparsebench.kernels.twell import _engines as _twell_engines
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run import store
from tests.tools import choices

ENGINES = {
    "bitmap": (bitmap_mma.KERNEL, bitmap_pairs.KERNEL, _dense_copy.OF_BITMAP),
    "bsr": (*_bsr_engines.ENGINES, experts_triton.KERNEL),
    "csr": _frozen_op.CSR,
    "spense": (*_spense_engines.ENGINES, experts_wgmma.KERNEL),
    "twell": _twell_engines.ENGINES,
}
RUN = SimpleNamespace(environment={"gpu": {"compute_capability": "9.0", "multiprocessors": 132}})


def choice(m: int, tokens: int, **more: Any) -> dict[str, Any]:
    problem = {"op": "bsr.linear", "m": m}
    return {"kernel": "bsr_small", "tokens": tokens, "by": "search", "problem": problem, **more}


def test_a_list_has_the_fastest_choice_or_that_of_most_processes(tmp_path, monkeypatch) -> None:
    users = Contender("bsr", "default", {}, {}, False)
    row = Row(Case(Problem("linear", {"m": 1}), users), Status.OK)
    timed = [
        (choice(1, 16), 2.0),
        (choice(1, 16), 2.2),
        (choice(1, 32, code="digest"), 2.0),
        (choice(32, 16), 3.0),
        (choice(16, 16), 3.1),
        (choice(2, 16), 3.2),  # takes longer than more tokens
    ]
    layers = [{"wg": choice(8, tokens), "wd": choice(16, 16, by="model")} for tokens in (8, 4, 8)]
    named = replace(row.case, contender=replace(users, kernel="bsr_small"))
    rows = [
        *(replace(row, choice=each, samples_us=(us,)) for each, us in timed),
        *(replace(row, choice=each, samples_us=(9.0,)) for each in layers),
        replace(row, case=named, choice=choice(64, 64)),
        replace(row, status=Status.WRONG, choice=choice(128, 64)),
    ]
    monkeypatch.setattr(store, "read", lambda run: RUN)
    monkeypatch.setattr(store, "rows", lambda run: rows)
    older = [
        {"problem": {"op": "bsr.linear", "m": m}, "kernel": "bsr_small", "config": {"tokens": m}}
        for m in (2, 4)
    ]
    file = tmp_path / "sm90_132.choices"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in older))
    assert choices.write(tmp_path, tmp_path) == (file, 4)
    lines = {line["problem"]["m"]: line for line in map(json.loads, file.read_text().splitlines())}
    tokens = {m: line["config"]["tokens"] for m, line in lines.items()}
    assert tokens == {1: 32, 4: 4, 8: 8, 16: 16, 32: 16}
    assert lines[1]["code"] == "digest"


def test_a_choice_that_another_kernel_of_ours_beats_leaves_the_list(tmp_path, monkeypatch) -> None:
    def row(m: int, kernel: str, us: float, chosen: dict[str, Any]) -> Row:
        case = Case(Problem("linear", {"m": m}), Contender("bsr", kernel, {}, {}, False))
        return Row(case, Status.OK, samples_us=(us,), choice=chosen)

    rows = [
        *(row(m, "default", 9.1, choice(m, 16)) for m in (1, 2, 4)),
        row(8, "default", 9.1, choice(8, 16, by="package")),
        row(1, "bsr_resident", 7.9, {"tokens": 16}),
        row(2, "torch_bsr", 7.9, {}),  # a peer, which no layer runs
        row(4, "bsr_small_dgrad", 7.9, {"tokens": 16, "by": "search"}),  # without packing
        row(8, "bsr_small", 7.9, {"tokens": 8, "by": "search"}),
    ]
    monkeypatch.setattr(store, "read", lambda run: RUN)
    monkeypatch.setattr(store, "rows", lambda run: rows)
    file = tmp_path / "sm90_132.choices"
    older = {
        "problem": {"op": "bsr.linear", "m": 8},
        "kernel": "bsr_small",
        "config": {"tokens": 8},
    }
    file.write_text(json.dumps(older) + "\n")
    assert choices.write(tmp_path, tmp_path) == (file, 2)
    assert [json.loads(line)["problem"]["m"] for line in file.read_text().splitlines()] == [2, 4]


@pytest.mark.parametrize("file", [*package_folder().glob("*.choices")])
def test_a_list_names_kernels_and_configurations_that_exist(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        family = ENGINES[line["problem"]["op"].partition(".")[0]]
        engine = next(engine for engine in family if engine.name == line["kernel"])
        assert [*engine.candidates(None, None, line["config"])]
    assert len({json.dumps(line["problem"], sort_keys=True) for line in lines}) == len(lines)
    assert len(file.read_bytes()) < 130_000

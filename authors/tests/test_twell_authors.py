"""The kernels of TwELL's authors: requirements, calls on a CPU, and values that are lost."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.harness.bench import contest
from sparsebench.kernels._common import foreign_code, requirements
from sparsebench.kernels._kernel import Kernel, Launch
from sparsebench.results.record import Contender, Problem, Status
from sparsebench_authors import _builds, twell_authors, twell_authors_mlp
from tests.kernels.layers import operands_for, problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TWELL = '''
"""A fake of the authors' module in torch: a word is a value and a place."""
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.functional import linear

def get_ext(algorithms):
    assert algorithms == ["twell_d2t", "twell_gated_t2d"]
    with Path(__file__).with_name("builds").open("a") as log:
        log.write("x")
    library = Path(__file__).with_name("twell_ext.so")
    library.write_text("machine code")
    return SimpleNamespace(__file__=str(library))

def allocate_packed_output(m, n, *, device, compression_factor):
    return torch.zeros(m, n // compression_factor, dtype=torch.int32, device=device)

class D2TLayer:
    gates = {}

    def __init__(self, number, weights, compression_factor, ext):
        assert number not in self.gates
        self.number, self.weights, self.words = number, weights, 256 // compression_factor

    def run(self, x, C_packed):
        gate = linear(x.float(), self.weights.float()).relu()
        kept = gate.view(len(x), -1, 256) > 0
        order = kept.cumsum(2)
        C_packed.view(len(x), -1, self.words)[..., 0] = order[..., -1]
        room = order < self.words
        self.gates[C_packed.data_ptr()] = (gate.view(kept.shape) * room).flatten(1)

def matmul_gated_t2d_out(x, packed, up, down, out, highest_precision, compression, flex, ext):
    assert flex or compression == 8
    gate = D2TLayer.gates[packed.data_ptr()]
    out.copy_((gate * linear(x.float(), up.float())) @ down.float())
'''


def ffn(**fields: Any) -> Problem:
    sizes = {"m": 256, "n": 512, "k": 2048, "dtype": "bf16", "activation": "relu"}
    return problem_of("ffn", **{**sizes, **fields})


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "any name" / twell_authors.MARKER
    file.parent.mkdir(parents=True)
    file.write_text(TWELL)
    monkeypatch.setenv(foreign_code.VARIABLE, str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    imported = _builds.imported

    def fake(file: Path, name: str = "") -> Any:
        return imported(file) if file.suffix == ".py" else (name, file.read_text())

    monkeypatch.setattr(_builds, "imported", fake)
    before = set(sys.modules)
    yield file
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())


def prepared(problem: Problem, **options: Any) -> Launch:
    return twell_authors.prepare(operands_for(problem), **options)


def test_a_missing_checkout_is_the_reason(hopper, checkout, monkeypatch) -> None:
    for n in twell_authors.UNITS:
        assert twell_authors.unsupported(ffn(m=50, n=n), CUDA) is None
    checkout.unlink()
    assert f"found none with {twell_authors.MARKER}" in str(
        twell_authors.unsupported(ffn(n=5632), CUDA)
    )
    monkeypatch.delenv(foreign_code.VARIABLE)
    assert "found no --peers" in str(twell_authors.unsupported(ffn(n=5632), CUDA))


def test_a_checkout_may_be_the_folder_itself(checkout, monkeypatch) -> None:
    folder = checkout.parents[2]
    assert foreign_code.checkout(twell_authors.MARKER) == folder
    monkeypatch.setenv(foreign_code.VARIABLE, str(folder))
    assert foreign_code.checkout(twell_authors.MARKER) == folder


def test_a_row_has_the_digest_of_the_authors_code(checkout: Path) -> None:
    first = prepared(ffn(active=8), highest_precision=True).choice
    assert first["highest_precision"] is True
    assert prepared(ffn(active=8)).choice == first | {"highest_precision": False}
    (checkout.parent / "kernel.cu").write_text("other")
    assert prepared(ffn(active=8)).choice["digest"] != first["digest"]


def test_the_extension_is_built_once_per_digest_of_its_sources(checkout: Path) -> None:
    builds = checkout.with_name("builds")
    twell_authors.extension()
    assert twell_authors.extension()[1] == ("twell_ext", "machine code")
    assert builds.read_text() == "x"
    (checkout.parent / "kernel.cu").write_text("other")
    twell_authors.extension()
    assert builds.read_text() == "xx"
    assert len([*(checkout.parents[3] / "built" / "sparsebench").iterdir()]) == 2


def ran_contest(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, prepare: Any = twell_authors.prepare
) -> Any:
    kernel = Kernel("ffn", "twell", "any", prepare)
    monkeypatch.setattr(twell_authors, "KERNEL", kernel)
    contenders = [Contender("dense", "torch_dense", baseline=True)]
    contenders.append(Contender("twell", "sparsebench_authors.twell_authors"))
    rows, _ = contest.run(problem, contenders, CPU, None)
    assert rows[0].status is Status.OK
    return rows[1]


@pytest.mark.parametrize(("m", "padding"), [(256, {}), (50, {"tokens": 256})])
def test_few_active_units_are_right(checkout, monkeypatch, m, padding) -> None:
    row = ran_contest(ffn(m=m, active=8), monkeypatch)
    assert row.status is Status.OK, row.detail
    assert row.choice.items() >= padding.items()
    assert ("tokens" in row.choice) == bool(padding)


def test_a_value_that_is_lost_is_wrong_and_counted(checkout, monkeypatch) -> None:
    """With 44 of 512 units active a tile seldom has more than 31, so the error would pass."""
    every = partial(twell_authors.prepare, flex=False)
    row = ran_contest(ffn(active=44), monkeypatch, every)
    assert row.status is Status.WRONG
    when, reason = row.detail.split(" timing: ")  # operands are redrawn after timing
    count, rest = reason.split(" ", 1)
    assert when in ("before", "after")
    assert rest == "values lost: the format had no room for them"
    assert 1 <= int(count) < 300


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        ("def matmul_gated_t2d_out", "def of_another_version", Status.FAILED),
        ("compression_factor, ext):\n        assert", "ext):\n        assert", Status.FAILED),
        ("out.copy_((gate", "print((gate", Status.WRONG),  # Y stays uninitialised
    ],
)
def test_a_checkout_of_another_version_is_a_row_with_its_reason(
    checkout, monkeypatch, before, after, status
) -> None:
    assert before in TWELL
    checkout.write_text(TWELL.replace(before, after))
    row = ran_contest(ffn(active=8), monkeypatch)
    assert row.status is status
    assert row.detail
    assert not row.samples_us


def test_ways_that_lose_values_are_not_timed(checkout: Path) -> None:
    assert prepared(ffn(active=44)).choice["compression"] == 4
    assert prepared(ffn(active=44), flex=False).choice["compression"] == 8
    assert prepared(ffn(active=8)).choice["compression"] == 8


MLP = (
    TWELL
    + """

def _resolve_algorithms_with_deps(names):
    return ["twell_d2t", *names]

def _ext_name_for_algorithms(names):
    return "_".join(names)

def matmul_t2d_out(packed, down, out, num_splits, ext):
    out.copy_(D2TLayer.gates[packed.data_ptr()] @ down.float())
"""
)


@pytest.mark.parametrize("m", [256, 50])
def test_the_layer_without_a_gate_uses_the_extension_that_the_authors_have_built(
    checkout, tmp_path, m
) -> None:
    checkout.write_text(MLP)
    fields = {"m": m, "n": 512, "k": 2048, "dtype": "bf16", "activation": "relu", "active": 8}
    operands = operands_for(problem_of("mlp", **fields))
    with pytest.raises(Unsupported, match="TwELLMLP"):
        twell_authors_mlp.prepare(operands)
    library = tmp_path / "built" / "twell_d2t_twell_mlp" / "twell_d2t_twell_mlp.so"
    library.parent.mkdir(parents=True)
    library.write_text("machine code")
    launch = twell_authors_mlp.prepare(operands, num_splits=4)
    weights = {name: w.to_dense() for name, w in operands.weights.items()}
    expected = operands.definition(**weights, **operands.activations).float()
    y = launch()
    assert isinstance(y, torch.Tensor)
    assert (y.float() - expected).norm() <= 0.01 * expected.norm()
    assert launch.choice["num_splits"] == 4
    assert launch.choice.get("tokens", m) == 256

"""The training step of TwELL's authors: padding, lost values, other versions, unsupported sizes.

Two dense functions take the place of their operators.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from sparsebench.errors import Unsupported
from sparsebench.harness.bench import contest
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._kernel import Kernel, Operands
from sparsebench.results.record import Contender, Problem, Status
from sparsebench_authors import _builds, twell_authors_step
from sparsebench_authors.twell_authors_step import CONFIGS, Config
from tests.kernels.layers import operands_for, problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OP = load_op("ffn_step")
M, N, K = 256, 512, 64


def problem(**fields: Any) -> Problem:
    sizes = {"m": M, "n": N, "k": K, "dtype": "bf16", "activation": "relu"}
    return problem_of("ffn_step", **{**sizes, **fields})


def operands_of(problem: Problem, pinned: Any = None) -> Operands:
    return replace(operands_for(problem), pinned=pinned)


def forward(x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor) -> tuple[Any, ...]:
    assert x.shape[:2].numel() % 256 == 0
    gate, up = relu(linear(x[0], wg)), linear(x[0], wu)
    return ((gate * up) @ wd_t)[None], 0, 0, gate, up, None


def backward(
    x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, gate: Tensor, up: Tensor, _: None, *rest: Any
) -> tuple[Tensor, ...]:
    (dy,), no_l0, no_l1 = rest
    assert not no_l0.any()
    assert not no_l1.any()
    dh = dy @ wd_t.t()
    du, dg = dh * gate, dh * up * (gate > 0)
    return (dg @ wg + du @ wu)[None], dg.t() @ x[0], du.t() @ x[0], (gate * up).t() @ dy


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, int]]:
    file, settings = tmp_path / "sparse_ops.so", dict[str, int]()
    file.write_bytes(b"machine code")
    setters = {
        f"set_{name}": lambda value, name=name: settings.update({name: value})
        for name in (
            *("ell_width_regular", "ell_width_transpose", "tail_rows_regular"),
            *("tail_rows_transpose", "discard_overflow"),
        )
    }
    fakes = SimpleNamespace(ff_forward_gated=forward, ff_backward_gated=backward)
    monkeypatch.setattr(torch.ops, "sparse_ops", fakes, raising=False)
    monkeypatch.setattr(torch.ops, "sparse_ops_config", SimpleNamespace(**setters), raising=False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv(twell_authors_step.VARIABLE, str(file))
    twell_authors_step.loaded.cache_clear()
    yield settings
    twell_authors_step.loaded.cache_clear()


@pytest.mark.parametrize(("m", "padding"), [(M, {}), (50, {"tokens": 256})])
def test_the_five_results_are_those_of_the_op(library, m, padding) -> None:
    operands = operands_of(problem(m=m, active=8))
    launch = twell_authors_step.prepare(operands)
    assert ("tokens" in launch.choice) == bool(padding)
    assert launch.choice.items() >= padding.items()
    for _ in range(2):  # follows redrawn activations
        weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
        expected = OP.definition(**weights, **operands.activations, activation="relu").float()
        y = launch()
        assert isinstance(y, Tensor)
        assert (y.float() - expected).norm() <= 0.02 * expected.norm()
        assert launch.lost is not None
        assert launch.lost() == 0
        operands.activations["x"].copy_(operands.activations["x"].flip(0))


def test_a_pinned_configuration_is_set_before_each_call(library: dict[str, int]) -> None:
    pinned = vars(Config(64, 512, 2048, 512)) | {"digest": "of an earlier process"}
    launch = twell_authors_step.prepare(operands_of(problem(active=8), pinned))
    library.clear()
    launch()
    assert list(library.values()) == [64, 512, 2048, 512, 0]
    assert launch.choice["tails_bytes"] == 3 * 2 * (2048 * N + 512 * M)


def test_values_without_room_are_counted_and_such_configurations_are_not_timed(library) -> None:
    active = torch.zeros(600, 512, dtype=torch.bool)
    active[0, :33] = True  # 33 of a tile of 256: two are lost whatever the widths
    assert [Config(64, 512, 512, 512).count_lost(active)] == [2]
    active[:, 256:] = torch.arange(256) < 20
    active[0] = False
    full = Config(64, 512, 512, 2048)  # 599 of the 600 tokens have 20; 20 units have 599 tokens
    assert full.count_lost(active) == 0
    assert Config(16, 512, 512, 2048).count_lost(active) == 20 * (599 - 512)
    assert Config(64, 512, 512, 16).count_lost(active) == 4 * 599
    with pytest.raises(Unsupported, match="no room for"):
        twell_authors_step.prepare(operands_of(problem(active=300)))
    pinned = vars(CONFIGS[-1])
    launch = twell_authors_step.prepare(operands_of(problem(active=300), pinned))
    assert launch.lost is not None
    assert launch.lost() > 0


def test_a_library_that_is_not_built_is_one_line_and_nothing_is_built(
    library, tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv(foreign_code.VARIABLE, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv(twell_authors_step.VARIABLE, str(tmp_path / "none.so"))
    assert "found no file" in str(twell_authors_step.unsupported(problem(), CUDA))
    monkeypatch.delenv(twell_authors_step.VARIABLE)
    reason = str(twell_authors_step.unsupported(problem(), CUDA))
    assert "load_sparse_ops()" in reason
    assert "\n" not in reason
    with pytest.raises(Unsupported, match="load_sparse_ops"):
        twell_authors_step.prepare(operands_of(problem(active=8)))
    built = tmp_path / "extensions" / "py312_cu130" / "sparse_ops" / "sparse_ops.so"
    built.parent.mkdir(parents=True)
    built.touch()
    assert twell_authors_step.unsupported(problem(), CUDA) is None
    search = "sparse_ops", twell_authors_step.MARKER, twell_authors_step.VARIABLE
    assert _builds.prebuilt(*search) == built
    loader = tmp_path / "clone" / twell_authors_step.MARKER
    beside = loader.parent / "build" / "lib.linux-x86_64" / "sparse_ops.so"
    beside.parent.mkdir(parents=True)
    for file in (loader, beside):
        file.touch()
    monkeypatch.setenv(foreign_code.VARIABLE, str(tmp_path))
    assert _builds.prebuilt(*search) == beside


def test_a_library_for_another_torch_is_refused_in_one_line(library, monkeypatch) -> None:
    def refuse(path: str) -> None:
        raise OSError("undefined symbol: _ZN3c10\nmore lines")

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    with pytest.raises(Unsupported, match=r"undefined symbol: _ZN3c10$"):
        twell_authors_step.prepare(operands_of(problem(active=8)))


def without_hidden(*layer: Tensor) -> tuple[Any, ...]:
    """Return the output alone, like the operator that autograd calls."""
    return *forward(*layer)[:3], torch.empty(0), torch.empty(0), None


def with_lost_value(*layer: Tensor) -> tuple[Any, ...]:
    y, *others = forward(*layer)
    y[0, 0] = 0
    return y, *others


@pytest.mark.parametrize(
    ("operators", "status"),
    [
        ({"ff_forward_gated": forward}, Status.FAILED),  # the other has another name
        ({"ff_forward_gated": lambda x, wg: x, "ff_backward_gated": backward}, Status.FAILED),
        ({"ff_forward_gated": without_hidden, "ff_backward_gated": backward}, Status.FAILED),
        ({"ff_forward_gated": with_lost_value, "ff_backward_gated": backward}, Status.WRONG),
    ],
)
def test_operators_of_another_version_have_a_row_with_the_reason_and_no_time(
    library, monkeypatch, operators, status
) -> None:
    monkeypatch.setattr(torch.ops, "sparse_ops", SimpleNamespace(**operators))
    kernel = Kernel("ffn_step", "twell", "any", twell_authors_step.prepare)
    monkeypatch.setattr(twell_authors_step, "KERNEL", kernel)
    contenders = [Contender("dense", "torch_dense", baseline=True)]
    contenders.append(Contender("twell", "sparsebench_authors.twell_authors_step"))
    rows, _ = contest.run(problem(active=8), contenders, CPU, None)
    assert [row.status for row in rows] == [Status.OK, status]
    assert rows[1].detail
    assert not rows[1].samples_us

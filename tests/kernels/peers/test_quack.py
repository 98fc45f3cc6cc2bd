"""QuACK as a peer of experts: what the launches do; torch's products replace QuACK's here."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from sparsebench.errors import Unsupported
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._common import requirements
from sparsebench.kernels.peers import experts_quack
from sparsebench.results.record import Problem
from tests.kernels.layers import assert_right_twice, operands_for, problem_of

CUDA = torch.device("cuda")
GATED = {"swiglu": silu, "reglu": relu}
SIZES = {"m": 9, "n": 48, "k": 40, "dtype": "fp16", "experts": 4, "top_k": 2}


@dataclass(frozen=True)
class GemmConfig:
    """The fields of QuACK's configuration that its list for Hopper sets."""

    tile_m: int = 128
    tile_n: int = 192
    pingpong: bool = True
    cluster_m: int = 2
    cluster_n: int = 1
    is_dynamic_persistent: bool = True
    device_capacity: int = 9


def every_config(epilogue: str | None = None) -> list[GemmConfig]:
    of_hopper = [GemmConfig(128, n, n < 200, 1, 2, is_dynamic_persistent=False) for n in (128, 208)]
    return [*of_hopper, GemmConfig(device_capacity=10)]


def fits(config: GemmConfig, *, gather_A: bool, varlen_m: bool) -> bool:
    return varlen_m and not (gather_A and config.tile_n == 208)


def products(x: Tensor, w: Tensor, starts: Tensor) -> Tensor:
    """Multiply the rows from starts[e] to starts[e + 1] by W[e], as QuACK does."""
    assert starts[0] == 0
    parts = [x[a:b].float() @ w[e].float() for e, (a, b) in enumerate(pairwise(starts))]
    return torch.cat(parts)


def gemm(a: Tensor, b: Tensor, out: Tensor, *, cu_seqlens_m: Tensor, config: GemmConfig) -> None:
    assert not config.is_dynamic_persistent
    out.copy_(products(a, b, cu_seqlens_m))


def gemm_gated(
    a: Tensor, b: Tensor, *, activation: str, store_preact: bool, cu_seqlens_m: Tensor,
    config: GemmConfig, concat_layout: tuple[str] | None = None, A_idx: Tensor | None = None,
) -> tuple[None, Tensor]:  # fmt: skip
    assert A_idx is None or config.tile_n != 208
    assert concat_layout in (None, ("B",))
    assert b.stride(1) == 1
    assert not store_preact
    both = products(a if A_idx is None else a[A_idx], b, cu_seqlens_m)
    gate, up = both.chunk(2, 1) if concat_layout else (both[:, ::2], both[:, 1::2])
    return None, (GATED[activation](gate) * up).to(a.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    interface, configs = ModuleType("quack.gemm_interface"), ModuleType("quack.gemm_config")
    vars(interface).update(gemm_tuned=SimpleNamespace(fn=gemm), gemm_gated=gemm_gated)
    vars(configs).update(get_all_configs=every_config, config_supports=fits, GemmConfig=GemmConfig)
    for module in (ModuleType("quack"), interface, configs):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def problem(op: str, **fields: Any) -> Problem:
    return problem_of(op, **{**SIZES, **fields})


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("routing", ["uniform", "one", "holes"])
@pytest.mark.parametrize("name", ["experts_quack", "experts_ffn_quack"])
def test_a_launch_computes_the_op_again_with_its_pinned_choice(name: str, routing: str) -> None:
    kernel = load_kernel(name)
    launch = assert_right_twice(operands_for(problem(kernel.op, routing=routing)), kernel.prepare)
    tile = {"tile_n": 128, "pingpong": True}
    way = {"gathers": True, "alternate": False}  # one tile may gather
    assert launch.choice == (tile if name == "experts_quack" else {"gate_up": way, "down": tile})


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("alternate", [True, False])
def test_all_ways_to_compute_hidden_units_are_right(gathers: bool, alternate: bool) -> None:
    kernel, tile = load_kernel("experts_ffn_quack"), {"tile_n": 128, "pingpong": True}
    way = {"gathers": gathers, "alternate": alternate, **({} if gathers else tile)}
    case = replace(operands_for(problem(kernel.op)), pinned={"gate_up": way, "down": tile})
    assert assert_right_twice(case, kernel.prepare).choice == case.pinned


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("experts_quack", {"dtype": "fp32"}, "expected fp16 or bf16, found fp32"),
        ("experts_quack", {"n": 44}, "n a multiple of 8 and k a multiple of 8, found 44 and 40"),
        ("experts_ffn_quack", {"activation": "relu2"}, "expected silu or relu, found relu2"),
        ("experts_ffn_quack", {"k": 36}, "found 48 and 36"),
    ],
)
def test_a_problem_is_refused_with_its_reason(monkeypatch, name, fields, reason) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda package: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel = load_kernel(name)
    refused = partial(kernel.unsupported, device=CUDA)
    assert refused(problem(kernel.op)) is None
    assert reason in str(refused(problem(kernel.op, **fields)))


def test_without_the_package_the_reason_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda package: None)
    reason = "needs quack: pip install quack-kernels"
    assert experts_quack.unsupported(problem("experts"), CUDA) == reason
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    with pytest.raises(Unsupported, match=r"expected quack-kernels 0\.6\.5 or newer, found"):
        experts_quack.tiles()

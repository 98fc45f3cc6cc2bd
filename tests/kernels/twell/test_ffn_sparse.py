"""The portfolios of layers, and the dense products of groups that ffn_sparse.cu leaves."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from sparsebench.kernels._common.operator import Engine, NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.search import Search
from sparsebench.kernels._kernel import DTYPES, Launch
from sparsebench.kernels.twell import _remainder, ffn_sparse, mlp_sparse
from sparsebench.kernels.twell._call import TwellCall, twell_engine
from sparsebench.kernels.twell._remainder import GROUP
from tests.compiling.nvcc import hopper
from tests.kernels.contract import refusal
from tests.kernels.layers import assert_right_twice, operands_for, problem_of
from tests.kernels.twell.examples import assert_right, drawn

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KERNELS = {"ffn": ffn_sparse, "mlp": mlp_sparse}


def problem(m: int, op: str = "ffn", **more: Any) -> Any:
    fields = {"activation": "relu", "pattern": "dense", "sparsity": 0.0, "dtype": "bf16"}
    return problem_of(op, m=m, n=1024, k=512, **fields | more)


@pytest.mark.parametrize("op", KERNELS)
def test_a_portfolio_compares_dense_kernels_and_names_its_choice(op, monkeypatch) -> None:
    module, case = KERNELS[op], operands_for(problem(3, op))
    for name, kernel in module.DENSE.items():
        launch = Launch(lambda: torch.zeros(3), {"tile": name})
        monkeypatch.setattr(kernel, "prepare", lambda *_, launch=launch: launch)

    def engine(name: str) -> Engine:
        product = Product(lambda x, *_, out=None: x)
        return twell_engine(name, lambda _: [NoConfig()], lambda *_: product, lambda *_: None)

    engines = {"best": (engine("ffn_few"),), "library": (engine("ffn_sparse"),)}
    monkeypatch.setattr(ffn_sparse, "ENGINES", engines)
    names = {"library": f"cvse, {op}_sparse way=library", "sparse": f"cvse, {op}_few"}
    for way, name in names.items():
        assert module.prepare(case, way=way).choice["chosen"] == name
    for i, chosen in enumerate((names["sparse"], *(f"dense, {k}" for k in module.DENSE))):
        monkeypatch.setattr(ffn_sparse, "search", lambda *_, i=i: Search(i))
        launch = module.prepare(case)
        assert launch.choice["chosen"] == chosen
        monkeypatch.setattr(ffn_sparse, "search", lambda calls, _: Search(len(calls) - 1))
        assert module.prepare(replace(case, pinned=launch.choice)).choice == launch.choice


def test_ways_that_are_gone_are_refused() -> None:
    case = operands_for(problem(4))
    for way, advice in {"dense": "'dense'", "few": "use ffn_few", "alone": "use way=lib"}.items():
        assert advice in refusal(lambda way=way: ffn_sparse.prepare(case, way=way))


@hopper
@pytest.mark.parametrize("active", [8, 600])
@pytest.mark.parametrize("m", [16, 48, 300])
@pytest.mark.parametrize("op", KERNELS)
def test_a_portfolio_is_right_and_repeats_a_pinned_choice_on_a_gpu(op, m, active) -> None:
    case = operands_for(problem(m, op, active=active), GPU)
    for way in get_args(ffn_sparse.Way):
        launch = assert_right_twice(case, lambda case, way=way: KERNELS[op].prepare(case, way=way))
        if way == "library":
            assert launch.choice["chosen"] == f"cvse, {op}_sparse way=library"


@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "squared"), [("fp16", False), ("fp32", True)])
@pytest.mark.parametrize(("m", "heavy"), [(21, [2, 0]), (150, [*range(19)]), (9, [])])
@pytest.mark.parametrize("gated", [True, False])
def test_interpreted_dense_products_write_the_groups_left(m, heavy, gated, dtype, squared):
    call = TwellCall(m, 72, 40, DTYPES[dtype], squared, gated)
    operands = x, gate, up, wd_t = drawn(call, 0.3)
    x[0, 0] = torch.nan
    g, y, left = x @ gate.T, torch.full_like(x, 7.0), torch.tensor([len(heavy), 0, 5]).int()
    groups = torch.zeros(-(-m // GROUP), dtype=torch.int32)
    groups[: len(heavy)] = torch.tensor(heavy)
    ups = () if up is None else (up,)
    _remainder.template_of(call, CPU)(x, g, *ups, wd_t, y, left, groups)

    written = torch.isin(torch.arange(m) // GROUP, torch.tensor(heavy))
    assert (y[~written] == 7).all()
    assert not written[0] or y[0].isnan().all()
    written[0], x[0, 0] = False, 0
    assert_right(y, operands, squared, written)
    assert not left.any()

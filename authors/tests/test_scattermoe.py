"""ScatterMoE as a peer: what the layer does with the authors' product, and what it needs.

`TRITON_INTERPRET=1 SPARSEBENCH_PEERS=DIR pytest authors/tests/test_scattermoe.py` runs their code.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import foreign_code
from sparsebench.results.record import Problem
from sparsebench_authors import scattermoe
from tests.kernels.layers import assert_right, operands_for, problem_of

CUDA = torch.device("cuda")
PRODUCT = '''
import torch

def scatter2scatter(X, W, sorted_expert_idxs, sorted_scattered_idxs, k, x_grouped=False,
                    y_grouped=False):
    """Multiply each row by the weight of its expert; X and Y are sorted by expert if grouped."""
    rows = X if x_grouped else X[sorted_scattered_idxs // k]
    products = torch.bmm(rows[:, None].float(), W[sorted_expert_idxs].float())[:, 0].to(X.dtype)
    if y_grouped:
        return products
    return torch.empty_like(products).index_copy_(0, sorted_scattered_idxs, products)
'''


def layer(**fields: Any) -> Problem:
    sizes = {"m": 9, "n": 48, "k": 40, "dtype": "fp16", "experts": 4, "top_k": 2}
    return problem_of("experts_ffn", **{**sizes, **fields})


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "scattermoe" / scattermoe.MARKER
    file.parent.mkdir(parents=True)
    file.write_text(PRODUCT)
    monkeypatch.setenv(foreign_code.VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return file


CASES = [
    {},
    {"m": 1, "activation": "relu2"},
    {"m": 200, "routing": "one", "activation": "relu"},
    {"m": 70, "routing": "holes", "experts": 8, "top_k": 3},
]


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("fields", CASES)
def test_the_layer_computes_the_op_with_their_product(fields: dict[str, Any]) -> None:
    operands = operands_for(layer(**fields))
    assert_right(scattermoe.prepare(operands), operands)


@pytest.mark.interpreted
@pytest.mark.parametrize("fields", CASES)
def test_their_kernels_compute_the_op(fields: dict[str, Any]) -> None:
    if not foreign_code.checkout(scattermoe.MARKER) or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(f"needs TRITON_INTERPRET=1, and a checkout of {scattermoe.REPOSITORY}")
    operands = operands_for(layer(**fields))
    assert_right(scattermoe.prepare(operands), operands)


def test_a_missing_checkout_is_the_reason(checkout: Path) -> None:
    assert scattermoe.unsupported(layer(), CUDA) is None
    checkout.unlink()
    reason = f"found none with {scattermoe.MARKER}"
    assert reason in str(scattermoe.unsupported(layer(), CUDA))


def test_a_row_has_the_digest_of_their_code(checkout: Path) -> None:
    operands = operands_for(layer())
    digest = scattermoe.prepare(operands).choice["digest"]
    checkout.with_name("single.py").write_text("# other")
    assert scattermoe.prepare(operands).choice["digest"] != digest

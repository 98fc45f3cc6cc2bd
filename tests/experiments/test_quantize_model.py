"""The script experiments/quantize_model.py: what is representable stays, and zeros do."""

import json
from pathlib import Path

import pytest
import quantize_model
import torch
from quantize_model import FOUR_BITS, FP8, to_four_bits, to_fp8
from torch import Tensor

from sparsebench.results.model_files import read_pruning
from tests.harness.tiny_models import tiny, tokenizer

K, N, TOKENS = 256, 24, 1024


@pytest.fixture(scope="module")
def x() -> Tensor:
    """Return correlated inputs [TOKENS, K]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, 32, generator=draw) @ torch.randn(
        32, K, generator=draw
    ) + 0.1 * torch.randn(TOKENS, K, generator=draw)


def test_representable_weights_stay(x: Tensor) -> None:
    codes = torch.randint(-7, 8, (N, K), generator=torch.Generator().manual_seed(1))
    codes[:, ::128] = 7  # so that the largest scale is the one of the codes
    weight = codes / 8.0
    torch.testing.assert_close(to_four_bits(weight, x), weight)
    fp8 = torch.tensor([448.0, 1.0, -0.5, 0.0])
    assert torch.equal(to_fp8(fp8), fp8)


def test_errors_of_a_column_are_compensated_and_zeros_stay(x: Tensor) -> None:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(2))
    weight[:, ::2] = 0
    nearest = to_four_bits(weight, torch.eye(K))  # uncorrelated inputs compensate nothing
    compensated = to_four_bits(weight, x)
    errors = [float(((each - weight) @ x.T).norm()) for each in (compensated, nearest)]
    assert errors[0] < 0.7 * errors[1]
    assert not compensated[:, ::2].any()


def test_a_file_has_the_loss_of_each_kind(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    out = tmp_path / "quantized.json"
    quantize_model.main(tmp_path, out, tokens=4096)
    outcomes = read_pruning(out).outcomes
    assert [(each.pattern, each.sparsity) for each in outcomes] == [
        *((bits, 0.0) for bits in (FP8, FOUR_BITS)),
        *((f"2:4 in {bits}", sparsity) for sparsity in (0.25, 0.5) for bits in (FP8, FOUR_BITS)),
    ]
    fp8, four, *_ = (each.errors["output"] for each in outcomes)
    assert 0 < fp8 < four < 0.2
    assert json.loads(out.read_text())["held_out"] == 2048

"""What the kernels refuse, with a token of the reason."""

from typing import Any

import pytest
import torch

from sparsebench.harness.catalog import load_kernel
from tests.kernels.layers import problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
USUAL = {"m": 16, "n": 512, "k": 256, "dtype": "bf16"}
IN_4_BITS = {"weight_bits": 4, "pattern": "two_four", "sparsity": 0.5}
TWELL = {"k": 2048, "n": 5632, "activation": "relu"}

PROBLEMS: list[tuple[str, dict[str, Any], str]] = [
    ("marlin", {"dtype": "bf16", **IN_4_BITS}, "expected"),
    ("marlin", {"dtype": "fp16", "n": 128, **IN_4_BITS}, "expected"),
    ("sparse_marlin", {"dtype": "fp16", "k": 192, **IN_4_BITS}, "expected"),
    ("marlin", {"dtype": "fp16", "weight_bits": None}, "weight_bits"),
    ("sparse_marlin", {"dtype": "fp16", "weight_bits": None}, "weight_bits"),
    ("spinfer", {"dtype": "bf16"}, "expected fp16, found bf16"),
    ("spinfer", {"dtype": "fp16", "n": 500}, "found 500 and 256"),
    ("scattermoe", {"experts": 4, "top_k": 2, "dtype": "fp32"}, "expected fp16 or bf16"),
    ("macko", {"m": 1, "dtype": "fp32"}, "expected fp16, found fp32"),
    ("macko", {"m": 2, "dtype": "fp16"}, "expected m 1, found 2"),
    ("twell_authors", {**TWELL, "device": CPU}, "compute capability 9.0"),
    ("twell_authors", {**TWELL, "dtype": "fp16"}, "bf16 and relu, found fp16"),
    ("twell_authors", {**TWELL, "activation": "silu"}, "found bf16 and silu"),
    ("twell_authors", {**TWELL, "n": 512}, "found k 2048 and n 512"),
    ("twell_authors", {**TWELL, "m": 2**19}, "at most 384 tiles"),
    ("twell_authors_step", {**TWELL, "device": CPU}, "compute capability 9.0"),
    ("twell_authors_step", {**TWELL, "dtype": "fp16"}, "found fp16"),
    ("twell_authors_step", {**TWELL, "activation": "relu2"}, "relu2"),
    ("twell_authors_step", {**TWELL, "n": 500, "m": 256}, "found m 256, n 500"),
    ("twell_authors_step", {**TWELL, "n": 8448}, "n 8448"),
    ("twell_authors_step", {**TWELL, "k": 96}, "k 96"),
    ("twell_authors_step", {**TWELL, "m": 65537}, "found m 65792"),
    *((name, {"device": CPU, "dtype": "fp16"}, "NVIDIA GPU") for name in ("spinfer", "macko")),
]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "fields", "token"), PROBLEMS)
def test_a_problem_is_refused_with_its_reason(name, fields, token) -> None:
    kernel, rest = load_kernel(f"sparsebench_authors.{name}"), USUAL | fields
    device = rest.pop("device", CUDA)
    assert token in str(kernel.unsupported(problem_of(kernel.op, **rest), device))

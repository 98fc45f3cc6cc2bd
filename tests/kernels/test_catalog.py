"""The contract of every kernel that needs a GPU: it refuses a CPU, and its results are right.

A contest captures the launch in a CUDA graph, fills its output with NaN, and redraws the
activations. A second one pins the choice of the first (harness/testing/kernels.py). The tests of a
kernel itself need neither. harness/test_testing.py has the kernels of a CPU.
"""

import pytest
import torch

from sparsebench import testing
from sparsebench._discovery import modules
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.results.record import Problem
from tests.tools.marks import exhaustive

PLACES = {n: place for n, place in modules("kernels").items() if place.startswith("sparsebench.")}
KERNELS = {n: kernel for n in PLACES if (kernel := load_kernel(n)).device == "cuda"}
FAMILIES = "attention", "bitmap", "bsr", "csr", "spense", "twell"
SIZES = "m=64 n=512 k=256"
STEP = "m=2 hidden=256 heads=4 kv_heads=2 head_dim=32 intermediate=256 vocab=40 layers=2 context=20"
ATTENTION = "m=256 context=256 heads=4 kv_heads=4 head_dim=128 batch=1"
BY_OP = {"decoder": STEP, "attention": ATTENTION, "attention_backward": ATTENTION}
BY_OP |= dict.fromkeys(
    ("experts", "experts_dgrad", "experts_wgrad", "experts_ffn"), f"{SIZES} experts=4 top_k=2"
)
BY_OP["experts_decoder"] = f"{STEP} experts=4 top_k=2"
BY_FORMAT = {
    "bsr": "pattern=blocks block=64 sparsity=0.5",
    "block_mask": "pattern=top_k_blocks block=64 sparsity=0.5",
    "csr": "pattern=unstructured sparsity=0.9",
    "bitmap": "pattern=unstructured sparsity=0.5",
    "spense": "pattern=two_four sparsity=0.5",
    "slide": "pattern=six_eight sparsity=0.25",
    "int4": "weight_bits=4",
    **dict.fromkeys(("cvse", "twell", "active_csr"), "activation=relu active=8"),
}
BY_NAME = {
    "attention_split": "m=16 context=2048 heads=4 kv_heads=4 head_dim=128 batch=1 causal=true "
    "pattern=sliding_window block=[16,64] sparsity=0.5",
    "attention_decode": "m=1 context=2048 heads=8 kv_heads=4 head_dim=128 batch=2 causal=true "
    "lists=kv_heads pattern=top_k_blocks block=[16,64] sparsity=0.75",
    "attention_paged": "m=1 context=2048 heads=8 kv_heads=4 head_dim=128 batch=2 causal=true "
    "block=[16,64]",
    **dict.fromkeys(("attention_gathered", "attention_gathered_backward", "fla_nsa"),
                    "m=512 context=512 heads=32 kv_heads=2 head_dim=128 batch=1 causal=true "
                    "lists=kv_heads pattern=top_k_blocks block=[1,64] sparsity=0.5"),
    "cusparselt_hybrid": f"{SIZES} pattern=spense_rows sparsity=0.25",
    **dict.fromkeys(("bsr_first", "bsr_wgrad_mma"),
                    f"{SIZES} pattern=blocks block=16 sparsity=0.5"),
    "linear_few": "m=2 n=512 k=256 active=8",
    **dict.fromkeys(("stk", "stk_dgrad", "stk_wgrad"),
                    f"{SIZES} pattern=blocks block=128 sparsity=0.5"),
}  # fmt: skip
IN_FP8 = "bsr_triton", "bsr_wgmma", "cublas", "experts_wgmma", "slide_wgmma", "spense_wgmma"


def words_for(name: str) -> str:
    """Return a problem that the kernel runs, in the words of `sparsebench try`."""
    kernel = KERNELS[name]
    usual = f"{BY_OP.get(kernel.op, SIZES)} {BY_FORMAT.get(kernel.consumes, '')}"
    return BY_NAME.get(name, usual)


@pytest.mark.parametrize("name", [n for n in KERNELS if PLACES[n].split(".")[2] in FAMILIES])
def test_a_kernel_refuses_a_cpu(name: str) -> None:
    op = load_op(KERNELS[name].op)
    few = {"m": 2, "activation": "relu", "active": 8}
    sizes = op.defaults | (op.example or {"m": 16, "n": 128, "k": 128})
    fields = sizes | {"dtype": "bf16"} | {k: v for k, v in few.items() if k in sizes}
    reason = KERNELS[name].unsupported(Problem(KERNELS[name].op, fields), torch.device("cpu"))
    assert "found cpu" in str(reason)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # inductor and libraries of peers warn
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "") for name in KERNELS), *(exhaustive((name, " dtype=fp8")) for name in IN_FP8)],
)
def test_a_kernel_is_right_on_a_gpu_captured_and_pinned(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # six candidates of the backward pass took 295 of the 399 s of all GPU tests on an H200
    monkeypatch.setattr("sparsebench.kernels.peers.flex_attention.MOST_BACKWARD", 1)
    try:
        testing.check_kernel(name, words_for(name) + dtype, device="cuda:0")
    except AssertionError as failure:
        missing = "needs", "No module named"  # of the house, and of cuDNN's own module
        if "found none" in str(failure) and any(word in str(failure) for word in missing):
            pytest.skip(str(failure))
        raise

"""attention_wgmma_backward: its kernels, emulated on a CPU, and what it refuses."""

import ctypes
from functools import partial
from pathlib import Path

import pytest
import torch

from sparsebench.kernels.attention import attention_wgmma, attention_wgmma_backward
from sparsebench.kernels.attention._shapes import LOG2_E, Shape
from sparsebench.kernels.attention._wgmma_tiles import key_lists, key_tiles, query_tiles, span_of
from sparsebench.kernels.attention.attention_wgmma_backward import Config, padded
from tests.compiling.nvcc import CLEAN, assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import library_of
from tests.kernels.attention.cases import Case, gradients, without
from tests.kernels.attention.warpgroups import on_cpu
from tests.kernels.contract import refusal
from tests.tools.marks import needs_gxx, sampled

RUN = """
static struct {
  Maps maps; Lists lists; Stats stats; Sizes sizes; char *dk, *dv;
} args;
static void run() {
  differentiate(args.maps, args.lists, args.stats, args.sizes, args.dk, args.dv);
}
extern "C" void call(void** at, const int* n, float scale, float log_scale, int grid, int bytes) {
  args.maps = {boxes(at[0], n[0], n[2], BOX_Q), boxes(at[1], n[0], n[2], BOX_Q),
                boxes(at[2], n[1], n[3], KV_ROWS), boxes(at[3], n[1], n[3], KV_ROWS)};
  args.lists = {(Tile*)at[4], (int*)at[5], (int*)at[6], (int*)at[7], (unsigned char*)at[8],
                 (int*)at[9], n[6], n[7], n[8]};
  args.stats = {(float*)at[10], (float*)at[11]};
  args.dk = (char*)at[12], args.dv = (char*)at[13];
  args.sizes = {n[0], n[1], n[2], n[3], n[4], scale, log_scale};
  launch(grid, THREADS, 1, bytes, run, true);
}
"""
RUN_QUERIES = """
static struct { Maps maps; Lists lists; Stats stats; char* out; Sizes sizes; } args;
static void run() {
  differentiate_queries(args.maps, args.lists, args.stats, args.out, args.sizes);
}
extern "C" void call(void** at, const int* n, float scale, int grid, int bytes) {
  args.maps.k = boxes(at[3], n[1], n[3], BOX_KEYS);
  args.maps.v = boxes(at[4], n[1], n[3], BOX_KEYS);
  for (int i = 0; i < 3; i++) args.maps.queries[i] = boxes(at[i], n[0], n[2], Q_BOX);
  args.lists = {(Tile*)at[5], (int*)at[6], (int*)at[7], (unsigned char*)at[8], (int*)at[9], n[4]};
  args.stats = {(float*)at[10], (float*)at[11], (float*)at[12], n[5]};
  args.out = (char*)at[13], args.sizes = {n[0], n[1], n[2], n[3], scale};
  launch(grid, THREADS, 1, bytes, run, true);
}
"""


# The producers have 24 registers, and spill one for small blocks.
ONE_REGISTER = "8 bytes stack frame, 4 bytes spill stores,"
WIDE, TWO = Config(128), Config(64)
CASES = [
    Case((200, 270), 128, (2, 1), WIDE, batch=2, lists=2, causal=True),
    Case((150, 200), 64, (2, 2), TWO, lists=2, bits=True),
    Case((150, 260), (64, 128), (2, 1), TWO, causal=True, head_dim=64, dtype="bf16"),
    Case((150, 260), (64, 128), (2, 1), WIDE, head_dim=64, density=0),
    Case((150, 300), 16, (4, 1), TWO, batch=2, causal=True),
    Case((150, 200), 32, (4, 2), TWO, lists=2, head_dim=64, dtype="bf16"),
    Case((150, 200), (16, 64), (4, 1), TWO, bits=True, head_dim=64),
    Case((150, 200), (64, 32), (2, 2), TWO, lists=2, causal=True, density=1),
]


@needs_gxx
@pytest.mark.parametrize("late", sampled([1, 0], 0))
@pytest.mark.parametrize("case", sampled(CASES, 1, 4))
def test_the_threads_differentiate_on_a_cpu(case: Case, late: int) -> None:
    mask, shape, depth = case.mask(), case.shape(), case.head_dim
    mask = mask if case.bits else without(mask, 1)
    q, k, v, do = case.operands()
    o, lse, expected = gradients((q, k, v, do), mask)
    if not case.bits:  # NaN where no query looks
        for x in (k, v):
            x[:, mask.block[1] : 2 * mask.block[1]] = torch.nan
    o, lse = o.to(q.dtype).contiguous(), lse.float().contiguous()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    heads, rows = case.batch * shape.heads, padded(shape.q_tokens)
    lse_2 = torch.full((heads, rows), torch.inf)
    delta = torch.zeros(heads, rows)
    counters = torch.zeros(2, dtype=torch.int32)
    lists = key_lists(mask)
    tiles = key_tiles(lists, mask, shape, case.config.rows)
    index = tiles, lists.offsets, lists.rows, lists.slots, mask.bits, counters
    tensors = q, do, k, v, *index, lse_2, delta, dk, dv
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    counts = case.batch, len(tiles), mask.lists, lists.present.shape[1]
    constants = attention_wgmma_backward.constants_of(case.config, shape, mask)
    sizes = (ctypes.c_int * 9)(*case.tokens, *case.heads, rows, *counts)
    at = (ctypes.c_void_p * 14)(*pointers)
    scale = ctypes.c_float(depth**-0.5)
    config = attention_wgmma_backward.of_queries(shape, mask)
    span = min(span_of(mask.block[0]), config.rows)
    of_queries = query_tiles(mask, shape, config.rows, span)
    of_walk = of_queries, mask.columns, mask.slots, mask.bits, counters
    tensors = q, do, o, k, v, *of_walk, lse, lse_2, delta, dq
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    macros = *attention_wgmma.constants_of(config, shape, mask, False, 3), ("LATE", late)
    text = on_cpu("attention_wgmma_dq.cu", RUN_QUERIES)
    numbers = *case.tokens, *case.heads, len(of_queries), rows
    library_of(text, macros).call(
        *((ctypes.c_void_p * 14)(*addresses), (ctypes.c_int * 6)(*numbers)),
        *(ctypes.c_float(depth**-0.5 * LOG2_E), 2),
        attention_wgmma.shared_bytes(config, depth, 3),
    )
    text = on_cpu("attention_wgmma_backward.cu", RUN, "kv")
    library_of(text, (*constants, ("LATE", late))).call(
        *(at, sizes, scale, ctypes.c_float(depth**-0.5 * LOG2_E), 2),
        attention_wgmma_backward.shared_bytes(case.config, depth),
    )
    allowed = 1e-2 if case.dtype == "fp16" else 6e-2
    for actual, gradient in zip((dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(actual.double(), gradient, atol=allowed, rtol=allowed)
    assert counters.tolist() == [0, 0]  # as the next launch needs them


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [64, 128, 192])
def test_configurations_fit_the_shared_memory_and_have_slots_for_a_step(block, head_dim) -> None:
    shape = Shape(1, 256, 256, 2, 1, head_dim, (block, block), "bf16")
    for config in attention_wgmma_backward.configurations(shape, 2):
        assert attention_wgmma_backward.slots_of(config, head_dim) >= 3
        assert attention_wgmma_backward.shared_bytes(config, head_dim) <= 227 * 1024 - 1024


@pytest.mark.parametrize(
    ("block", "token"), [((32, 64), "32"), ((64, 96), "96"), ((64, 8), "8"), ((48, 64), "48")]
)
def test_blocks_that_do_not_fit_are_refused(block: tuple[int, int], token: str) -> None:
    shape = Shape(1, 256, 256, 1, 1, 64, block, "bf16")
    assert token in refusal(lambda: attention_wgmma_backward.configurations(shape, 1))


def test_bits_of_joined_blocks_are_refused() -> None:
    case = Case((64, 64), 16, (4, 1), bits=True)
    call = partial(attention_wgmma_backward.work_of, case.mask(), case.shape(), TWO)
    assert "bits" in refusal(call)


@by_nvcc
@pytest.mark.parametrize("case", CASES)
def test_it_compiles_cleanly(case: Case, tmp_path: Path) -> None:
    mask, shape = case.mask(), case.shape()
    constants = attention_wgmma_backward.constants_of(case.config, shape, mask)
    spills = case.block == 16 and case.head_dim == 128
    clean = ONE_REGISTER if spills else CLEAN
    assert_compiles_cleanly("attention_wgmma_backward", constants, tmp_path, clean=clean)
    config = attention_wgmma_backward.of_queries(shape, mask)
    of_queries = attention_wgmma.constants_of(config, shape, mask, False, 3)
    assert_compiles_cleanly("attention_wgmma_dq", of_queries, tmp_path, clean=clean)

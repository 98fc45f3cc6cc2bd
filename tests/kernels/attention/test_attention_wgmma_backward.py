"""attention_wgmma_backward: its kernels, emulated on a CPU, and what it refuses."""

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsebench.kernels.attention import _stored, attention_wgmma, attention_wgmma_backward
from sparsebench.kernels.attention._shapes import LOG2_E, Shape
from sparsebench.kernels.attention._wgmma_tiles import key_lists
from sparsebench.kernels.attention.attention_wgmma_backward import Config, padded
from tests.compiling.nvcc import CLEAN, assert_compiles_cleanly, by_nvcc, hopper
from tests.emulation.cuda_on_cpu import library_of
from tests.kernels.attention.cases import Case, flat, gradients, moved, without
from tests.kernels.attention.warpgroups import on_cpu
from tests.kernels.contract import refusal
from tests.tools.marks import needs_gxx, sampled

RUN = """
static struct {
  Maps maps; Lists lists; Stats stats; Sizes sizes; Stored stored; char *dk, *dv;
} args;
static void run() {
  differentiate(args.maps, args.lists, args.stats, args.sizes, args.stored, args.dk, args.dv);
}
extern "C" void call(void** at, const int* n, float scale, float log_scale, int grid, int bytes) {
  args.maps = {boxes(at[0], n[0], n[2], BOX_Q), boxes(at[1], n[0], n[2], BOX_Q),
                boxes(at[2], n[1], n[3], KV_ROWS), boxes(at[3], n[1], n[3], KV_ROWS)};
  args.lists = {(Tile*)at[4], (int*)at[5], (int*)at[6], (int*)at[7], (unsigned char*)at[8],
                 (int*)at[9], n[6], n[7], n[8]};
  args.stats = {(float*)at[10], (float*)at[11]};
  args.dk = (char*)at[12], args.dv = (char*)at[13];
  args.stored = {(char*)at[14], (int*)at[15], (int*)at[16], 0};
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
RUN_STORED = """
static struct { TensorMap k; Lists lists; char *scores, *out; Sizes sizes; } args;
static void run() { multiply_stored(args.k, args.lists, args.scores, args.out, args.sizes); }
extern "C" void call(void** at, const int* n, float scale, int grid, int bytes) {
  args = {boxes(at[0], n[1], n[3], 64), {(Tile*)at[1], (int*)at[2], (int*)at[3]}, (char*)at[4],
          (char*)at[5], {n[0], n[1], n[2], n[3], scale, 0}};
  launch(grid, THREADS, 1, bytes, run);
}
static struct { uint4 *o, *d_o; Stats stats; } rows;
static void run_rows() { weigh_rows(rows.o, rows.d_o, rows.stats); }
extern "C" void weigh(void** at, const int* n, int grid) {
  rows = {(uint4*)at[0], (uint4*)at[1],
          {(float*)at[2], (float*)at[3], (float*)at[4], n[0], n[1], n[2], n[3]}};
  launch(grid, 256, 1, 0, run_rows);
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
    Case((300, 330), (256, 192), (2, 1), TWO, lists=2, head_dim=64, density=1),
    Case((150, 300), 16, (4, 1), TWO, batch=2, causal=True),
    Case((150, 200), 32, (4, 2), TWO, lists=2, head_dim=64, dtype="bf16"),
    Case((150, 200), (16, 64), (4, 1), TWO, bits=True, head_dim=64),
    Case((150, 200), (64, 32), (2, 2), TWO, lists=2, causal=True, density=1),
]

STORES = CASES[:5]
RUNS = [*((case, 1 << 20) for case in STORES), *((case, 0) for case in CASES[5:])]
RUNS += (CASES[0], 70_000), (CASES[2], 0), (CASES[0], 0)  # two sections; dS is not stored
FIVE = Case((64, 128), 64, (1, 1), TWO, batch=5, density=1)
RUNS += ((FIVE, 2 * 64 * 64),)  # a section for each head


@needs_gxx
@pytest.mark.parametrize("late", sampled([1, 0], 0))
@pytest.mark.parametrize(("case", "most"), sampled(RUNS, 1, 5, 9, 10, 12))
def test_the_threads_differentiate_on_a_cpu(
    case: Case, most: int, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stored, "SECTION_BYTES", most)
    config = replace(case.config, stores=bool(most))
    mask, shape, depth = case.mask(), case.shape(), case.head_dim
    mask = mask if case.bits else without(mask, 1)
    q, k, v, do = case.operands()
    o, lse, expected = gradients((q, k, v, do), mask)
    if not case.bits:  # NaN where no query looks
        for x in (k, v):
            x[:, mask.block[1] : 2 * mask.block[1]] = torch.nan
    o, lse = o.to(q.dtype).contiguous(), lse.float().contiguous()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    heads, rows = case.batch * shape.heads, padded(shape)
    lse_2 = torch.full((heads, rows), torch.inf)
    delta = torch.zeros(heads, rows)
    lists, factor = key_lists(mask), depth**-0.5 * LOG2_E
    counters = torch.zeros(2, dtype=torch.int32)
    bounds = *case.tokens, *case.heads

    def differentiate(tiles: Tensor, *stored: Tensor) -> None:
        index = tiles, lists.offsets, lists.rows, lists.slots, mask.bits, counters
        pointers = addresses(q, do, k, v, *index, lse_2, delta, dk, dv, *stored)
        counts = case.batch, len(tiles), mask.lists, lists.present.shape[1]
        macros = attention_wgmma_backward.constants_of(config, shape, mask)
        library_of(
            on_cpu("attention_wgmma_backward.cu", RUN, "kv"), (*macros, ("LATE", late))
        ).call(
            *(pointers, numbers(*bounds, rows, *counts)),
            *(ctypes.c_float(depth**-0.5), ctypes.c_float(factor), 2),
            attention_wgmma_backward.shared_bytes(config, depth),
        )

    work = attention_wgmma_backward.work_of(mask, shape, config)
    if stored := work.stored:
        size = _stored.BUFFERS, stored.blocks, *mask.block
        buffers = torch.full(size, torch.nan, dtype=q.dtype)
        macros = *_stored.constants_of(shape), ("LATE", late)
        library = library_of(on_cpu("attention_wgmma_stored.cu", RUN_STORED), macros)
        lines = q.numel() // depth
        library.weigh(
            addresses(o, do, lse, lse_2, delta),
            *(numbers(rows, shape.q_tokens, shape.heads, lines), -(-lines * depth // 2048)),
        )
        for section, is_product, _ in _stored.steps_of(len(stored.keys)):
            scores = buffers[section % _stored.BUFFERS]
            if not is_product:
                scores.fill_(torch.nan)
                differentiate(stored.keys[section], scores, stored.places, stored.shifts)
                continue
            tiles = stored.queries[section]
            library.call(
                addresses(k, tiles, mask.columns, stored.shifts, scores, dq),
                *(numbers(*bounds), ctypes.c_float(depth**-0.5), len(tiles)),
                _stored.shared_bytes(shape),
            )
    else:
        of_rows = attention_wgmma_backward.of_queries(shape, mask)
        tiles = work.queries.tiles
        macros = *attention_wgmma.constants_of(of_rows, shape, mask, False, 3), ("LATE", late)
        library_of(on_cpu("attention_wgmma_dq.cu", RUN_QUERIES), macros).call(
            addresses(
                *(q, do, o, k, v, tiles, mask.columns, mask.slots, mask.bits, counters),
                *(lse, lse_2, delta, dq),
            ),
            *(numbers(*bounds, len(tiles), rows), ctypes.c_float(factor), 2),
            attention_wgmma.shared_bytes(of_rows, depth, 3),
        )
        differentiate(work.tiles)
    allowed = 1e-2 if case.dtype == "fp16" else 6e-2
    for actual, gradient in zip((dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(actual.double(), gradient, atol=allowed, rtol=allowed)
    assert counters.tolist() == [0, 0]  # as the next launch needs them


@pytest.mark.parametrize("sections", [1, 2, 3, 9])
def test_what_a_launch_needs_has_ended_when_it_begins(sections: int) -> None:
    """A launch that does not wait begins when the one before its predecessor has ended."""
    steps = _stored.steps_of(sections)
    assert {(step.section, step.is_product) for step in steps} == {
        (n, is_product) for n in range(sections) for is_product in (False, True)
    }
    place = {step[:2]: at for at, step in enumerate(steps, 1)}  # weigh_rows is at 0
    for section, is_product, waits in steps:
        at = place[section, is_product]
        if is_product:
            needs = [place[section, False]]
        else:
            needs = [0] + [place[n, True] for n in range(section - 2) if (n - section) % 3 == 0]
        assert all(needed <= at - (1 if waits else 2) for needed in needs)


def addresses(*tensors: Tensor | None) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of 17 tensors, or 0."""
    return (ctypes.c_void_p * 17)(*[None if x is None else x.data_ptr() for x in tensors])


def numbers(*values: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(values))(*values)


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


def test_a_head_with_too_many_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stored, "HEAD_BYTES", 3 * 2 * 128 * 128)
    config, case = Config(128, True), CASES[0]
    call = partial(attention_wgmma_backward.work_of, case.mask(), case.shape(), config)
    assert "3" in refusal(call)


@by_nvcc
@pytest.mark.parametrize(
    ("case", "stores"), [*((case, True) for case in STORES), *((case, False) for case in CASES)]
)
def test_it_compiles_cleanly(case: Case, stores: bool, tmp_path: Path) -> None:
    mask, shape = case.mask(), case.shape()
    spills = case.block == 16 and case.head_dim == 128
    clean = ONE_REGISTER if spills else CLEAN
    constants = attention_wgmma_backward.constants_of(
        replace(case.config, stores=stores), shape, mask
    )
    assert_compiles_cleanly("attention_wgmma_backward", constants, tmp_path, clean=clean)
    if stores:
        assert_compiles_cleanly("attention_wgmma_stored", _stored.constants_of(shape), tmp_path)
    else:
        config = attention_wgmma_backward.of_queries(shape, mask)
        of_queries = attention_wgmma.constants_of(config, shape, mask, False, 3)
        assert_compiles_cleanly("attention_wgmma_dq", of_queries, tmp_path, clean=clean)


@hopper
@pytest.mark.parametrize("block", [64, 128])
def test_sections_that_overlap_give_the_bits_of_a_single_one(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((1500, 1400), block, (12, 12), lists=12, dtype="bf16")
    mask, shape, (q, k, v, do) = moved(case.mask()), case.shape(), map(flat, case.operands())
    o, lse, _ = gradients(case.operands(), case.mask())
    inputs = q, k, v, flat(o.to(q.dtype)), lse.flatten(0, 1).float(), do
    operands = [moved(x) for x in inputs]
    config = attention_wgmma_backward.configurations(shape, 1)[0]
    args = operands, mask, shape, case.head_dim**-0.5, config
    single = attention_wgmma_backward.launch(*args).program().clone()
    monkeypatch.setattr(_stored, "SECTION_BYTES", 3 << 20)  # a head takes 2.0 MB
    work = attention_wgmma_backward.work_of(mask, shape, config)
    assert work.stored
    assert len(work.stored.keys) == 12
    program = attention_wgmma_backward.launch(*args, work).program
    for _ in range(20):
        program.out.fill_(torch.nan)
        assert torch.equal(program(), single)

"""attention_wgmma: its text, emulated on a CPU thread by thread, its tiles, and what it refuses."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels.attention import attention_wgmma
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import LOG2_E, Shape
from sparsebench.kernels.attention._wgmma_tiles import query_tiles, span_of
from sparsebench.kernels.attention.attention_wgmma import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import library_of
from tests.kernels.attention.cases import Case, random_mask, reference, rising
from tests.kernels.attention.warpgroups import on_cpu
from tests.kernels.contract import refusal
from tests.tools.marks import needs_gxx, sampled

RUN = """
static struct { Maps maps; Lists lists; char* out; float* lse; Sizes sizes; Parts parts; } args;
static void run() {
  attend(args.maps, args.lists, args.out, args.lse, args.sizes, args.parts);
}
extern "C" void call(void** at, const int* n, float scale, int grid, int bytes) {
  args.maps = {boxes(at[1], n[1], n[3], BOX_KEYS), boxes(at[2], n[1], n[3], BOX_KEYS),
                {boxes(at[0], n[0], n[2], Q_BOX)}};
  args.lists = {(Tile*)at[3], (int*)at[4], (int*)at[5], (unsigned char*)at[6], (int*)at[7], n[4]};
  args.parts = {n[5], n[6], (float4*)at[10], (int*)at[7] + 2};
  args.out = (char*)at[8], args.lse = (float*)at[9];
  args.sizes = {n[0], n[1], n[2], n[3], scale};
  launch(grid, THREADS, 1, bytes, run, true);
}
"""


WIDE, TWO = Config(128, 128), Config(64, 64)
CASES = [
    Case((200, 270), 128, (2, 1), WIDE, batch=2, lists=2, causal=True, dtype="bf16"),
    Case((150, 200), 64, (4, 2), WIDE, lists=2, bits=True),
    Case((70, 100), 16, (4, 1), Config(64, 128), causal=True, density=1),
    Case((150, 260), (64, 128), (2, 2), TWO, lists=2, head_dim=64, dtype="bf16"),
    Case((100, 100), 32, (8, 2), WIDE, lists=2, head_dim=64, density=0),
    Case((40, 130), (64, 8), (1, 1), Config(64, 128), bits=True),
    Case((300, 300), (256, 192), (2, 1), Config(128, 64), lists=1),
]


def attend_on_cpu(case: Case, operands: list[Tensor], late: int, parts: int = 1) -> None:
    """Run the text of the kernel, and compare O and the LSE with those in fp64.

    parts  into which each tile but the first is split
    """
    mask, shape, (q, k, v, _), rows = case.mask(), case.shape(), operands, case.config.rows
    tiles = query_tiles(mask, shape, rows, min(span_of(mask.block[0]), rows))
    counters = torch.zeros(2 + len(tiles) * rows // 16, dtype=torch.int32)
    sums = torch.full((len(tiles) * parts * rows * 2, case.head_dim // 2 + 4), torch.nan)
    o = torch.full_like(q, torch.nan)
    lse = torch.full((case.batch, shape.heads, shape.q_tokens), torch.nan)
    short = attention_wgmma.shortens(case.config, mask)
    macros = attention_wgmma.constants_of(case.config, shape, mask, short, splits=parts > 1)
    constants = *macros, ("LATE", late)
    run = library_of(on_cpu("attention_wgmma.cu", RUN), constants).call
    tensors = q, k, v, tiles, mask.columns, mask.slots, mask.bits, counters, o, lse, sums
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    sizes = *case.tokens, *case.heads, 1 + parts * (len(tiles) - 1), 1, parts
    run(
        *((ctypes.c_void_p * 11)(*pointers), (ctypes.c_int * 7)(*sizes)),
        *(ctypes.c_float(case.head_dim**-0.5 * LOG2_E), 2),
        attention_wgmma.shared_bytes(case.config, case.head_dim),
    )
    expected, log_sum = reference(q.double(), k.double(), v.double(), mask)
    allowed = 2e-3 if case.dtype == "fp16" else 2e-2
    torch.testing.assert_close(o.double(), expected, atol=allowed, rtol=allowed)
    torch.testing.assert_close(lse.double(), log_sum, atol=1e-4, rtol=1e-5)
    assert not counters.any()  # as the next launch needs them


@needs_gxx
@pytest.mark.parametrize("late", sampled([1, 0], 0))
@pytest.mark.parametrize("case", sampled(CASES, 0, 1))
def test_the_threads_attend_on_a_cpu(case: Case, late: int) -> None:
    attend_on_cpu(case, case.operands(), late)


@needs_gxx
@pytest.mark.parametrize("case", sampled([CASES[0], CASES[1], CASES[3]], 0))
def test_scores_that_rise_along_a_list_are_right(case: Case) -> None:
    attend_on_cpu(case, rising(case.operands()), 0)


@needs_gxx
@pytest.mark.parametrize("case", sampled([CASES[0], CASES[1], CASES[3]], 0))
def test_tiles_that_are_split_into_parts_are_right(case: Case) -> None:
    attend_on_cpu(case, case.operands(), 0, parts=2)


@pytest.mark.parametrize(
    ("tiles", "steps", "parts"),
    [(264, 64, 1), (265, 64, 8), (268, 13, 4), (268, 5, 1), (300, 64, 3), (331, 64, 1), (5, 64, 1)],
)
def test_a_last_round_of_few_long_tiles_is_split(tiles: int, steps: int, parts: int) -> None:
    work = torch.full((tiles, 4), steps, dtype=torch.int32)
    assert attention_wgmma.parts_of(work, WIDE, 128, 132) == parts


@pytest.mark.parametrize("head_dim", attention_wgmma.HEAD_DIMS)
@pytest.mark.parametrize("block", [16, 32, 64, 128, (256, 192)])
def test_configurations_fit_the_shared_memory_and_have_slots_for_a_step(block, head_dim) -> None:
    mask = random_mask((256, 256), block)
    shape = Shape(1, 256, 256, 8, 2, head_dim, mask.block, "bf16")
    configs = attention_wgmma.configurations(shape, shared_heads(mask, 8, 2))
    assert configs
    for config in configs:
        assert attention_wgmma.slots_of(config, head_dim) >= 3
        assert attention_wgmma.shared_bytes(config, head_dim) <= 227 * 1024


@pytest.mark.parametrize(
    ("block", "heads", "token"),
    [(16, (4, 4), "16"), (32, (4, 4), "32"), ((64, 48), (1, 1), "48"), ((64, 4), (1, 1), "4")],
)
def test_blocks_that_no_tile_holds_are_refused(block: Any, heads: Any, token: str) -> None:
    mask = random_mask((256, 256), block)
    shape = Shape(1, 256, 256, *heads, 128, mask.block, "bf16")
    shared = shared_heads(mask, *heads)
    assert token in refusal(lambda: attention_wgmma.configurations(shape, shared))


@by_nvcc
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.block}")
@pytest.mark.parametrize("splits", [False, True])
def test_it_compiles_cleanly(case: Case, splits: bool, tmp_path: Path) -> None:
    mask, config = case.mask(), case.config
    short = attention_wgmma.shortens(config, mask)
    constants = attention_wgmma.constants_of(config, case.shape(), mask, short, splits=splits)
    # With short steps, ptxas serialises some products. That costs 0 to 4.5 %, and only masks that
    # gain more by short steps have them (NOTES.md).
    allowed = "(C7511)" if dict(constants)["SHORTENS"] else ""
    assert_compiles_cleanly("attention_wgmma", constants, tmp_path, allowed)

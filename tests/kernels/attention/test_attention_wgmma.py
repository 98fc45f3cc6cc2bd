"""What only the kernels for Hopper need: what they refuse, and their launches' order.

test_attention_contract.py runs and compiles them.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.attention import _stored, attention_wgmma, attention_wgmma_backward
from sparsebench.kernels.attention._call import ListedMask
from tests.compiling.nvcc import hopper
from tests.kernels.attention.cases import Case, flat, gradients, moved
from tests.kernels.attention.on_cpu import on_two_sms
from tests.kernels.contract import refusal

FORWARD, BACKWARD = attention_wgmma.KERNEL, attention_wgmma_backward.KERNEL


@pytest.mark.parametrize("head_dim", attention_wgmma.HEAD_DIMS)
@pytest.mark.parametrize("block", [16, 32, 64, 128, (256, 192), (64, 8)])
def test_configurations_fit_the_shared_memory_and_have_slots_for_a_step(block, head_dim) -> None:
    case = Case((256, 256), block, (8, 2), head_dim=head_dim)
    w, call = ListedMask(case.mask()), case.call()
    for config in FORWARD.choices(w, call):
        slots = attention_wgmma.slots_of(config, head_dim)
        entries = config.keys // min(config.keys, call.shape.block[1])
        notes = config.tiles * (slots * (4 * (4 + 2 * entries) + 16) + 32)  # and barriers
        assert slots >= 3
        assert attention_wgmma.shared_bytes(config, head_dim) + notes <= 227 * 1024
    for config in BACKWARD.choices(w, call) if block != (64, 8) else ():
        assert attention_wgmma_backward.slots_of(config, head_dim) >= 3
        assert attention_wgmma_backward.shared_bytes(config, head_dim) <= 226 * 1024


@pytest.mark.parametrize(
    ("engine", "block", "heads", "bits", "token"),
    [
        *((FORWARD, block, (4, 4), False, str(block)) for block in (16, 32)),
        *((FORWARD, (64, keys), (1, 1), False, str(keys)) for keys in (48, 4)),
        *((BACKWARD, (q, 64), (1, 1), False, str(q)) for q in (32, 48)),
        *((BACKWARD, (64, keys), (1, 1), False, str(keys)) for keys in (96, 8)),
        (BACKWARD, 16, (4, 1), True, "bits"),
    ],
)
def test_blocks_that_no_tile_holds_are_refused(engine, block, heads, bits, token: str) -> None:
    case = Case((256, 256), block, heads, bits=bits)
    assert token in refusal(lambda: engine.choices(ListedMask(case.mask()), case.call()))


def test_a_head_with_too_many_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_two_sms(monkeypatch, late=False)
    monkeypatch.setattr(_stored, "HEAD_BYTES", 3 * 2 * 128 * 128)
    case = Case((200, 270), 128, (2, 1), density=1)  # 12 blocks
    w, call = ListedMask(case.mask()), case.call("attention_backward")
    config = attention_wgmma_backward.Config(128, stores=True)
    assert "found 12" in refusal(lambda: BACKWARD.plan(w, call, config))


def test_an_attention_sink_makes_it_likelier_that_ds_is_computed_twice() -> None:
    case = Case((16384, 16384), 128, (8, 8), lists=8, causal=True)
    draw = torch.Generator().manual_seed(0)
    cells = (torch.rand(8 * 128, 128, generator=draw) < 0.1).float()
    for sink in (False, True):
        cells[:, 0] = cells[:, 0].clamp(min=sink)
        mask = BlockMask.from_dense(cells, causal=True)
        shape = replace(case.call().shape, heads=32)
        assert _stored.is_likelier(mask, shape, workers=132) is not sink


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


@hopper
@pytest.mark.parametrize("block", [64, 128])
def test_sections_that_overlap_give_the_bits_of_a_single_one(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((1500, 1400), block, (12, 12), lists=12, dtype="bf16")
    mask, (q, k, v, do) = case.mask(), case.operands()
    o, lse, _ = gradients((q, k, v, do), mask)
    rows: list[Any] = [flat(x) for x in (q, k, v, o.to(q.dtype))]
    inputs = [moved(x) for x in (*rows, lse.flatten(0, 1).float(), flat(do))]
    w, call = ListedMask(moved(mask)), case.call("attention_backward")
    config = BACKWARD.choices(w, call)[0]
    single = BACKWARD.plan(w, call, config).run(*inputs)
    monkeypatch.setattr(_stored, "SECTION_BYTES", 3 << 20)  # a head takes 2.0 MB: 12 sections
    product = BACKWARD.plan(w, call, config)
    out = q.new_empty(sum(len(x) for x in single), case.head_dim, device=inputs[0].device)
    for _ in range(20):
        out.fill_(torch.nan)
        assert all(map(torch.equal, product.run(*inputs, out=out), single))

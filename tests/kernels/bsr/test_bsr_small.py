"""bsr_small: its work lists, emulated in NumPy, and how launches follow one another on a GPU."""

from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr import bsr_small
from sparsebench.kernels.bsr._small_steps import (
    END,
    LAST,
    NO_STRIP,
    lists_of,
    sources,
    swizzle,
    work,
)
from sparsebench.kernels.bsr.bsr_small import Config
from tests.compiling.nvcc import hopper
from tests.kernels.bsr.cases import SHAPES, SMALL
from tests.kernels.bsr.examples import call_of, example, on_gpu
from tests.tools.marks import crossed


def unpacked(values: torch.Tensor) -> np.ndarray:
    """Undo the swizzle of packed blocks: piece p of a row is at p ^ row / (64 / b)."""
    b = values.shape[1]
    pieces = values.numpy().reshape(len(values), b, b // 8, 8)
    back = np.empty_like(pieces)
    for row, piece in product(range(b), range(b // 8)):
        back[:, row, piece] = pieces[:, row, piece ^ row // (64 // b) % (b // 8)]
    return back.reshape(len(values), b, b)


def emulated(w: Bsr, x: torch.Tensor, config: Config, transposed: bool) -> np.ndarray:
    """Emulate the device with the lists; assert that no element is written twice."""
    b, warpgroups = w.block[0], config.warpgroups
    height = config.features // b // warpgroups
    lists = lists_of(w, config.features, warpgroups, transposed)
    costs = lists.costs(min(len(x), config.tokens), b)
    steps, bounds = work(lists, costs, len(x), config.tokens, workers=5)
    order, pieces = torch.from_numpy(lists.order), torch.from_numpy(swizzle(b))
    pieces_of_8 = w.values.view(-1, 8)[sources(order, pieces).long()]
    blocks = unpacked(pieces_of_8.view(-1, *w.block))
    padded = np.pad(x.numpy(), ((0, config.tokens), (0, 64)))  # zero outside of X
    width = w.shape[1] if transposed else w.shape[0]
    y = np.full((len(x), width), np.nan, np.float32)
    for (start, end), warpgroup in product(pairwise(bounds.tolist()), range(warpgroups)):
        sums = np.zeros((height, config.tokens, b), np.float32)
        for step in steps[start:end]:
            count, token, group, first, of_strips, _, shares = step.item()
            strips = [of_strips >> 16 * i & 0xFFFF for i in range(4)]
            counts, what, places = shares[warpgroup].item()
            at = first + (what & 0xFF)
            for row in range(height):
                for _ in range(counts >> 4 * row & 15):
                    strip, inside = divmod((places & 7) * b, 32)
                    assert strips[strip] != NO_STRIP
                    column = strips[strip] * 32 + inside
                    tile = padded[token : token + config.tokens, column : column + b]
                    sums[row] += tile @ (blocks[at] if transposed else blocks[at].T)
                    places, at = places >> 3, at + 1
            assert at <= first + count
            if what & LAST:
                units = lists.units[group].reshape(warpgroups, -1)[warpgroup]
                for row, unit in enumerate(units.repeat(32 // b).tolist()):
                    column = unit * 32 + row * b % 32
                    part = y[token : token + config.tokens, max(0, column) : max(0, column + b)]
                    assert np.isnan(part).all()
                    part[:] = sums[row, : part.shape[0], : part.shape[1]]
                sums[:] = 0
        assert what & END
    return y


@pytest.mark.parametrize(
    ("shape", "transposed", "config"), crossed(SHAPES["bsr_small"], [False, True], SMALL), ids=str
)
def test_the_lists_give_the_product_and_write_every_element_once(shape, transposed, config):
    w, x, dy = example(shape)
    dense = w.to_dense()
    actual = emulated(w, dy if transposed else x, config, transposed)
    expected = dy @ dense if transposed else x @ dense.T
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=2e-4)


def captured(calls) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


@hopper
@pytest.mark.parametrize("config", [Config(64, 64), Config(128, 256)], ids=str)
@pytest.mark.parametrize("block", bsr_small.BLOCKS)
def test_a_layer_reads_the_output_of_the_previous_layer(config, block):
    """Each layer starts before the previous one has ended; compare with layers that run alone."""
    w, x = on_gpu((100, 2048, 2048, block, 0.05), "bf16", False)
    product = bsr_small.plan(w, call_of("linear", w, len(x), "bf16"), config)
    packed, outs = product.packed(w.values), [torch.empty_like(x) for _ in range(8)]
    layers = [partial(product.run, a, packed, out=b) for a, b in pairwise([x, *outs])]
    for layer in layers:
        layer()
    graph = captured(layers)
    for _ in range(20):
        x.normal_()
        for layer in layers:
            layer()
            torch.cuda.synchronize()
        alone = [out.clone() for out in outs]
        for run in (graph.replay, lambda: [layer() for layer in layers]):
            for out in outs:
                out.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            assert all(map(torch.equal, outs, alone))


@hopper
@pytest.mark.parametrize("config", [Config(64, 32), Config(64, 128)], ids=str)
def test_weights_may_be_written_just_before_the_launch(config):
    """The kernel reads W early only if the previous kernel allows it; torch's kernels do not."""
    w, x = on_gpu((64, 2048, 2048, 16, 0.1), "bf16", False)
    product, values = bsr_small.plan(w, call_of("linear", w, len(x), "bf16"), config), w.values
    first = product.run(x, product.packed(values))
    outs = []
    for _ in range(50):
        values.neg_()
        outs.append(product.run(x, product.packed(values)))
    assert all(torch.equal(out, -first if i % 2 == 0 else first) for i, out in enumerate(outs))
    packed, out, copy = product.packed(values), torch.empty_like(first), torch.empty_like(first)
    run = partial(product.run, x, packed, out=out)
    graph = captured([packed.neg_, run, lambda: copy.copy_(out), packed.neg_, run])
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(copy, -first)
        assert torch.equal(out, first)

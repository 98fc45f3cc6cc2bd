"""Run the products of ffn_few.cu and ffn_sparse.cu thread by thread on a CPU.

grid_on_cpu.h replaces PTX. The shapes of a launch are those of a case, because a GPU would choose
others. torch makes the words of the gate, and multiplies the groups that are left.
"""

import ctypes
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import arguments_of
from sparsebench.kernels._common.operator import NoConfig
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.twell import _grouped, _remainder, ffn_few
from sparsebench.kernels.twell._call import TwellCall
from sparsebench.kernels.twell._twell_gate import CAPACITY, TILE
from tests.emulation.cuda_on_cpu import entry_point, library_of, ring
from tests.kernels.twell.examples import assert_right, drawn
from tests.tools.devices import CPU
from tests.tools.marks import needs_gxx, sampled
from tests.tools.paths import cuda_source

CALLS = {
    "ffn_few": """multiply_few(at<const char*>(0), at<const char*>(1), at<const char*>(2),
      at<const char*>(3), at<u16*>(4), at<u16*>(5), at<u64*>(6), at<int*>(7), at<int>(8))""",
    "ffn_sparse": """up_and_down(at<const u16*>(0), at<u16*>(1), at<const char*>(2),
      at<const char*>(3), at<u16*>(4), at<int*>(5), at<int*>(6), at<int>(7), at<int>(8),
      at<int>(9), at<const void*>(10), at<u16*>(11))""",
}


def built(name: str, constants: cuda.Constants, late: bool) -> Any:
    """Build NAME.cu for this machine; `late` copies land when their barrier is waited for."""
    headers = '#include "grid_on_cpu.h"\n' + (ring() if name == "ffn_sparse" else "")
    source = cuda_source(f"{name}.cu").replace('#include "ffn_ptx.cuh"', headers)
    source = re.sub("extern __shared__.*", "#define shared dynamic_shared()", source)
    source = source.replace("__shared__ Shared s;", "Shared& s = *(Shared*)fixed_shared();")
    start = entry_point(f"{CALLS[name]};", split="SPLIT" if name == "ffn_few" else "1")
    together = "run, true);" if name == "ffn_few" else "run);"
    return library_of(source + start.replace("run);", together), constants, late).call


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tensor:
    """Let kernels run here, and return their counters."""
    counts = torch.zeros(2**12, dtype=torch.int32)

    def load(name: str, function: str, constants: cuda.Constants, shared: int, *_: Any) -> Any:
        kernel = built(name, constants, late=request.node.callspec.params["late"])
        return cuda.CudaKernel(kernel, "code", arguments_of(name, function, constants), 0, shared)

    def enqueue(loaded: cuda.Loaded, args: cuda.Arguments) -> None:
        loaded.kernel(args[0], loaded.grid, ctypes.c_size_t(loaded.shared_bytes))

    for module in (ffn_few, _grouped):
        monkeypatch.setattr(module, "counters", lambda x, count: counts[:count])
    monkeypatch.setattr(_grouped, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda.Loaded, "enqueue", enqueue)
    return counts


KINDS = [("bf16", False, True), ("fp16", True, False), ("fp16", True, True), ("bf16", False, False)]
"""dtype, squared, gated"""

# m, n, k, fraction of active units per token, CTAs per cluster, clusters. The cases cover a last
# tile of eight rows; rings that wrap in the gates and after; slots with all and with some columns;
# clusters without a unit; ranks without a column; no and all units active; several stages of the
# list; more words than a warp scans at once, and more half words than threads.
FEW = [
    *((1, 48, 72, 0.2, 1, 3), (3, 104, 2056, 0.3, 2, 9), (8, 840, 136, 0.02, 1, 2)),
    *((16, 248, 1288, 0.3, 1, 6), (11, 16, 520, 0.5, 1, 4), (17, 432, 264, 0.02, 2, 2)),
    *((32, 96, 2056, 1.0, 2, 9), (40, 64, 200, 0.0, 2, 2), (64, 680, 72, 0.01, 4, 2)),
    *((64, 56, 264, 0.3, 4, 2), (5, 400, 72, 1.0, 1, 1), (20, 320, 136, 0.9, 1, 2)),
    *((33, 304, 200, 0.6, 2, 1), (64, 1400, 72, 1.0, 1, 2), (2, 12480, 8, 0.01, 1, 2)),
    (17, 104, 200, 0.3, 1, 14),
]
EVERY_FEW = [(case, KINDS[i % 4], bool(i % 2)) for i, case in enumerate(FEW)]


@needs_gxx
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "kind", "late"), sampled(EVERY_FEW, 0, 2, 8, 12))
def test_ffn_few_is_right_and_nan_stays_in_its_token(case, kind, late, zeros, monkeypatch):
    (m, n, k, fraction, ctas, clusters), (dtype, squared, gated) = case, kind
    tokens, fewest, _ = ffn_few.shape_of(m, k, {1: 132, 2: 66, 4: 30}.__getitem__)
    assert fewest <= ctas
    monkeypatch.setattr(ffn_few, "shape_of", lambda *_: (tokens, ctas, clusters))
    call = TwellCall(m, n, k, DTYPES[dtype], squared, gated)
    x, *weights = operands = drawn(call, fraction)
    run = ffn_few.plan(CPU, call, NoConfig()).run
    y = run(x, *weights)
    assert_right(y, operands, squared)
    assert torch.equal(run(x, *weights), y)
    x[m // 2, 3] = torch.nan
    y = run(x, *weights)
    assert y[m // 2].isnan().all()
    assert not zeros.any()
    x[m // 2, 3] = 0
    assert_right(y, operands, squared, torch.arange(m) != m // 2)


# m, n, k, fraction of active units, tokens of a group, limit. The cases cover a last group with few
# tokens, fewer units than threads, full and partial steps, groups of one step, of one token and of
# two, whose threads number several pieces at once, k up to 1024, 2048 and more.
GROUPS = [
    *((11, 48, 72, 0.2, 8, 48), (5, 200, 264, 0.3, 8, 200), (17, 1088, 136, 0.05, 8, 1088)),
    *((3, 72, 520, 0.5, 8, 72), (20, 400, 512, 0.1, 8, 220), (8, 64, 1032, 1.0, 8, 64)),
    *((61, 160, 200, 0.03, 7, 26), (9, 56, 2056, 0.3, 8, 56), (40, 96, 4096, 0.04, 8, 24)),
    *((100, 96, 72, 0.01, 8, 96), (20, 96, 2880, 0.1, 3, 26), (7, 9000, 72, 0.05, 2, 620)),
]
# The same without a fallback: several lists per group, no active units, 320 columns per warp, two
# halves of 192, and more pieces than the threads number at once.
ALONE = [
    *((11, 48, 72, 0.2, 8, None), (5, 3136, 72, 1.0, 8, None)),
    *((9, 1096, 264, 0.0, 8, None), (8, 200, 2560, 0.1, 8, None)),
    *((20, 1088, 1032, 0.05, 5, None), (3, 72, 3064, 0.5, 8, None)),
    *((5, 4200, 72, 0.2, 2, None), (3, 4200, 72, 0.2, 1, None)),
    *((13, 1104, 72, 0.9, 6, None), (3, 1096, 2880, 0.03, 1, None)),
]
EVERY_GROUP = [(case, KINDS[i % 4], 0, bool(i % 2)) for i, case in enumerate(GROUPS)]
EVERY_GROUP += [(case, KINDS[i % 2 * 2], 1, bool(i % 2)) for i, case in enumerate(GROUPS)]
EVERY_GROUP += [(case, KINDS[i % 4], 0, bool(i % 2)) for i, case in enumerate(ALONE)]


@needs_gxx
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "kind", "cluster", "late"), sampled(EVERY_GROUP, 0, 1, 6, 10, 13, 22, 23, 25, 30, 31)
)
def test_groups_of_tokens_are_right(case, kind, cluster, late, zeros, monkeypatch) -> None:
    (m, n, k, fraction, height, limit), (dtype, squared, gated) = case, kind
    call = TwellCall(m, n, k, DTYPES[dtype], squared, gated)
    heavy: list[int] = []

    def rest(x: Tensor, g: Tensor, *weights: Tensor) -> None:
        *ups, wd_t, y, left, groups = weights
        heavy[:] = sorted(groups[: left[0]].tolist())
        tokens = torch.isin(torch.arange(m) // height, torch.tensor(heavy))
        act = g[tokens].float().relu()  # the kernel writes G of these groups if it was in words
        h = (act.square() if squared else act) * (
            x[tokens].float() @ ups[0].float().T if ups else 1
        )
        y[tokens] = (h.to(y.dtype).float() @ wd_t.float()).to(y.dtype)
        left.zero_()

    monkeypatch.setattr(_grouped, "height_of", lambda *_: height)
    monkeypatch.setattr(_grouped, "limit_of", lambda *_: limit or 0)
    monkeypatch.setattr(_grouped, "writer", lambda *_: in_words)
    monkeypatch.setattr(_remainder, "template_of", lambda *_: rest)
    x, gate, *weights = operands = drawn(call, fraction)
    alone = limit is None
    run = _grouped.plan(CPU, call, _grouped.Config(alone, cluster)).run
    y = run(x, gate, *weights)
    assert_right(y, operands, squared)
    on = torch.nn.functional.pad(x @ gate.T > 0, (0, 0, 0, -m % height))
    rows = on.unflatten(0, (-1, height)).any(1).sum(1)
    assert heavy == ([] if alone else (rows > limit).nonzero()[:, 0].tolist())
    assert torch.equal(run(x, gate, *weights), y)
    x[0, 3] = torch.nan  # in another row, torch makes the row before it NaN, too (2.13, bf16)
    y = run(x, gate, *weights)
    assert y[0].isnan().all()
    assert not zeros.any()
    x[0, 3] = 0
    assert_right(y, operands, squared, slice(1, None))


def in_words(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return G as twell_gate.cu does: words, and dense tiles with NaN elsewhere."""
    g = x @ gate.T
    m, n = g.shape
    words = torch.full((m, -(-n // TILE), CAPACITY + 1), -1, dtype=torch.int32)
    dense = torch.full_like(g, torch.nan)
    for token in range(m):
        for tile in range(words.shape[1]):
            gates = g[token, tile * TILE : (tile + 1) * TILE]
            on = ~(gates <= 0)
            active = on.nonzero()[:, 0]
            words[token, tile, 0] = len(active)
            if len(active) > CAPACITY:
                dense[token, tile * TILE :][: len(gates)] = gates.where(on, 0)
                continue
            active = active[torch.randperm(len(active))]
            values = gates[active].view(torch.int16).int() << 16
            words[token, tile, 1 : len(active) + 1] = values | (active + tile * TILE).int()
    return words, dense

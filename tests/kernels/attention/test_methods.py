"""Methods that select blocks: each against its definition, computed plainly in fp64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench import attention, select_attention
from sparsebench._discovery import modules
from sparsebench.errors import SparsebenchError
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.attention import attention_selected
from sparsebench.kernels.attention._selecting import means
from sparsebench.kernels.attention.methods import vsa, xattention
from sparsebench.kernels.attention.methods._method import FOLDER
from sparsebench.kernels.nn.attention import METHODS
from tests.compiling.nvcc import hopper
from tests.compiling.triton_kernels import (
    assert_all_compile,
    programs_of_templates,
)
from tests.kernels.attention.cases import (
    Case,
    assert_attends,
    gradients,
    launch_operands,
)
from tests.kernels.contract import refusal
from tests.tools.marks import crossed

VIDEO = (8, 4, 12)  # frames, rows, columns: 6 cubes
SHORT = (5, 3, 9)  # 6 cubes, of 48, 12, 3 and 1 tokens in each row of cubes


def drawn(*shapes: tuple[int, ...], **options: Any) -> list[Tensor]:
    draw = torch.Generator(options.pop("device", "cpu")).manual_seed(0)
    device = draw.device
    return [torch.randn(shape, generator=draw, device=device, **options) for shape in shapes]


def test_methods_are_the_files_of_their_folder() -> None:
    assert {*METHODS} == {"moba", "nsa", "pooled", "vsa", "xattention"} <= {*modules(FOLDER)}


# ---- VSA ----


def cube_of(token: int, video: tuple[int, int, int]) -> int:
    """Return the cube of a token of a video, both counted row by row."""
    _, height, width = video
    t, y, x = token // (height * width), token // width % height, token % width
    return (t // 4 * -(-height // 4) + y // 4) * -(-width // 4) + x // 4


def vsa_in_fp64(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, video: tuple[int, int, int], keep: int
) -> Tensor:
    """Return VSA of tokens in the order of the video, one head and query at a time."""
    batch, tokens, heads, d = q.shape
    cube = torch.tensor([cube_of(token, video) for token in range(tokens)])
    count, group = int(cube.max()) + 1, heads // k.shape[2]

    def mean(x: Tensor) -> Tensor:
        rows = torch.stack([x[cube == c].double().mean(0) for c in range(count)])
        return rows + (rows.to(x.dtype).double() - rows).detach()  # rounded

    result = []
    for b in range(batch):
        for h in range(heads):
            of_q, of_k, of_v = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
            a = mean(of_q) @ mean(of_k).T / math.sqrt(d)
            coarse = a.softmax(1) @ mean(of_v)
            kept = [sorted(range(count), key=lambda j, row=row: (-row[j], j))[:keep] for row in a]
            allowed = torch.tensor([[j in row for j in range(count)] for row in kept])
            logits = of_q.double() @ of_k.double().T / math.sqrt(d)
            logits = logits.masked_fill(~allowed[cube][:, cube], -torch.inf)
            fine = logits.softmax(1) @ of_v.double()
            result.append(gate[b, :, h].double() * coarse[cube] + fine)
    return torch.stack(result).view(batch, heads, tokens, d).transpose(1, 2)


def test_tokens_of_a_cube_lie_in_turn() -> None:
    tokens = torch.arange(math.prod(VIDEO)).view(1, -1, 1)
    cubes = vsa.in_cubes(tokens, VIDEO)
    of_cube = [cube_of(int(token), VIDEO) for token in cubes.flatten()]
    assert of_cube == sorted(of_cube)
    assert cubes.flatten()[:6].tolist() == [0, 1, 2, 3, 12, 13]
    assert torch.equal(vsa.in_rows(cubes, VIDEO), tokens)
    tokens = 1 + torch.arange(math.prod(SHORT)).view(1, -1, 1)
    cubes = vsa.in_cubes(tokens, SHORT)
    for number, cube in enumerate(cubes.view(-1, 64)):
        assert {cube_of(int(token) - 1, SHORT) for token in cube[cube > 0]} == {number}
    assert torch.equal(vsa.in_rows(cubes, SHORT), tokens)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("keep", [1, 2, 6])
@pytest.mark.parametrize("video", [VIDEO, SHORT])
def test_vsa_and_its_gradients_are_those_of_its_definition(video, kv_heads: int, keep: int) -> None:
    tokens = math.prod(video)
    sizes = [(2, tokens, heads, 16) for heads in (4, kv_heads, kv_heads, 4, 4)]
    q, k, v, gate, do = drawn(*sizes)
    leaves = [x.requires_grad_() for x in (q, k, v, gate)]
    o = select_attention(q, k, v, keep=keep, method="vsa", video=video, gate=gate)
    right = vsa_in_fp64(*leaves, video, keep)
    torch.testing.assert_close(o.double(), right, atol=2e-5, rtol=1e-4)
    actual = torch.autograd.grad(o, leaves, do)
    expected = torch.autograd.grad(right, leaves, do.double())
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, atol=5e-5, rtol=1e-3)


def test_vsa_of_tokens_in_cubes_is_that_of_the_video() -> None:
    q, k, v, gate = drawn(*[(1, math.prod(VIDEO), 2, 16)] * 4)
    options: dict[str, Any] = {"keep": 2, "method": "vsa"}
    right = select_attention(q, k, v, **options, video=VIDEO, gate=gate)
    cubes = [vsa.in_cubes(x, VIDEO) for x in (q, k, v, gate)]
    o = select_attention(*cubes[:3], **options, gate=cubes[3])
    assert torch.equal(vsa.in_rows(o, VIDEO), right)
    alone = select_attention(q, k, v, **options, video=VIDEO, gate=0)
    whole = select_attention(q, k, v, **options, video=VIDEO)
    torch.testing.assert_close(right, alone + gate * (whole - alone), atol=1e-5, rtol=1e-5)


def test_vsa_rounds_means_and_takes_the_lower_of_equal_cubes() -> None:
    q, k, v = (x.bfloat16() for x in drawn(*[(1, 4 * 64, 1, 16)] * 3))
    k = 1 + k * 2**-10  # whose means are alike in bf16
    o = select_attention(q, k, v, keep=2, method="vsa", gate=0)
    mask = BlockMask.from_dense(torch.tensor([[1.0, 1, 0, 0]] * 4), block=64)
    assert torch.equal(o, attention(q, k, v, mask))


# ---- XAttention ----


def weights_in_fp64(
    q: Tensor, k: Tensor, block: int, stride: int, causal: bool, factor: float
) -> Tensor:
    """Return B [batch, heads, q_blocks, kv_blocks], one pair of strided tokens at a time."""
    (batch, s_q, heads, _), s_kv = q.shape, k.shape[1]
    group, per = heads // k.shape[2], block // stride
    rows, columns = -(-s_q // stride), -(-s_kv // stride)
    of_blocks = torch.zeros(batch, heads, -(-s_q // block), -(-s_kv // block), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            pairs = q[b, :, h].double() @ k[b, :, h // group].double().T
            pairs = torch.nn.functional.pad(pairs, (0, -s_kv % stride, 0, -s_q % stride))
            for i in range(rows):
                last = min((i + 1) * stride, s_q) - 1 + s_kv - s_q
                seen = [j for j in range(columns) if not causal or j * stride <= last]
                tiles = pairs[i * stride : (i + 1) * stride].flip(0).split(stride, 1)
                logits = torch.tensor([factor * float(tiles[j].trace()) for j in seen])
                for j, weight in zip(seen, logits.double().softmax(0), strict=True):
                    of_blocks[b, h, i // per, j // per] += weight
    return of_blocks


def kept_by_xattention(
    weights: Tensor, mass: float, visible: list[int], first: int = 1, last: int = 1
) -> list[list[int]]:
    """Return the blocks of each row: the forced ones, then the largest while the mass is less."""
    rows = []
    for at, row in enumerate(weights.flatten(0, 2)):
        seen = visible[at % len(visible)]
        kept = [j for j in range(seen) if j < first or j >= seen - last]
        rest = sorted((j for j in range(seen) if j not in kept), key=lambda j: (-row[j], j))
        for j in rest:
            if row[kept].sum() >= mass * row.sum():
                break
            kept.append(j)
        rows.append(sorted(kept))
    return rows


SIZES = [  # queries, keys, block, stride, causal: ragged ends, other lengths, one token a stride
    (75, 75, 16, 4, True),
    (75, 75, 20, 5, False),
    (40, 67, 18, 3, True),
    (33, 20, 8, 8, True),  # the first queries see nothing
    (24, 24, 8, 1, True),
]


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("size", "dtype"), crossed(SIZES, [torch.float16, torch.float32]))
def test_xattention_scores_in_tiles_are_those_of_its_definition(size, dtype: torch.dtype) -> None:
    s_q, s_kv, *rest = size
    q, k = (x.to(dtype) for x in drawn((2, s_q, 4, 24), (2, s_kv, 2, 24)))
    wide = torch.cat((q, q), 2)[:, :, 4:]
    right = weights_in_fp64(q, k, *rest, 0.3).log()
    for x in (q, wide):
        scores = xattention._scores(x, k, *rest, 0.3)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_xattention_on_a_cpu_is_its_definition(size) -> None:
    s_q, s_kv, *rest = size
    q, k = drawn((2, s_q, 4, 24), (2, s_kv, 2, 24))
    right = weights_in_fp64(q, k, *rest, 0.3).log()
    scores = xattention._in_torch(q, k, *rest, 0.3)
    torch.testing.assert_close(scores.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mass", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", [SIZES[0], SIZES[2]])
def test_xattention_keeps_the_blocks_of_its_definition(size, mass: float, monkeypatch) -> None:
    masks: list[BlockMask] = []
    make = BlockMask.from_scores.__func__  # type: ignore[attr-defined]

    def record(cls: Any, *args: Any, **options: Any) -> BlockMask:
        masks.append(make(cls, *args, **options))
        return masks[-1]

    monkeypatch.setattr(BlockMask, "from_scores", classmethod(record))
    s_q, s_kv, block, stride, causal = size
    q, k, v = drawn((2, s_q, 4, 24), (2, s_kv, 2, 24), (2, s_kv, 2, 24))
    options: dict[str, Any] = {"mass": mass, "method": "xattention", "stride": stride}
    o = select_attention(q, k, v, block=block, causal=causal, norm=0.5, **options)
    weights = weights_in_fp64(q, k, block, stride, causal, 24**-0.5 / (stride * 0.5))
    visible = [
        (min(first + block, s_q) - 1 + s_kv - s_q) // block + 1 for first in range(0, s_q, block)
    ]
    cells = torch.zeros(2 * 4 * len(visible), weights.shape[3])
    for cell, row in zip(cells, kept_by_xattention(weights, mass, visible), strict=True):
        cell[row] = 1
    assert torch.equal(masks[0].to_dense(), cells)
    tokens = [s_q, s_kv]
    mask = BlockMask.from_dense(cells, block=block, tokens=tokens, batch=2, causal=causal)
    right, *_ = gradients([q, k, v, q], mask)
    torch.testing.assert_close(o.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.filterwarnings("ignore")  # numpy's, of NaN
def test_a_nan_in_a_key_leaves_its_queries_with_the_first_and_last_block() -> None:
    q, k = drawn((1, 64, 2, 16), (1, 64, 1, 16))
    right = xattention._scores(q, k, 16, 4, True, 0.3)
    k[0, 33] = math.nan
    scores = xattention._scores(q, k, 16, 4, True, 0.3)
    assert torch.equal(scores[:, :, :2], right[:, :, :2])
    mask = BlockMask.from_scores(scores, mass=0.9, block=16, causal=True, first=1, last=1)
    for row in (2, 3):
        assert scores[:, :, row, : row + 1].isnan().all()
        cells = mask.to_dense().view(2, 4, 4)[:, row]
        assert torch.equal(
            cells, torch.tensor([float(j in (0, row)) for j in range(4)]).expand(2, 4)
        )


def test_equal_weights_keep_the_lower_blocks() -> None:
    q, k = torch.zeros(1, 64, 1, 16), torch.zeros(1, 64, 1, 16)
    scores = xattention._in_torch(q, k, 16, 4, False, 1.0)
    mask = BlockMask.from_scores(scores, mass=0.5, block=16)
    assert torch.equal(mask.to_dense(), torch.tensor([[1.0, 1, 0, 0]] * 4))


# ---- all of them ----


def test_gradients_of_means_are_those_of_torch() -> None:
    (x, do) = drawn((2, 37, 6, 8), (2, 3, 3, 8))
    x.requires_grad_()
    right = torch.stack(
        [x[:, at : at + 16].unflatten(2, (3, 2)).mean((1, 3)) for at in range(0, 37, 16)], 2
    )
    o = means(x, 16, 3)
    torch.testing.assert_close(o, right)
    both = (torch.autograd.grad(y, x, do)[0] for y in (o, right))
    torch.testing.assert_close(*both)


CALLS: list[dict[str, Any]] = [
    {"method": "vsa", "keep": 2},
    {"method": "vsa", "keep": 3, "video": VIDEO, "gate": 0.5},
    {"method": "vsa", "keep": 3, "video": (6, 8, 8)},
    {"method": "xattention", "mass": 0.8, "block": 64, "stride": 8, "causal": True},
    {"method": "xattention", "keep": 3, "block": 32},
]


@pytest.mark.parametrize("options", CALLS)
def test_a_method_compiles_and_has_gradients(options: dict[str, Any]) -> None:
    operands = [x.requires_grad_() for x in drawn(*((2, 384, h, 32) for h in (4, 2, 2)))]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return select_attention(q, k, v, **options)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = [
        (o, *torch.autograd.grad(o.square().sum(), operands))
        for o in (run(*operands), compiled(*operands))
    ]
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "xatention"}, "did you mean xattention"),
        (
            {"stride": 8},
            "expected the options pool, pooled_q, pooled_k, found stride",
        ),
        ({"method": "moba", "stride": 8}, "method moba: expected no options, found stride"),
        ({"pooled_q": torch.ones(3)}, "pooled_q: expected floats .1, 2, 3, 16. .*32 .3. on cpu"),
        ({"pooled_q": torch.ones(1, 2, 3, 16).int()}, "found torch.int32 .1, 2, 3, 16. on cpu"),
        ({"pooled_k": torch.ones(1, 2, 3, 16, device="meta")}, "pooled_k: .* found .* on meta"),
        ({"pooled_k": 3}, "pooled_k: expected .* found int"),
        ({"pool": ["max"]}, "pooled: expected a pool, found .* .did you mean max"),
        ({"pool": "maximum"}, "pooled: expected a pool, found 'maximum' .did you mean max"),
        ({"method": "xattention", "strid": 8}, "found strid .did you mean stride"),
        ({"method": "xattention", "stride": 24}, "expected a divisor of the block of 128"),
        ({"method": "xattention", "stride": 1, "block": 256}, "of 256, from 2 on, found 1"),
        ({"method": "xattention", "norm": 0}, "norm: expected a number above 0, found 0"),
        ({"method": "vsa", "causal": True}, "expected blocks of 64 that are not causal"),
        ({"method": "vsa", "block": 128}, "found 128, causal=False"),
        ({"method": "vsa", "video": (48, 8)}, "expected 3 sides .* 384; found .48, 8"),
        ({"method": "vsa", "video": (8, 8, 8)}, "product is the number of tokens, 384"),
        ({"method": "vsa", "video": (-6, -8, 8)}, "product is the number of tokens, 384"),
        ({"method": "vsa", "video": (6.0, 8, 8)}, "product is the number of tokens, 384"),
        ({"method": "vsa", "gate": torch.ones(3)}, "broadcast to .* found .3. on cpu"),
        ({"method": "vsa", "gate": torch.ones(16, device="meta")}, "found .16. on meta"),
        ({"method": "xattention", "norm": math.inf}, "norm: expected a number above 0"),
        ({"scale": math.inf}, "expected a scale above 0, and finite, found inf"),
    ],
)
def test_what_a_method_does_not_take_is_refused_in_one_line(options: dict, reason: str) -> None:
    q, k, v = drawn(*[(1, 384, 2, 16)] * 3)
    with pytest.raises(SparsebenchError, match=reason):
        select_attention(q, k, v, keep=2, **options)


def test_largest_values_or_what_a_caller_brings_stand_for_blocks() -> None:
    q, k, v = drawn((2, 90, 4, 16), *[(2, 90, 2, 16)] * 2)
    options: dict[str, Any] = {"keep": 3, "block": 16, "causal": True}
    blocks = [pad(x, (0, 0, 0, 0, 0, 6), value=-math.inf).unflatten(1, (6, 16)) for x in (q, k)]
    largest = [x.amax(2).unflatten(2, (2, -1)).amax(3).transpose(1, 2) for x in blocks]
    mask = BlockMask.from_scores(
        largest[0] @ largest[1].mT, 3, block=16, tokens=[90, 90], causal=True, first=1, last=1
    )
    for pools in ({"pooled_q": largest[0], "pooled_k": largest[1]}, {"pool": "max"}):
        o = select_attention(q, k, v, **pools, **options)
        assert torch.equal(o, attention(q, k, v, mask))


def test_keys_without_heads_are_refused() -> None:
    q, k = drawn((1, 384, 2, 16), (1, 384, 0, 16))
    assert "expected heads a multiple" in refusal(lambda: select_attention(q, k, k, keep=2))


def test_vsa_without_a_video_takes_whole_cubes_alone() -> None:
    q, k, v = drawn(*[(1, 100, 2, 16)] * 3)
    assert "found 100 and 100" in refusal(lambda: select_attention(q, k, v, keep=1, method="vsa"))


LAUNCHES = [
    ("vsa", "gate=0", Case((128, 192), 64, (4, 2), batch=2, lists=4, head_dim=32)),
    (
        "xattention",
        "stride=8, norm=0.5",
        Case((60, 90), 32, (4, 2), lists=2, causal=True, head_dim=32),
    ),
]


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("selects", "settings", "case"), LAUNCHES)
def test_a_launch_with_a_method_attends_to_the_mask(
    selects: str, settings: Any, case: Case
) -> None:
    operands = launch_operands(case)
    launch = attention_selected.prepare(operands, selects=selects, settings=settings)
    assert_attends(launch, operands, case)
    with pytest.raises(SparsebenchError, match="expected a part or a method, found 'vsb'"):
        attention_selected.prepare(operands, selects="vsb")
    for wrong in ("stride", "stride=x", "strode=4"):
        with pytest.raises(SparsebenchError, match=r"settings: expected|found strode"):
            attention_selected.prepare(operands, selects="xattention", settings=wrong)


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_xattention(capability, monkeypatch) -> None:
    programs = programs_of_templates(monkeypatch)
    for d, dtype, block, stride in (
        (128, torch.bfloat16, 128, 16),
        (96, torch.float16, 72, 8),
        (64, torch.bfloat16, 512, 4),
        (64, torch.float32, 64, 16),
    ):
        of = (((2, 1000, heads, d), (1000 * heads * d, heads * d, d, 1)) for heads in (6, 3))
        sizes = dtype, torch.device("cpu"), block, stride, True, 0.25
        xattention._launch.__wrapped__(*of, *sizes)
    assert len(programs) == 4
    assert_all_compile(programs, capability)


BF16: Any = {"device": "cuda", "dtype": torch.bfloat16}


@hopper
@pytest.mark.parametrize("d", [128, 96])
@pytest.mark.parametrize("causal", [True, False])
def test_xattention_scores_are_those_of_torch_on_a_gpu(d: int, causal: bool) -> None:
    for s_q, s_kv, block, stride in ((1000, 1000, 128, 16), (515, 900, 64, 8), (300, 300, 72, 4)):
        q, k = drawn((2, s_q, 6, d), (2, s_kv, 3, d), **BF16)
        factor = 0.5 / stride
        scores = xattention._scores(q, k, block, stride, causal, factor)
        right = xattention._in_torch(
            q.cpu().double(), k.cpu().double(), block, stride, causal, factor
        )
        torch.testing.assert_close(scores.cpu(), right.float(), atol=2e-3, rtol=2e-3)


@hopper
@pytest.mark.parametrize(
    "options",
    [
        {"method": "vsa", "keep": 4},
        {"method": "vsa", "keep": 4, "video": (16, 8, 8), "gate": 0.7},
        {"method": "vsa", "keep": 4, "video": (16, 32, 2)},
        {"method": "xattention", "mass": 0.6, "stride": 16, "causal": True},
        {"method": "xattention", "mass": 0.6, "block": 64, "stride": 8},
    ],
)
def test_a_graph_with_a_method_selects_anew_in_each_replay_on_a_gpu(options) -> None:
    heads = (4, 4, 4) if options["method"] == "vsa" else (8, 2, 2)
    x: Any = [torch.zeros(1, 1024, h, 128, **BF16).requires_grad_() for h in heads]
    do, graph = torch.randn(1, 1024, heads[0], 128, **BF16), torch.cuda.CUDAGraph()
    do[0, 0] @ do[0, 0].T  # torch loads cuBLAS at its first product, which a capture forbids
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        o = select_attention(*x, **options)
        captured = o, *torch.autograd.grad(o, x, do)
    for seed in range(3):
        torch.manual_seed(seed)
        for t in x:
            t.data.normal_()
        graph.replay()
        again = [t.detach().clone().requires_grad_() for t in x]
        right = select_attention(*again, **options)
        expected = right, *torch.autograd.grad(right, again, do)
        for actual, eager in zip(captured, expected, strict=True):
            torch.testing.assert_close(actual, eager, atol=2e-2, rtol=2e-2)
        assert error_of(o.detach(), [t.detach() for t in x], **options) < 1e-2


def error_of(
    o: Tensor,
    x: list[Tensor],
    *,
    method: str,
    causal: bool = False,
    keep: int | None = None,
    mass: float | None = None,
    block: int | None = None,
    **options: Any,
) -> float:
    """Return the relative error of O, given the scores: near ties may choose other blocks."""
    how, side = METHODS[method], block or METHODS[method].block
    about: dict[str, Any] = {"scale": x[0].shape[3] ** -0.5, "block": side, "causal": causal}
    scored = how.score(*x, **about, **options)
    places: dict[str, Any] = {"first": how.first, "last": how.last, "mass": mass}
    places["keys"] = None if scored.keys is None else scored.keys.cpu()
    tokens = [scored.q.shape[1], scored.k.shape[1]]
    mask = BlockMask.from_scores(
        scored.scores.cpu(), keep, block=side, tokens=tokens, causal=causal, **places
    )
    operands = [t.cpu() for t in (scored.q, scored.k, scored.v, scored.q)]
    right = scored.finish(gradients(operands, mask)[0].to(o))
    return float((o - right).norm() / right.norm())

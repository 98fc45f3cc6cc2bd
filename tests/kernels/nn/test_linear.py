"""BlockSparseLinear compared with nn.Linear: results, compilation, changes of the pattern."""

import copy
import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import requirements
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.nn import BlockSparseLinear, _bsr_autograd
from sparsebench.kernels.nn._bsr_engines import likeliest
from sparsebench.kernels.nn._bsr_pattern import index_of, pattern_of
from tests.tools.marks import crossed

# n, k, block, sparsity, shape of X before k: edge blocks that extend beyond W, rows and columns
# without blocks, no blocks, a vector, no tokens.
LAYERS: list[tuple[int, int, Any, float, tuple[int, ...]]] = [
    (64, 48, 16, 0.5, (7,)),
    (70, 50, (16, 8), 0.6, (2, 3)),
    (30, 100, (32, 64), 0.0, (5,)),
    (96, 96, 8, 0.97, (1, 2, 3)),
    (32, 32, 16, 1.0, (4,)),
    (32, 48, 16, 0.5, ()),
    (32, 48, 16, 0.5, (0,)),
]


def layer_of(n: int = 64, k: int = 48, block: Any = 16, **options: Any) -> BlockSparseLinear:
    return BlockSparseLinear(k, n, block=block, **{"sparsity": 0.5, **options})


def step(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of X and of all parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    weights = (torch.arange(y.numel(), device=y.device) % 17 - 8) / 8  # exact in any dtype
    weights = weights.to(y.dtype).view(y.shape)
    return y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])


def dense_step(layer: BlockSparseLinear, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the same from nn.Linear, with the gradient of W at the stored blocks."""
    y, dx, dw, *db = step(layer.to_dense().to(dtype), x.to(dtype))
    return y, dx, layer.bsr.sample(dw).values, *db


@pytest.mark.interpreted(also_compiled=True)
@pytest.mark.parametrize(("sizes", "bias"), crossed(LAYERS, [True, False]))
def test_output_and_gradients_equal_those_of_nn_linear(sizes, bias):
    n, k, block, sparsity, tokens = sizes
    layer = layer_of(n, k, block, sparsity=sparsity, bias=bias)
    x = torch.randn(*tokens, k)
    results = step(layer, x)
    torch.testing.assert_close(results, dense_step(layer, x, torch.float32))
    assert all(map(torch.equal, results, step(layer, x)))


LARGE, SMALL, STRIPS, TRITON = "bsr_wgmma", "bsr_small", "bsr_strips", "bsr_triton"
EXACT, WGRAD, WGRAD_MMA, WGRAD_SMALL = "bsr_fp32", "bsr_wgrad", "bsr_wgrad_mma", "bsr_wgrad_small"


@pytest.mark.parametrize(
    ("capability", "dtype", "block", "shape", "many", "few"),
    [
        ((9, 0), torch.bfloat16, (64, 128), (1000, 520), [LARGE, STRIPS], TRITON),
        ((9, 0), torch.bfloat16, (16, 16), (1000, 520), [SMALL, STRIPS], SMALL),
        ((9, 0), torch.bfloat16, (64, 32), (512, 512), [STRIPS], SMALL),
        ((9, 0), torch.bfloat16, (24, 24), (1000, 520), [STRIPS], STRIPS),
        ((9, 0), torch.bfloat16, (8, 24), (512, 512), [TRITON], TRITON),
        ((8, 0), torch.bfloat16, (48, 48), (512, 512), [TRITON], TRITON),
        ((9, 0), torch.float16, (20, 15), (512, 512), [TRITON], TRITON),
        ((9, 0), torch.float32, (64, 64), (512, 512), [EXACT, TRITON], EXACT),
        ((9, 0), torch.float32, (10, 10), (1000, 1000), [EXACT, TRITON], EXACT),
        ((8, 0), torch.float32, (4, 4), (512, 512), [TRITON, EXACT], TRITON),
        ((9, 0), torch.bfloat16, (64, 64), (512, 515), [TRITON], TRITON),
        ((9, 0), torch.float8_e4m3fn, (64, 128), (1000, 528), [LARGE], TRITON),
        ((9, 0), torch.float8_e4m3fn, (64, 64), (1000, 520), [TRITON], TRITON),  # TMA reads no rows
        ((8, 9), torch.float8_e4m3fn, (64, 64), (512, 512), [TRITON], TRITON),
    ],
)
def test_kernels_are_offered_by_gpu_dtype_and_block(
    capability, dtype, block, shape, many, few, gpu, monkeypatch
):
    gpu(capability)
    call = BsrCall("linear", 1024, shape, block, dtype)
    assert names_of(call) == many
    assert names_of(call._replace(m=48))[0] == few
    wgrad = call._replace(op="wgrad")
    if dtype == torch.float8_e4m3fn:
        return
    if capability == (9, 0) and dtype != torch.float32 and not any(s % 8 for s in (*block, *shape)):
        divided = all(any(s % tile == 0 for tile in (40, 48, 56, 64)) for s in block)
        first = [WGRAD_MMA] if block == (16, 16) else [WGRAD] if divided else []
        assert names_of(wgrad) == [*first, WGRAD_SMALL]
        monkeypatch.setattr(requirements, "find_spec", lambda name: None)
        with pytest.raises(Unsupported, match="cupy"):
            names_of(wgrad)
    else:
        assert names_of(wgrad) == ["bsr_triton_wgrad"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the compute capability of the GPU."""

    def of(capability: tuple[int, int]) -> None:
        sizes = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(requirements, "find_spec", lambda name: True)

    return of


def names_of(call: BsrCall) -> list[str]:
    """Return the engines of a GPU that have a choice for a call of a weight with one block."""
    offsets = torch.ones(-(-call.shape[0] // call.block[0]) + 1, dtype=torch.int32)
    offsets[0] = 0
    values = torch.zeros(1, *call.block, dtype=call.dtype)
    w, names = Bsr(call.shape, offsets, torch.zeros(1, dtype=torch.int32), values), []
    for engine in likeliest(call, 1, torch.device("cuda")):
        with suppress(Unsupported):
            names += [engine.name] if engine.choices(w, call) else []
    return names


def test_calls_without_a_kernel_are_unsupported(gpu):
    gpu((7, 5))
    call = BsrCall("linear", 100, (512, 512), (64, 64), torch.float16)
    with pytest.raises(Unsupported, match=r"7\.5"):
        names_of(call)
    with pytest.raises(Unsupported, match="float64"):
        names_of(call._replace(dtype=torch.float64))
    with pytest.raises(Unsupported, match="gradient"):
        names_of(call._replace(op="dgrad", dtype=torch.float8_e4m3fn))


def test_operators_have_correct_derivatives_and_pass_opcheck():
    layer = layer_of(12, 20, (8, 16))
    index, sizes = (layer.offsets, layer.columns), ((2, 20), (2, 12), layer.values.shape)
    x, dy, values = (torch.randn(size, dtype=torch.float64) for size in sizes)
    torch.library.opcheck(torch.ops.sparsebench.block_sparse_dgrad, (dy, values, *index, 20))
    torch.library.opcheck(torch.ops.sparsebench.block_sparse_wgrad, (dy, x, *index, 8, 16))
    x, values = x.requires_grad_(), values.requires_grad_()
    linear = _bsr_autograd.linear
    assert torch.autograd.gradcheck(lambda x, values: linear(x, values, *index, 12), (x, values))
    torch.library.opcheck(torch.ops.sparsebench.block_sparse_linear, (x, values, *index, 12))


@pytest.mark.parametrize(("frozen", "idle"), [("values", "wgrad"), ("x", "dgrad")])
def test_an_unneeded_gradient_is_not_computed(frozen, idle):
    layer, x = layer_of(), torch.randn(3, 48, requires_grad=frozen != "x")
    layer.values.requires_grad_(frozen != "values")
    layer(x).sum().backward()
    assert (x.grad is None, layer.values.grad is None) == (frozen == "x", frozen == "values")
    assert idle not in {call.op for call in plans_of(layer)}


def test_another_pattern_of_as_many_blocks_needs_no_recompilation():
    torch._dynamo.reset()  # forgets what other tests compiled
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = layer_of(), torch.randn(3, 48)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(3):
        torch.testing.assert_close(step(compiled, x), dense_step(layer, x, torch.float32))
        other = layer_of()
        layer.set_pattern(other.offsets, other.columns)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_returns_the_dtypes_of_nn_linear(dtype):
    layer, x = layer_of(dtype=dtype), torch.randn(3, 48, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        results, expected = step(layer, x), dense_step(layer, x, dtype)
    torch.testing.assert_close(results, expected, rtol=0.02, atol=0.02)


@pytest.mark.interpreted(also_compiled=True)
def test_a_new_pattern_keeps_shared_blocks():
    before = torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
    after = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    layer = layer_of(32, 48, sparsity=None, pattern=before)
    a, _, b = layer.values.detach().clone()
    x, values = torch.randn(3, 48), layer.values
    layer(x).sum().backward()
    source = layer.set_pattern(*index_of(after))
    assert source.tolist() == [0, -1, 2, -1]
    assert layer.values is values
    assert layer.values.grad is None
    zero = torch.zeros_like(a)
    assert torch.equal(layer.values, torch.stack([a, zero, b, zero]))
    torch.testing.assert_close(step(layer, x), dense_step(layer, x, torch.float32))


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize(("name", "sparsity"), crossed([*OPTIMIZERS], [0.5, 0.75]))
def test_the_state_of_an_optimizer_moves_with_the_blocks(name, sparsity):
    layer, other, x = layer_of(), layer_of(sparsity=sparsity), torch.randn(3, 48)
    optimizer = OPTIMIZERS[name](layer.parameters())

    def train() -> None:
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()

    train()
    before = {key: t.clone() for key, t in optimizer.state[layer.values].items()}
    source = layer.set_pattern(other.offsets, other.columns)
    moved = 0
    for key, tensor in optimizer.state[layer.values].items():
        if before[key].dim() > 1:
            moved += 1
            assert len(tensor) == len(source)
            for new, old in enumerate(source.tolist()):
                expected = torch.zeros_like(tensor[new]) if old < 0 else before[key][old]
                assert torch.equal(tensor[new], expected)
        else:
            assert torch.equal(tensor, before[key])
    assert moved
    train()
    assert layer.values.isfinite().all()


def test_loaded_state_moves_before_its_optimizer_has_stepped():
    layer, other, x = layer_of(), layer_of(), torch.randn(3, 48)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(x).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    resumed = torch.optim.Adam(layer.parameters())
    resumed.load_state_dict(state)
    old = state["state"][0]["exp_avg"].clone()
    del optimizer
    wrapper = torch.optim.SGD(layer.parameters())
    wrapper.state = resumed.state  # as that of accelerate is
    gc.freeze()  # hides objects from the garbage collector
    source = layer.set_pattern(other.offsets, other.columns)
    gc.unfreeze()
    expected = torch.stack([old[at] if at >= 0 else torch.zeros(16, 16) for at in source])
    assert torch.equal(resumed.state[layer.values]["exp_avg"], expected)
    assert wrapper.state is resumed.state


@pytest.mark.parametrize("state", [torch.ones(7), torch.ones(6, 16, 16).byte(), [torch.ones(6, 2)]])
def test_state_that_cannot_move_is_refused_before_a_change(state):
    layer, other = layer_of(), layer_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.values]["what"] = state
    columns = layer.columns.clone()
    with pytest.raises(FormatError, match="what: expected state"):
        layer.set_pattern(other.offsets, other.columns)
    assert torch.equal(layer.columns, columns)


def plans_of(layer: BlockSparseLinear) -> dict[Any, Any]:
    return dict(pattern_of(layer.offsets, layer.columns).operator.plans)


def test_plans_are_made_once_before_a_new_pattern_is_called_and_freed_with_it():
    layer, other, x = layer_of(), layer_of(), torch.randn(3, 48)
    step(layer, x)
    for _ in range(2):
        plans = plans_of(layer)
        assert sorted(call.op for call in plans) == ["dgrad", "linear", "wgrad"]
        step(layer, x)
        step(layer, torch.randn(5, 48))  # of the same bucket
        assert plans_of(layer) == plans
        layer.set_pattern(other.offsets, other.columns)
    freed = weakref.ref(pattern_of(layer.offsets, layer.columns))
    del layer
    gc.collect()
    assert freed() is None


def test_values_are_drawn_within_the_bound_of_their_fan_in():
    pattern = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]]).bool()
    layer = layer_of(40, 40, sparsity=None, pattern=pattern)  # fan-in 32, 8 and none
    largest = layer.values.detach().abs().amax((1, 2))
    bounds = torch.tensor([32.0, 32.0, 8.0]).rsqrt()
    assert (largest <= bounds).all()
    assert (largest > 0.95 * bounds).all()
    assert layer.values[2, :, 8:].eq(0).all()
    assert layer.bias[32:].eq(0).all()
    assert layer.bias[:32].ne(0).all()


def test_a_drawn_pattern_spreads_its_blocks_over_the_rows():
    layer = layer_of(160, 320, sparsity=0.87)
    assert sorted(set(layer.offsets.diff().tolist())) == [2, 3]
    assert len(layer.columns) == 26
    assert str(layer).endswith("block=16x16, stored=26 of 200, bias=True)")


def test_a_dense_layer_keeps_its_largest_blocks():
    linear = nn.Linear(40, 24)
    layer = BlockSparseLinear.from_dense(linear, (8, 16), 0.5)
    norms = torch.stack(
        [p.norm() for row in linear.weight.split(8) for p in row.split(16, 1)]
    ).view(3, 3)
    expected = norms >= norms.flatten().sort(descending=True).values[3]
    assert torch.equal(layer.offsets.diff(), expected.sum(1).int())
    mask = expected.repeat_interleave(8, 0).repeat_interleave(16, 1)[:, :40]
    assert torch.equal(layer.to_dense().weight, linear.weight * mask)
    assert torch.equal(layer.bias, linear.bias)
    for power in (-100, 90):  # tiny and huge weights
        scaled = copy.deepcopy(linear)
        scaled.weight.data.mul_(2.0**power)
        assert torch.equal(
            BlockSparseLinear.from_dense(scaled, (8, 16), 0.5).columns, layer.columns
        )
    for wrong in (linear.weight, nn.Conv1d(64, 64, 1)):
        with pytest.raises(FormatError, match=r"expected an nn\.Linear"):
            BlockSparseLinear.from_dense(wrong, block=16, sparsity=0.5)


def index(*parts: Any) -> tuple[Tensor, ...]:
    return tuple(p if isinstance(p, Tensor) else torch.tensor(p).int() for p in parts)


@pytest.mark.parametrize(
    ("offsets", "columns", "message"),
    [
        ([0, 2, 3], [1, 0, 1], "1, 0. in block row 0"),
        ([0, 2, 3], [1, 1, 1], "1, 1. in block row 0"),
        ([0, 2, 3], [0, 3, 1], "0 to 3"),
        ([0, 2, 3], [-1, 0, 1], "-1 to 1"),
        ([0, 4, 3], [0, 1, 2], "4 to 3 in row 1"),
        ([0, 2, 3], [0, 1], "3 from 0 to 3"),
        ([0, 3], [0, 1, 2], "2 from 0 to 3"),
        (torch.tensor([0, 2, 3]), [0, 1, 1], "^offsets"),  # int64
    ],
)
def test_an_invalid_index_is_refused_and_changes_nothing(offsets, columns, message):
    layer, x = layer_of(32, 48), torch.randn(2, 48)
    before = layer(x)
    with pytest.raises(FormatError, match=message):
        layer.set_pattern(*index(offsets, columns))
    values = torch.zeros(len(columns), 16, 16)
    with pytest.raises(FormatError, match=message):
        _bsr_autograd.linear(x, values, *index(offsets, columns), 32)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": lambda v: v.mT}, FormatError, "strides"),
        ({"values": lambda v: v[1:]}, FormatError, "5, 16, 16"),
        ({"values": lambda v: v.double()}, Unsupported, "float64"),
        ({"x": lambda x: x.half()}, Unsupported, "float16"),
    ],
)
def test_inconsistent_operands_are_refused(change, error, message):
    layer = layer_of()
    inputs = {"x": torch.randn(3, 48), "values": layer.values.detach()}
    inputs |= {"offsets": layer.offsets, "columns": layer.columns}
    inputs |= {name: function(inputs[name]) for name, function in change.items()}
    with pytest.raises(error, match=message):
        _bsr_autograd.linear(**inputs, n=64)
    with pytest.raises(Unsupported, match="96"):
        layer(torch.randn(2, 96))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "^block"),
        ({"block": (16, -1)}, "^block"),
        ({"sparsity": 1.5}, "^sparsity"),
        ({"sparsity": None}, "sparsity or pattern"),
        ({"pattern": torch.ones(4, 3).bool()}, "sparsity or pattern"),
        ({"sparsity": None, "pattern": torch.ones(3, 4).bool()}, "^pattern"),
        ({"sparsity": None, "pattern": torch.ones(4, 3)}, "^pattern"),
        ({"dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
    ],
)
def test_wrong_sizes_and_settings_are_refused(options, message):
    with pytest.raises(FormatError, match=message):
        layer_of(**options)


# block, dtype, n, k: kernels for Hopper, if the GPU is one, and Triton's with boxes and pointers.
ON_GPU = [
    (16, torch.bfloat16, 512, 768),
    (32, torch.float16, 512, 768),
    (64, torch.bfloat16, 768, 512),
    ((64, 128), torch.float16, 1000, 520),
    (128, torch.bfloat16, 1024, 1024),
    (64, torch.float32, 256, 320),
    ((48, 24), torch.float16, 300, 430),
    (8, torch.bfloat16, 136, 72),
    (24, torch.bfloat16, 1000, 520),
    (40, torch.float16, 520, 1000),
    (48, torch.bfloat16, 768, 1536),
    (80, torch.float16, 1000, 776),
    ((96, 24), torch.bfloat16, 1000, 520),
]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative, as a whole


def assert_near(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        assert (a.double() - b.double()).norm() <= CLOSE[a.dtype] * b.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "dtype", "n", "k"), ON_GPU)
def test_a_gpu_equals_nn_linear_in_fp64_for_any_x_and_pattern(block, dtype, n, k):
    layer = layer_of(n, k, block, sparsity=0.7, device="cuda", dtype=dtype)
    x = torch.randn(2, 150, k, device="cuda", dtype=dtype)
    wide = x.new_zeros(*x.shape[:2], k + 64)[..., :k].copy_(x)  # with gaps between rows
    for inputs in (x, x[0, 0], x[:, :7], wide, x[:0]):
        results = step(layer, inputs)
        assert_near(results, dense_step(layer, inputs, torch.float64))
        assert all(map(torch.equal, results, step(layer, inputs)))
    other = layer_of(n, k, block, sparsity=0.9, device="cuda", dtype=dtype)
    layer.set_pattern(other.offsets, other.columns)
    assert_near(step(layer, x), dense_step(layer, x, torch.float64))
    layer.load_state_dict(other.state_dict())
    assert_near(step(layer, x), step(other, x))


@pytest.mark.gpu
def test_operands_on_several_devices_are_refused():
    layer = layer_of(512, 512, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(5, 512, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="cpu, cuda:0"):
        _bsr_autograd.linear(x, layer.values, layer.offsets.cpu(), layer.columns, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64, 128])
def test_values_and_gradients_take_the_memory_of_the_blocks(block):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    options = {"sparsity": 0.9, "bias": False, "device": "cuda", "dtype": torch.bfloat16}
    layer = layer_of(4096, 4096, block, **options)
    layer(torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)).sum().backward()
    gc.collect()
    dense = 2 * 4096 * 4096 * 2  # W and its gradient
    assert torch.cuda.memory_allocated() - before <= 0.15 * dense

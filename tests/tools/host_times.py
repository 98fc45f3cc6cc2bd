"""Time calls of layers from Python beside nn.Linear, in turn, on this GPU.

    python -P tests/tools/host_times.py [--size 4096] [--sparsity 0.9] [--tokens 1 64 512]

    call      without a gradient
    training  forward, and backward of dY into gradients that add up
    step      zero_grad, forward, a loss, backward, and an optimizer's step
    apply     gate and up as the plug-in for vLLM packs and calls them, in inference mode, and in a
              loop as an engine without graphs calls them

Each number is the median over seven rounds of the time of a call, in µs, when a call follows the
other: first the host's part, then until the GPU is done, then nn.Linear's time over that. Models
that are measured one after the other drift by 30 % on a busy host, so layers take turns.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import sparsebench
from sparsebench.formats.bsr import Bsr
from sparsebench.nn import (
    BitmapLinear,
    BlockSparse,
    BlockSparseLinear,
    SpenseGatedMLP,
    SpenseLinear,
    TwoFour,
    Unstructured,
)
from sparsebench.vllm.packing import pack, prune, storage_of_recipe

BLOCKS = 128, 64, 32, 16
ROUNDS, CALLS, WARM = 7, 40, 12
Call = Callable[[], object]


def in_turn(calls: dict[str, Call]) -> dict[str, tuple[float, float]]:
    """Return the host's time and the whole time of each call, µs."""
    for call in calls.values():
        for _ in range(WARM):
            call()
    host: dict[str, list[float]] = {name: [] for name in calls}
    whole: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(CALLS):
                call()
            host[name].append((perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
            whole[name].append((perf_counter() - start) / CALLS * 1e6)
    return {name: (median(host[name]), median(whole[name])) for name in calls}


def layers_of(size: int, sparsity: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the dense layer first, then the sparse ones, in bf16 without bias."""
    options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    dense = nn.Linear(size, size, **options)
    weight = dense.weight.detach()
    pruned = weight.view(size, -1, 4) * torch.tensor([1, 0, 1, 0], device="cuda").bfloat16()
    blocks = {
        f"blocks of {b}": BlockSparseLinear(size, size, block=b, sparsity=sparsity, **options)
        for b in BLOCKS
    }
    bsr = blocks["blocks of 64"].bsr
    w = Bsr(bsr.shape, bsr.offsets.clone(), bsr.columns.clone(), bsr.values.clone())
    w.values.requires_grad_()
    return {
        "nn.Linear": dense,
        **blocks,
        "2:4": SpenseLinear.from_dense(pruned.view(size, size)),
        "bitmap": BitmapLinear.from_dense(weight * (torch.rand_like(weight) > 0.5)),
        "matmul, 64": lambda x: sparsebench.matmul(x, w),
    }


class DenseMLP(nn.Module):
    """Y = (silu(X @ Wg.T) * (X @ Wu.T)) @ Wd.T, with frozen 2:4 weights."""

    def __init__(self, size: int, hidden: int) -> None:
        """Prune random weights to 2:4."""
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.gate, self.up = (nn.Linear(size, hidden, **options) for _ in range(2))
        self.down = nn.Linear(hidden, size, **options)
        for linear in (self.gate, self.up, self.down):
            linear.weight.requires_grad_(False)
            linear.weight.view(-1, 4)[:, 2:] = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return Y, as large as X."""
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


def mlps_of(size: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return a dense gated MLP, and the same one in 2:4."""
    dense = DenseMLP(size, 2 * size)
    weights = (each.weight for each in (dense.gate, dense.up, dense.down))
    return {"dense MLP": dense, "2:4 MLP": SpenseGatedMLP.from_dense(*weights, dense=0)}


def gate_up_of(size: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return gate and up as one dense layer, and as the plug-in for vLLM packs them."""
    weight = torch.randn(4 * size, size, device="cuda", dtype=torch.bfloat16) / size**0.5
    sizes = [2 * size] * 2
    recipes: dict[str, Any] = {"2:4": TwoFour(), "half 2:4": TwoFour(0.5), "bitmap": Unstructured()}
    recipes["blocks of 64"] = BlockSparse(64, 0.8)
    packed = {
        name: pack(
            torch.cat([prune(part, recipe) for part in weight.split(sizes)]),
            sizes,
            [storage_of_recipe(recipe)] * 2,
        )
        for name, recipe in recipes.items()
    }
    return {"dense": partial(nn.functional.linear, weight=weight), **packed}


def training(layer: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    """Return a call of forward and backward."""

    def call() -> None:
        y = layer(x)
        y.backward(y.detach())

    return call


def step(layer: nn.Module, x: Tensor, target: Tensor) -> Call:
    """Return a whole step with plain SGD."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def call() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x), target).backward()
        optimizer.step()

    return call


def main() -> None:
    """Print a table for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layers, mlps = layers_of(arguments.size, arguments.sparsity), mlps_of(arguments.size)
    gate_up = gate_up_of(arguments.size)
    print(torch.cuda.get_device_name(), torch.__version__)
    for tokens in arguments.tokens:
        x = torch.randn(tokens, arguments.size, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for group in (layers, mlps):
                _show("call", tokens, in_turn({n: partial(f, x) for n, f in group.items()}))
        with torch.inference_mode():
            _show("apply", tokens, in_turn({n: partial(f, x) for n, f in gate_up.items()}))
        target = torch.randn_like(x)
        x.requires_grad_()
        for group in (layers, mlps):
            _show("training", tokens, in_turn({n: training(f, x) for n, f in group.items()}))
        trained = {
            n: f
            for n, f in layers.items()
            if isinstance(f, nn.Module) and any(p.requires_grad for p in f.parameters())
        }
        _show("step", tokens, in_turn({n: step(f, x, target) for n, f in trained.items()}))


def _show(what: str, tokens: int, times: dict[str, tuple[float, float]]) -> None:
    _, dense = next(iter(times.values()))
    cells = [f"{n} {h:.1f} {w:.1f} {dense / w:.2f}" for n, (h, w) in times.items()]
    print(f"{what}, {tokens} tokens: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()

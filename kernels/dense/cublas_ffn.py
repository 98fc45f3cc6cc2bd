"""Gated feed-forward layer, dense, by two or three GEMMs: the fastest that libraries allow.

    fp8 only        X in e4m3                    Triton (_common/elementwise.py)
    G | U = X @ [Wg, Wu].T                       one product of 2 n features; or two, side by side
    H = act(G) * U, in e4m3 in fp8               Triton
    Y = H @ Wd.T                                 one product

Each product takes the fastest way there is (cublas.py). So does the pair: one product, or two.
cublas.py computes the definition step by step. Here X is read by one GEMM, G and U are read once,
and act(G) is never written. Inference servers run such a layer this way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.elementwise import hidden, quantised, scale_of
from sparsebench.kernels._common.search import part_of, told_of
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands
from sparsebench.kernels.dense import cublas
from sparsebench.kernels.dense._cublaslt import ALIGNMENT
from sparsebench.kernels.dense._layers import in_turn
from sparsebench.kernels.dense.cublas import Product
from sparsebench.results.record import Problem

PAIRS = ("gate_up",), ("gate", "up")  # the products that give G | U: one, or two


def prepare(operands: Operands) -> Launch:
    """Choose the fastest way of each product, and whether gate and up are one."""
    wg, wu, wd = (_values(operands, name) for name in ("wg", "wu", "wd"))
    problem, x, (n, k) = operands.problem, operands.activations["x"], wg.shape
    first = [quantised(x)] if problem["dtype"] == "fp8" else []
    x = first[0]() if first else x
    pinned, output = operands.pinned or {}, OUTPUTS[problem["dtype"]]
    timed = operands.timed
    both, y = (x.new_empty(len(x), columns, dtype=output) for columns in (2 * n, k))

    products = {
        "gate_up": lambda: Product(x, torch.cat((wg, wu)).t(), both),
        "gate": lambda: Product(x, wg.t(), both[:, :n]),
        "up": lambda: Product(x, wu.t(), both[:, n:]),
    }
    gate_up = _fastest_pair(products, pinned, timed, x.device)
    gate_up()
    between = hidden(both, problem["activation"], x.dtype, scale_of(problem, k))
    by = Product(between(), wd.t(), y, scale=scale_of(problem, n))
    down = cublas.fastest_way(by, pinned.get("down"), timed=part_of("down", timed))
    return Launch(
        in_turn(*first, gate_up, between, down),
        {**gate_up.choice, "down": down.choice},
        between.code,
        [*gate_up.candidates, *told_of("down", down)],
    )


def _fastest_pair(
    products: Mapping[str, Callable[[], Product]],
    pinned: Mapping[str, Any],
    timed: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> Launch:
    """Return the launch of the faster of PAIRS, or of the pinned one; its choice names each.

    What was timed for both is told.
    """
    pairs = []
    for names in PAIRS:
        if not pinned or names[0] in pinned:
            launches: dict[str, Launch] = {}
            for name in names:
                product, known = products[name](), pinned.get(name)
                if not pinned and launches and not product.out.data_ptr() % ALIGNMENT:
                    known = launches["gate"].choice  # up is such a product, too: no second search
                before = part_of(name, timed)
                launches[name] = cublas.fastest_way(product, known, timed=before)
            choice = {name: launch.choice for name, launch in launches.items()}
            told = [line for name, each in launches.items() for line in told_of(name, each)]
            pairs.append(Launch(in_turn(*launches.values()), choice, candidates=told))
    best = pairs[cublas.fastest_product(pairs, device)]
    return replace(best, candidates=[line for pair in pairs for line in pair.candidates])


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Say why the libraries or Triton cannot run the problem here, or None."""
    fp8 = problem["dtype"] == "fp8"
    return cublas.unsupported(problem, device) or (
        None if fp8 else triton_unsupported(problem, device)
    )


def _values(operands: Operands, name: str) -> Tensor:
    weight = operands.weights[name]
    assert isinstance(weight, Dense)
    return weight.values


KERNEL = Kernel("ffn", "dense", "cuda", prepare, unsupported)

"""The contract of every engine of a linear layer and its gradients, found by name.

A new engine needs no test here, and a new format needs a line in PACK and in EXAMPLES. Tests of a
family have what only one kernel needs: its work lists, what it refuses, where NaN goes.
"""

import json
from itertools import chain

import pytest
import torch

from sparsebench._discovery import modules
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._common.choices import package_folder
from sparsebench.kernels._common.operator import Engine
from sparsebench.kernels._kernel import NAMES, unsupported
from sparsebench.results.record import Problem
from tests.kernels.contract import PACK, Example, bound_to, run_engine

# One token; odd sizes; a row of W alone; no non-zero; all; more tokens than a tile; long rows;
# more rows than there are multiprocessors.
ANYWHERE = [
    *(Example(1, 5, 8, 0.5), Example(3, 5, 7, 0.5), Example(9, 1, 64, 0.5)),
    *(Example(33, 9, 64, 0.0), Example(9, 33, 104, 1.0), Example(65, 40, 132, 0.2)),
    *(Example(131, 333, 1032, 0.1), Example(5, 4, 720, 0.02), Example(64, 512, 4608, 0.02)),
    *(Example(1, 4096, 4096, 0.5), Example(13, 2070, 1040, 0.2), Example(1000, 333, 1030, 0.1)),
]
# The same in blocks: also those that extend beyond W on both sides, and rectangles.
BLOCKS = [
    *(Example(1, 128, 256, 0.5, (8, 8)), Example(257, 328, 200, 0.2, (8, 8))),
    *(Example(1, 1024, 512, 0.05, (32, 32)), Example(100, 320, 192, 0.3, (16, 16))),
    *(Example(300, 200, 264, 0.4, (32, 32)), Example(70, 128, 128, 0.0, (16, 16))),
    *(Example(100, 320, 192, 0.5, (64, 64)), Example(65, 384, 576, 0.4, (192, 192))),
    *(Example(129, 256, 512, 0.4, (64, 128)), Example(513, 200, 272, 0.7, (128, 128))),
    *(Example(70, 128, 128, 0.0, (64, 64)), Example(1, 256, 768, 0.5, (64, 256))),
    *(Example(100, 320, 192, 0.3, (24, 24)), Example(130, 200, 328, 1.0, (48, 48))),
    *(Example(300, 200, 264, 0.4, (80, 96)), Example(257, 1000, 1000, 0.2, (40, 24))),
    *(Example(4, 64, 64, 0.0, (24, 48)), Example(300, 208, 328, 0.2, (20, 20))),
    *(Example(33, 120, 96, 0.5, (52, 26)), Example(1, 40, 48, 0.0, (20, 10))),
    *(Example(1000, 1536, 1280, 0.2, (16, 16)), Example(2000, 1024, 1024, 0.05, (64, 64))),
]
EXAMPLES = {"bitmap": ANYWHERE, "bsr": BLOCKS, "csr": ANYWHERE}

FAMILIES = {f"sparsebench.kernels.{family}" for family in EXAMPLES}
ENGINES: dict[str, Engine] = {
    name: engine
    for name, place in modules("kernels").items()
    if place.split(".")[2:3] in [[family] for family in EXAMPLES]
    and isinstance(engine := load_kernel(name), Engine)
    and not engine.op.startswith("experts")  # test_experts_contract.py
}


FLOATS = [dtype for dtype in NAMES if dtype.is_floating_point]  # formats hold no others


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_gives_exact_products_of_all_that_it_accepts(name, dtype) -> None:
    engine, device = ENGINES[name], torch.device("cuda", 0)
    problem = Problem(engine.op, {"dtype": NAMES[dtype], "m": 1, "n": 64, "k": 64})
    if reason := unsupported(engine, problem, device):
        pytest.skip(reason)
    examples = EXAMPLES[engine.consumes]
    assert sum(run_engine(engine, example, dtype, device) for example in examples)


PUBLISHED = [
    json.loads(line)["problem"]
    for line in chain.from_iterable(
        file.read_text().splitlines() for file in sorted(package_folder().glob("*.choices"))
    )
]


@pytest.mark.parametrize("name", ENGINES)
def test_a_call_has_the_keys_of_the_published_choices(name: str) -> None:
    engine, example = ENGINES[name], Example(16, 64, 64, 0.5, (16, 16))
    w = PACK[engine.consumes](example, example.dense(torch.bfloat16))
    bound = bound_to(engine, w, example.m, torch.bfloat16)
    problem = bound.operator.problem(bound.call)
    keys = [other.keys() for other in PUBLISHED if other["op"] == problem["op"]]
    assert not keys or problem.keys() in keys

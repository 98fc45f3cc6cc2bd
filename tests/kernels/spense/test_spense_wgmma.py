"""spense_wgmma: work lists, configurations, machine code, and each configuration on a GPU.

test_spense_mma.py multiplies the packed bytes on a CPU; test_contract.py has the products of all
kernels.
"""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebench.formats.spense import Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._kernel import output_dtype
from sparsebench.kernels.spense import _clusters, _tilings, spense_wgmma
from sparsebench.kernels.spense._stream_k import (
    SHORTEST,
    StreamKSchedule,
    interleaved_rows,
    schedule,
)
from sparsebench.kernels.spense.spense_wgmma import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc, hopper
from tests.kernels.spense.examples import CUOBJDUMP, LARGE, assert_right, call_of, on_gpu
from tests.kernels.spense.examples import WGMMA_CONFIGS as CONFIGS
from tests.kernels.spense.examples import WGMMA_SPLIT as SPLIT
from tests.kernels.spense.examples import WGMMA_TALL as TALL
from tests.tools.marks import sampled

# ---- the lists ----

# Gate and up, down, of Qwen3-32B; one row of tiles; fewer steps than workers.
LAYERS = [
    (51200, 5120, "rows"),
    (5120, 25600, "columns"),
    (64, 4096, "columns"),
    (640, 256, "rows"),
]


def layer(n: int, k: int, fraction: float, split: str) -> Spense:
    """Return a W without memory."""
    tiles = -(-n // 64), k // 128
    part = [int(size * (1 - fraction)) for size in tiles]
    sparse = (part[0], tiles[1]) if split == "rows" else (tiles[0], part[1])
    rest = (tiles[0] - part[0], tiles[1]) if split == "rows" else (tiles[0], tiles[1] - part[1])
    blobs = (torch.empty((*s, b), device="meta") for s, b in ((sparse, 9216), (rest, 16384)))
    return Spense((n, k), torch.bfloat16, (sparse[0] * 64, sparse[1] * 128), *blobs)


def owners(work: StreamKSchedule) -> np.ndarray:
    return np.repeat(np.arange(len(work.starts) - 1), np.diff(work.starts))


@pytest.mark.parametrize("shape", LAYERS, ids=str)
@pytest.mark.parametrize("config", [Config(16, 1, 4), Config(64, 2, 4), Config(256, 2, 4)], ids=str)
@pytest.mark.parametrize("m", [16, 300, 5000])
def test_every_k_tile_is_assigned_once(m: int, config: Config, shape: tuple[int, int, str]) -> None:
    n, k, split = shape
    w = layer(n, k, 0.5, split)
    work = schedule(w, m, config.tokens, config.cluster, 132 // config.cluster)
    items = work.items[: work.starts[-1]]
    groups, tiles = -(-n // (128 * config.cluster)), -(-m // config.tokens)
    done = np.zeros((groups, tiles, k // 128), int)
    for group, token, first, count, *_ in items:
        done[group, token // config.tokens, first : first + count] += 1
    assert (done == 1).all()
    assert len(items) <= max(groups * tiles + 132, 1)
    assert len(set(owners(work).tolist())) <= max(done.size // SHORTEST, 1)
    pieces = items[items["parts"] > 1]
    assert sorted((pieces["slot"] + pieces["part"]).tolist()) == list(range(work.slots))
    assert len(np.unique(pieces["counter"])) == work.counters
    for counter in range(work.counters):
        share = pieces[pieces["counter"] == counter]
        share = share[share["part"].argsort()]
        for field in ("group", "token", "parts", "slot"):
            assert (share[field] == share[field][0]).all()
        assert share["part"].tolist() == list(range(share["parts"][0]))  # in order of their steps
        assert (np.diff(share["k_tile"]) == share["k_tiles"][:-1]).all()


@pytest.mark.parametrize("shape", LAYERS[:2], ids=str)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_no_worker_has_much_more_of_w_than_the_mean(fraction, shape) -> None:
    n, k, split = shape
    w = layer(n, k, fraction, split)
    work = schedule(w, 16, 16, 1, 132)
    row, columns = interleaved_rows(n // 64, w.sparse.shape[0]), w.sparse.shape[1]
    loads = np.zeros(132)
    for worker, (group, _, first, count, *_) in zip(owners(work), work.items, strict=False):
        for place in (2 * group, 2 * group + 1):
            steps = np.arange(first, first + count)
            sparse = (steps < columns) & (row[place] < w.sparse.shape[0])
            loads[worker] += np.where(sparse, 9216, 16384).sum()
    assert loads.max() <= 1.15 * loads.mean()  # 120 of 132 may be busy


@pytest.mark.parametrize(("rows", "sparse"), [(8, 4), (7, 5), (9, 0), (9, 9), (400, 300)])
def test_interleaved_rows_are_all_rows_and_evenly_mixed(rows: int, sparse: int) -> None:
    order = interleaved_rows(rows, sparse)
    assert sorted(order.tolist()) == list(range(rows))
    for height in (2, 4):
        counts = [(order[i : i + height] < sparse).sum() for i in range(0, rows - height, height)]
        assert not counts or max(counts) - min(counts) <= 1


# ---- configurations and machine code ----


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 128, 129, 256, 257, 8192])
def test_the_likeliest_configurations_hold_all_tokens_in_few_tiles(m: int) -> None:
    configs = spense_wgmma.configurations(m, (7168, 18432), 2, torch.device("cpu"))
    assert len(set(configs)) == len(configs) <= 16
    assert {config.tokens for config in configs} <= set(spense_wgmma.TOKENS)
    assert any(config.tokens >= min(m, 256) for config in configs)
    assert (configs[0].split > 0) == (m in spense_wgmma.CLUSTERS_FIRST)


AT_ONCE = {1: 132, 2: 66, 3: 43, 4: 32, 5: 25, 8: 15}  # clusters on an H200, by their CTAs


@pytest.mark.parametrize("m", [1, 33, 100, 128, 200, 256])
@pytest.mark.parametrize("shape", [(7168, 18432), (18432, 3584), (3072, 1024), (8, 16)])
def test_clusters_hold_all_tokens_and_there_are_none_beyond_256(shape, m) -> None:
    for itemsize in (1, 2):
        choices = _clusters.likeliest(m, shape, itemsize, AT_ONCE, 5)
        assert len(set(choices)) == 5
        assert {tokens for tokens, *_ in choices} <= set(spense_wgmma.TOKENS)
        assert not _clusters.likeliest(257, shape, itemsize, AT_ONCE, 5)


# Tokens, warpgroups and CTAs of the fastest cluster on an H200, and the most that rank above it.
@pytest.mark.parametrize(
    ("m", "shape", "won", "likelier"),
    [
        (100, (18432, 3584), (112, 3, 1), 0),  # 96 CTAs, and no sums to send
        (100, (7168, 18432), (112, 2, 2), 1),  # 112
        (64, (3072, 1024), (64, 1, 2), 2),  # 96
        (128, (3072, 1024), (64, 1, 1), 0),  # 96
    ],
)
def test_the_model_ranks_the_winners_first(m, shape, won, likelier) -> None:
    choices = _clusters.likeliest(m, shape, 2, AT_ONCE, 5)
    assert won in [(tokens, *sizes) for tokens, _, *sizes in choices[: likelier + 1]]


# Tokens, tiles ahead, warpgroups and split of the fastest tiling on an H200 (NOTES.md).
@pytest.mark.parametrize(
    ("m", "shape", "itemsize", "won"),
    [
        (264, (11008, 4096), 2, (136, 8, 3, 1)),  # 116 CTAs, one round
        (300, (11008, 4096), 1, (152, 8, 3, 1)),
        (384, (11008, 4096), 2, (128, 4, 2, 0)),
        (448, (11008, 4096), 2, (152, 4, 2, 0)),  # 258 tiles, two rounds
        (264, (51200, 5120), 2, (136, 4, 2, 0)),
        (448, (51200, 5120), 1, (224, 4, 2, 0)),
        (1000, (51200, 5120), 1, (256, 4, 2, 0)),
    ],
)
def test_the_fastest_tiling_is_predicted_first(m, shape, itemsize, won) -> None:
    assert _tilings.likeliest(m, shape, itemsize, 132)[0] == won


@pytest.mark.parametrize("shape", [(7168, 18432), (8, 16)])
def test_no_number_of_tokens_has_more_than_six_tilings(shape: tuple[int, int]) -> None:
    assert not _tilings.likeliest(128, shape, 2, 132)
    for m in (129, 257, 1000, 100_000):
        tilings = _tilings.likeliest(m, shape, 2, 132)
        assert 1 <= len(set(tilings)) == len(tilings) <= 6
        assert {tokens for tokens, *_ in tilings} <= set(spense_wgmma.TOKENS)


@by_nvcc
@pytest.mark.parametrize(
    ("config", "dtype", "activation"),
    sampled(
        [
            *((config, torch.bfloat16, None) for config in CONFIGS if config.cluster == 2),
            *((config, torch.float8_e4m3fn, None) for config in (*SPLIT, *TALL)),
            *((config, torch.bfloat16, None) for config in TALL),
            *((Config(tokens, 1, 4), torch.float8_e4m3fn, None) for tokens in (16, 256)),
            (Config(256, 1, 4), torch.float16, None),
            *((config, torch.bfloat16, "silu") for config in CONFIGS),
            *((config, torch.float8_e4m3fn, "gelu_tanh") for config in CONFIGS),
            *((Config(256, cluster, 4), torch.float16, "relu2") for cluster in (1, 2)),
        ]
    ),
    ids=str,
)
def test_it_compiles_without_a_spill_or_a_serialised_product(config, dtype, activation, tmp_path):
    constants = spense_wgmma.constants_of(config, dtype, activation)
    assert_compiles_cleanly("spense_wgmma", constants, tmp_path, look=assert_metadata_stays)


WRITE = re.compile(r"(?:@\S+ )?(\S+) (?:U?P\w+, )?R(\d+),")  # instruction, its first register
WIDTHS = {"": 1, ".64": 2, "WIDE": 2, "CS2R": 2, ".128": 4}  # registers, by a part of its name


def assert_metadata_stays(code: Path, log: str) -> None:
    """Follow the main loop of sparse tiles: nothing writes the metadata of wgmma in flight."""
    if not CUOBJDUMP.exists():
        return
    sass = subprocess.check_output([CUOBJDUMP, "-sass", code], text=True)
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*(\w{4,5})\*/\s+(.*?) ;", sass)]
    first, *_, last = (at for at, text in lines if "GMMA.SP" in text)
    jumps = [(at, re.search(r"BRA.* 0x(\w+)$", text)) for at, text in lines if at > last]
    start, end = next((int(j[1], 16), at) for at, j in jumps if j and int(j[1], 16) < first)
    loop = [text for at, text in lines if start <= at < end]
    assert sum("GMMA.SP" in text for text in loop) == 4
    groups: list[set[int]] = [set()]  # registers of words; the last group is still open
    for text in 2 * loop:
        if left := re.search(r"DEPBAR\.LE gsb0, 0x(\d)", text):
            groups = groups[-1 - int(left[1]) :]
        elif "GMMA" in text:
            groups[-1].add(int(re.findall(r"\bR(\d+)", text)[-1]))
            groups += [set()] * ("gsb0" in text)
        elif write := WRITE.match(text):
            width = max(count for part, count in WIDTHS.items() if part in write[1])
            written = {int(write[2]) + i for i in range(width)}
            assert not written & set().union(*groups), text


@pytest.mark.skipif(not (find_spec("cupy") and CUOBJDUMP.exists()), reason="needs CuPy, cuobjdump")
@pytest.mark.parametrize("dtype", spense_wgmma.DTYPES, ids=str)
def test_the_code_that_runs_keeps_the_metadata_of_wgmma_in_flight(dtype, tmp_path) -> None:
    file = tmp_path / "kernel.cubin"
    for config in (CONFIGS[0], Config(256, 2, 4), Config(112, 1, 4, 3, 3)):
        constants = spense_wgmma.constants_of(config, dtype)
        file.write_bytes(cuda.compiled("spense_wgmma", constants))
        assert_metadata_stays(file, "")


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_is_right_at_the_edges_of_tiles(config: Config, dtype: str) -> None:
    beside = [config.tokens + more for more in (-15, -1, 0, 1, 8, config.tokens - 7)]
    shapes = [*LARGE, *((m, 1352, 1040, 0.0, "rows") for m in beside)]
    for shape in shapes:
        x, w = on_gpu(shape, dtype)
        product = spense_wgmma.plan(w, call_of(w, len(x)), config)
        out = x.new_empty(len(x), w.shape[0], dtype=output_dtype(x.dtype)).fill_(torch.nan)
        assert_right(product.run(x, w.sparse, w.dense, out=out), x, w, shape)

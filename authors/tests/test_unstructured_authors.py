"""The kernels of the authors of SpInfer and MACKO: requirements, and their packed weights.

`SPARSEBENCH_PEERS=DIR pytest authors/tests/test_unstructured_authors.py` builds their code by
nvcc, without a GPU too; on one it multiplies.
"""

import ctypes
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._kernel import Operands
from sparsebench.results.record import Problem
from sparsebench_authors import _builds, macko, spinfer
from tests.kernels.layers import problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def problem(**fields: Any) -> Problem:
    sizes = {"m": 16, "n": 512, "k": 256, "dtype": "fp16", "pattern": "unstructured"}
    return problem_of("linear", **{**sizes, **fields})


def weight(n: int, k: int, sparsity: float, seed: int = 0) -> Tensor:
    """Draw a weight with an empty row, a full one, and runs of more than 15 zeros."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=draw) * (torch.rand(n, k, generator=draw) >= sparsity)
    w[3], w[5], w[7, 40:] = 0, 1, 0
    return w.half()


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for each in (spinfer, macko):
        file = tmp_path / each.__name__.rpartition(".")[2] / each.MARKER
        file.parent.mkdir(parents=True)
        file.write_text("// a checkout")
    monkeypatch.setenv(foreign_code.VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return tmp_path


def test_cases_that_they_can_run_need_a_checkout(checkouts, monkeypatch) -> None:
    cases = {spinfer: problem(m=100), macko: problem(m=1, n=40)}
    for peer, case in cases.items():
        assert peer.unsupported(case, CUDA) is None
    monkeypatch.delenv(foreign_code.VARIABLE)
    for peer, case in cases.items():
        assert (peer.unsupported(case, CUDA) or "").endswith("below --peers DIR; found no --peers")


def test_code_that_does_not_build_is_one_line_and_stores_nothing(checkouts, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    sources = (checkouts / "macko" / macko.MARKER).parent
    monkeypatch.setattr(foreign_code, "NVCC", ("/nowhere/nvcc",))
    with pytest.raises(Unsupported, match="needs nvcc to build macko; found No such file"):
        foreign_code.library(source_of(macko), _builds.digest(sources), "sm_90", f"-I{sources}")
    monkeypatch.setattr(
        foreign_code, "NVCC", ("sh", "-c", "echo fatal error: a header >&2; exit 1")
    )
    with pytest.raises(Unsupported, match="expected nvcc to build macko; found fatal error: a h"):
        foreign_code.library(source_of(macko), _builds.digest(sources), "sm_90", f"-I{sources}")
    assert not [*(tmp_path / "built").rglob("*.so")]


def source_of(peer: ModuleType) -> Path:
    """Return our glue, which includes the authors' sources."""
    return Path(str(peer.__file__)).with_suffix(".cu")


def built(peer: ModuleType, target: str = "sm_90") -> ctypes.CDLL:
    """Build a peer's code, or skip the test without a checkout or nvcc."""
    folder = foreign_code.checkout(peer.MARKER)
    if folder is None or shutil.which("nvcc") is None:
        pytest.skip(
            f"needs nvcc and a checkout of {peer.REPOSITORY} below ${foreign_code.VARIABLE}"
        )
    sources = (folder / peer.MARKER).parent
    return foreign_code.library(source_of(peer), _builds.digest(sources), target, f"-I{sources}")


@pytest.mark.parametrize(
    ("k", "splits"), [(64, [1]), (576, [1, 2]), (1024, [1, 2, 4, 8, 16]), (4160, [1, 2, 4, 8])]
)
def test_spinfers_last_part_of_k_has_tiles(k: int, splits: list[int]) -> None:
    assert spinfer.possible(k) == splits


def test_spinfer_gets_one_of_the_numbers_of_tokens_that_it_multiplies() -> None:
    tokens = [spinfer.tokens_of(m) for m in (1, 8, 9, 50, 64, 65, 128, 129)]
    assert tokens == [8, 8, 16, 64, 64, 128, 128, 256]


def test_a_split_that_k_has_too_few_tiles_for_is_refused() -> None:
    w, x = weight(64, 576, 0.5), torch.zeros(8, 576).half()
    operands = Operands(
        problem(m=8, n=64, k=576), {"w": Csr.from_dense(w)}, {"x": x}, lambda *_: None
    )
    with pytest.raises(Unsupported, match=r"a split among \[1, 2\] for k = 576, found 8"):
        spinfer.prepare(operands, split=8)


def test_spinfer_is_launched_with_room_for_the_fullest_tile() -> None:
    w = torch.zeros(64, 128).half()
    w[:, 64:] = 1
    assert int(spinfer.compressed(built(spinfer), w)[-1]) == 4096


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.98, 1.0])
def test_spinfers_bitmaps_and_values_are_the_weight(sparsity: float) -> None:
    w = weight(128, 192, sparsity)
    values, tiles, _, bitmap, most = spinfer.compressed(built(spinfer), w)
    bits = (bitmap[:, None] >> torch.arange(64)) & 1
    counts = bits.sum(1).view(len(tiles) - 1, 64).sum(1)
    assert bits.sum() == (w != 0).sum()
    assert torch.equal(tiles.diff(), ((counts + 7) // 8 * 8).int())
    assert most >= counts.max()
    assert most % 64 == 0
    assert float(values.float().sum()) == pytest.approx(float(w.float().sum()), abs=1e-2)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.98, 1.0])
def test_mackos_values_and_deltas_are_the_weight(sparsity: float) -> None:
    w = weight(64, 200, sparsity)
    values, deltas, rows = macko.compressed(built(macko), w)
    skipped = torch.stack((deltas & 15, deltas >> 4), 1).flatten().long()
    decoded = torch.zeros_like(w)
    for row in range(len(w)):
        row_entries = slice(int(rows[row]), int(rows[row + 1]))
        places = (skipped[row_entries] + 1).cumsum(0) - 1
        decoded[row, places] = values[row_entries]
    assert torch.equal(decoded, w)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("peer", "m", "n", "k", "sparsity"),
    [
        (spinfer, 8, 512, 1024, 0.6),
        (spinfer, 16, 512, 1024, 0.3),
        (spinfer, 32, 256, 512, 0.0),
        (spinfer, 64, 1024, 576, 0.6),
        (spinfer, 384, 128, 256, 0.6),
        (spinfer, 50, 128, 256, 0.6),
        (macko, 1, 40, 200, 0.6),
        (macko, 1, 96, 200, 0.6),
        (macko, 1, 4096, 4096, 0.6),
    ],
)
def test_their_products_are_right_on_a_gpu(peer, m, n, k, sparsity) -> None:
    case = problem(m=m, n=n, k=k)
    if reason := peer.unsupported(case, CUDA):
        pytest.skip(reason)  # names the missing checkout
    w, x = weight(n, k, sparsity, seed=m).cuda(), torch.randn(m, k).half().cuda()
    operands = Operands(case, {"w": Csr.from_dense(w)}, {"x": x}, lambda *_: None)
    launch = peer.prepare(operands)
    for _ in range(2):  # on other activations, too
        launch().fill_(float("nan"))
        expected = x.double() @ w.double().T
        assert (launch().double() - expected).norm() <= 2e-3 * expected.norm()
        assert not launch()[:, 3].any()  # the empty row
        x.normal_()

"""bsr_resident: plans for fewer tokens than they were made for."""

from sparsebench.kernels._common import cuda
from sparsebench.kernels.bsr import bsr_resident
from sparsebench.kernels.bsr.bsr_resident import Config
from tests.kernels.bsr.examples import call_of, example


def test_a_plan_launches_a_group_of_ctas_for_each_tile_of_fewer_tokens(loads, monkeypatch) -> None:
    grids: list[int] = []
    monkeypatch.setattr(bsr_resident, "groups_of", lambda *sizes: 5)
    monkeypatch.setattr(cuda.Loaded, "enqueue", lambda loaded, args: grids.append(loaded.grid))
    w, x, _ = example((64, 100, 96, (10, 12), 0.5), dtype="fp16")
    product = bsr_resident.plan(w, call_of("linear", w, 64, "fp16"), Config(16, 4))
    for m in (1, 16, 17, 64):
        product.run(x[:m], product.packed(w.values))
    assert grids == [5, 5, 10, 20]

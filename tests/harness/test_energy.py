"""Energy of a call: windows over a made-up meter, on a made-up clock that calls advance."""

from contextlib import nullcontext
from dataclasses import fields
from functools import partial

import pytest
import torch

from sparsebench.harness.bench import energy as module
from sparsebench.harness.bench.energy import NoMeter, energy, metered_energy
from sparsebench.results.record import Row

WATT, IDLE_WATT = 200.0, 80.0
TICK_S = 0.1  # the meter moves that often
CALL_S = 0.002


class Board:
    """A clock that a call moves on by CALL_S, and a meter that, as NVML's, moves in steps."""

    call_s = CALL_S
    clock_mhz: float | None = 1500.0

    def __init__(self) -> None:
        self.now_s = self.used_j = self.shown_j = self.ticks = 0.0
        self.queued = 0
        self.longest = 0

    def call(self) -> None:
        self.queued += 1
        self.longest = max(self.longest, self.queued)

    def wait(self) -> None:
        self.now_s += self.call_s * self.queued
        self.used_j += WATT * self.call_s * self.queued
        self.queued = 0

    def sleep(self, seconds: float) -> None:
        assert not self.queued
        self.now_s += seconds
        self.used_j += IDLE_WATT * seconds

    def energy_j(self) -> float:
        assert not self.queued, "read before every call has run"
        ticks = self.now_s // TICK_S
        if ticks > self.ticks:
            self.ticks, self.shown_j = ticks, self.used_j
        return self.shown_j

    def sm_mhz(self) -> float | None:
        return self.clock_mhz


class Silent:
    """A meter that always shows the same energy."""

    def __init__(self, energy_j: float | None) -> None:
        self.energy_j = lambda: energy_j

    def sm_mhz(self) -> None:
        return None


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    counter = Board()
    monkeypatch.setattr(module, "perf_counter", lambda: counter.now_s)
    monkeypatch.setattr(module, "sleep", counter.sleep)
    return counter


def test_a_call_of_2_ms_at_200_w_takes_0_4_j(board: Board) -> None:
    result = metered_energy(board.call, board.wait, board, window_s=2.0)
    assert result.j_per_call == pytest.approx(WATT * CALL_S, rel=0.01)
    assert 2.0 <= result.window_s <= 2.0 + 2 * TICK_S
    assert board.longest * CALL_S >= module.BATCH_S  # back to back
    assert result.calls == round(result.window_s / CALL_S)


def test_a_call_of_a_second_is_a_batch_of_its_own(board: Board) -> None:
    board.call_s = 1.3
    result = metered_energy(board.call, board.wait, board, window_s=3.0)
    assert board.longest == 1
    assert result.calls == 4
    assert board.now_s <= 8 * 1.3


def test_under_half_load_a_call_takes_as_long_and_the_energy_of_a_pause_more(board: Board) -> None:
    half = metered_energy(board.call, board.wait, board, window_s=3.0, half=True)
    full = metered_energy(board.call, board.wait, board, window_s=3.0)
    assert half.us_per_call == full.us_per_call == pytest.approx(1e6 * CALL_S)
    assert full.j_per_call == pytest.approx(WATT * CALL_S, rel=0.01)
    assert half.j_per_call == pytest.approx((WATT + IDLE_WATT) * CALL_S, rel=0.01)
    assert half.calls == pytest.approx(full.calls / 2, rel=0.05)
    assert half.sm_mhz == 1500.0


def test_a_board_without_a_clock_has_none_in_its_rows(board: Board) -> None:
    board.clock_mhz = None
    result = metered_energy(board.call, board.wait, board, window_s=1.0)
    assert result.sm_mhz is None
    assert result.to_json().keys() == {"us_per_call", "j_per_call", "window_s", "calls"}


def test_a_row_has_both_loads_and_the_energy_of_the_full_one(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(module, "identity", lambda device: "GPU-1")
    monkeypatch.setattr(module, "board", lambda identity: nullcontext(board))
    monkeypatch.setattr(module, "synchronize", lambda device: board.wait())
    facts = module.facts_under_load(board.call, device)
    assert facts["loads"].keys() == {"half", "full"}
    assert facts["energy_j"] == facts["loads"]["full"]["j_per_call"]
    assert facts.keys() <= {f.name for f in fields(Row)}


def test_a_device_without_a_counter_is_refused(board: Board) -> None:
    with pytest.raises(NoMeter, match="expected a counter of the board's energy, found none"):
        metered_energy(board.call, board.wait, Silent(None), window_s=2.0)


def test_a_counter_that_never_changes_is_refused(board: Board) -> None:
    with pytest.raises(NoMeter, match="J for 5 s"):
        metered_energy(board.call, board.wait, Silent(5.0), window_s=2.0)


def test_a_cpu_has_no_counter(board: Board) -> None:
    with pytest.raises(NoMeter, match="expected an NVIDIA GPU"):
        energy(board.call, torch.device("cpu"))


@pytest.mark.gpu
def test_a_product_on_a_gpu_takes_less_than_the_board_can_draw() -> None:
    device = torch.device("cuda:0")
    x = torch.randn(4096, 4096, device=device).bfloat16()
    out = torch.empty_like(x)
    result = energy(partial(torch.matmul, x, x, out=out), device)
    assert result.window_s >= 2.0
    assert 50 < result.j_per_call * result.calls / result.window_s < 1500  # W

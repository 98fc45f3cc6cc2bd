"""harness/run/runner.py: a sitting measures the ceilings of a card once."""

from collections.abc import Collection
from typing import Any

import pytest

from sparsebench.harness.run import runner


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what was measured, by a clock of 100 s a reading."""
    readings = iter(range(0, 100_000, 100))
    monkeypatch.setattr(runner, "monotonic", lambda: float(next(readings)))
    monkeypatch.setattr(runner, "_cached", {})
    return []


def ceilings(asked: list[list[str]], card: str, *dtypes: str) -> dict[str, Any]:
    def measure(wanted: Collection[str]) -> dict[str, Any]:
        asked.append(sorted(wanted))
        return {"matrix_tflops": dict.fromkeys(wanted, 1.0)}

    return runner.recent_ceilings(card, dtypes, measure)


def test_a_second_run_takes_recent_ceilings_with_their_age(asked: list[list[str]]) -> None:
    assert "age_s" not in ceilings(asked, "GPU-1", "bf16", "fp8")
    assert ceilings(asked, "GPU-1", "bf16")["age_s"] == 100.0
    assert ceilings(asked, "GPU-1", "fp8")["age_s"] == 200.0
    assert asked == [["bf16", "fp8"]]


def test_another_dtype_is_measured_with_those_before(asked: list[list[str]]) -> None:
    ceilings(asked, "GPU-1", "bf16")
    assert "age_s" not in ceilings(asked, "GPU-1", "fp16")
    assert ceilings(asked, "GPU-1", "bf16", "fp16")["age_s"] > 0
    assert asked == [["bf16"], ["bf16", "fp16"]]


def test_another_card_and_a_later_hour_are_measured(asked: list[list[str]]) -> None:
    ceilings(asked, "GPU-1", "bf16")
    ceilings(asked, "GPU-2", "bf16")
    for _ in range(7):  # seconds 100 to 900
        ceilings(asked, "GPU-1", "bf16")
    assert asked == [["bf16"], ["bf16"], ["bf16"]]

"""doctor/other_work.py: other work beside a run, from made-up readings and from this machine."""

import os
import sys

import pytest

from sparsebench.harness.doctor import other_work
from sparsebench.harness.doctor.findings import Level
from sparsebench.harness.doctor.other_work import Spent, before, host, read_spent

BEGAN = Spent(at_s=0.0, busy_s=100.0, own_s=5.0, cores=2)


@pytest.mark.parametrize(
    ("kind", "others_s", "level"),
    [
        ("cpu", 0.1, Level.OK),
        ("cpu", 3.0, Level.NOTE),
        ("cpu", 8.0, Level.WARNING),
        ("cuda", 8.0, Level.OK),
        ("cuda", 19.0, Level.WARNING),
    ],
)
def test_other_work_on_the_cores_is_judged(kind: str, others_s: float, level: Level) -> None:
    now = Spent(at_s=10.0, busy_s=100.0 + 7.0 + others_s, own_s=5.0 + 7.0, cores=2)
    found = host(BEGAN, now, kind)
    assert found.level is level
    assert f"{others_s / 10:.1f} of 2 cores" in found.found


def test_a_system_without_counters_is_a_note() -> None:
    assert host(None, None, "cpu").level is Level.NOTE


def test_this_machine_can_be_examined() -> None:
    spent = read_spent()
    assert spent is None or (spent.cores >= 1 and spent.busy_s > 0)
    (found,) = before("cpu", "", os.getpid())
    assert found.check == "other work on the host"


@pytest.mark.parametrize(
    ("listed", "others"), [([], []), ([7], []), ([7, 8], [8]), ([11], []), ([11, 12], [12])]
)
def test_our_own_worker_is_none_of_the_others(listed: list[int], others: list[int]) -> None:
    """Its id may be of another namespace: then one of those listed is ours."""
    assert other_work._others(listed, 7) == others


def test_a_gpu_without_nvml_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = other_work.gpu("GPU-1", 7)
    assert found.level is Level.NOTE

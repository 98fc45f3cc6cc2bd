"""Which device a run is of: by its environment alone."""

from pathlib import Path
from typing import Any

import pytest

from sparsebench.errors import ResultError
from sparsebench.results.run import store
from sparsebench.results.run.provenance import device_id, device_id_at, names_device

CPU = {"cpu": {"name": "EPYC"}}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({"gpu": {"name": "NVIDIA H200", "uuid": "GPU-1"}, **CPU}, "GPU-1"),
        ({"gpu": None, **CPU}, "EPYC"),
        (CPU, "EPYC"),
    ],
)
def test_a_device_is_its_gpu_or_else_its_cpu(environment: dict[str, Any], identity: str) -> None:
    assert device_id(environment) == identity


def test_no_row_is_read_to_tell_the_device(tmp_path: Path) -> None:
    store.write_json(tmp_path / "environment.json", CPU)
    (tmp_path / "rows.jsonl").write_text("no rows")
    assert device_id_at(tmp_path) == "EPYC"


@pytest.mark.parametrize("environment", [{}, {"gpu": 5}, {"gpu": {"uuid": ""}, "cpu": []}])
def test_an_environment_without_a_device_is_refused(environment: dict[str, Any]) -> None:
    with pytest.raises(ResultError, match=r"expected gpu\.uuid or cpu\.name, found neither"):
        device_id(environment)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("nvidia rtx-4090", "NVIDIA GeForce RTX 4090", True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("h200", "NVIDIA H200", True),
        ("H20", "NVIDIA H200", False),
        ("H100 SXM", "NVIDIA H100 80GB HBM3", False),
        ("RTX 409", "NVIDIA GeForce RTX 4090", False),
        ("-", "NVIDIA H200", False),
    ],
)
def test_a_device_answers_to_whole_words_of_its_name(name, device, expected) -> None:
    assert names_device(name, device) == expected

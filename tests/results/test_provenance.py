"""Which device a run is of: by its environment alone."""

from pathlib import Path
from typing import Any

import pytest

from sparsebench.errors import ResultError
from sparsebench.results.run import store
from sparsebench.results.run.provenance import device_id, device_id_at

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

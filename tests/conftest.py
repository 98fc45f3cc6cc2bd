"""What the tests share: a problem small enough for a laptop, and folders of bad kernels."""

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE))
PATHS = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)  # for workers: `wrong.zeros`, `faulty.hangs`
os.environ |= {"COLUMNS": "200", "NO_COLOR": "1"}  # of tables, read when the command is imported
os.environ["SPARSEBENCH_TUNED"] = str(HERE / "tuned")  # not there: no test asks the user's tables


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))

"""Waiting for a worker without a clock: only a contender that hangs runs out of time."""

import json
from collections.abc import Collection
from queue import SimpleQueue

import pytest

from sparsebench.harness.machine import child_process


class Answers(SimpleQueue[str]):
    """A worker's lines; the time limit is that of the cases that hang, all others have for ever."""

    def __init__(self, hanging: Collection[str]) -> None:
        super().__init__()
        self.hanging, self.case = hanging, ""

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        line = super().get(block, timeout if self.case in self.hanging else None)
        self.case = json.loads(line).get("at", [""])[0] if line else ""
        return line


def only_with(hanging: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers that start from now on lose time with these cases alone, by their ids."""
    monkeypatch.setattr(child_process, "SimpleQueue", lambda: Answers(hanging))

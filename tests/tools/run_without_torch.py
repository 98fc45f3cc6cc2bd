"""Run Python code where neither torch nor a package for GPUs can be imported."""

import sys
from typing import Any

BLOCKED = {"torch", "triton", "cupy", "nvmath"}


class Blocked:
    """An import fails as if the package were not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked())
    exec(sys.argv[1])

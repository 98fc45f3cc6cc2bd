"""The command, or Python after -c, where torch cannot be imported."""

import sys
from typing import Any


class Blocked:
    """An import of torch fails as where it is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked())
    if sys.argv[1] == "-c":
        exec(sys.argv[2])
    else:
        from sparsebench.harness.commands._app import main

        sys.exit(main())

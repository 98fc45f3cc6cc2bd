"""The process that imports other packages to read what their kernels and formats declare.

> {"names": [["kernels", "acme:FAST"]], "path": [...]}        sys.path
< {"kernels acme:FAST": {"op": ..., "options": [...]}}        or the reason why not
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from sparsebench.errors import SuiteError
from sparsebench.harness.catalog import import_declaration
from sparsebench.harness.machine.child_process import answer_parent


def main() -> None:
    """Answer one request."""
    send = answer_parent()
    request = json.loads(sys.stdin.readline() or "{}")
    sys.path[:] = request.get("path", sys.path)
    answer: dict[str, Any] = {}
    for folder, name in request.get("names", ()):
        try:
            answer[f"{folder} {name}"] = asdict(import_declaration(folder, name))
        except SuiteError as error:
            answer[f"{folder} {name}"] = str(error)
    send(answer)
    os._exit(0)


if __name__ == "__main__":
    main()

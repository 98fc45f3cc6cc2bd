"""Call a function once another module has been imported, without importing that module now.

transformers takes seconds to import, and only a program that uses it needs what is registered.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder:
    """Finds one module as the other finders do, and calls a function after it has run."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name, self.call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                self.call()

            loader.exec_module = run_and_call
        return spec


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call now if the module `name` is imported, else when a program imports it."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))

"""Triton's interpreter without what it computes in vain, which is half of our kernels' time.

- When a kernel calls another function, it replaces the builtins of triton.language again, though
  the launch has done that.
- It computes whether integers overflow, for an assertion that it leaves out without `debug`.
- It builds a table of all dtypes for each operation.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Replace builtins once in a launch, compute no overflow, and keep the table of each dtype."""
    replace, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    numpy_of = interpreter._get_np_dtype
    ready: set[frozenset[int]] = set()  # the modules of which this launch has replaced the builtins
    dtypes: dict[str, np.dtype[Any]] = {}

    def replace_once(function: Any) -> Any:
        modules = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if modules in ready:
            return None
        ready.add(modules)
        return replace(function)

    def end(scope: Any) -> None:
        ready.clear()
        restore(scope)

    def numpy_by_name(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_of(dtype)
        return dtypes[name]

    interpreter._patch_lang, interpreter._LangPatchScope.restore = replace_once, end
    interpreter._get_np_dtype = numpy_by_name
    assert not interpreter.interpreter_builder.options.debug
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options

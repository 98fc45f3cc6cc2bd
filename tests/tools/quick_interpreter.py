"""Triton's interpreter without what it computes in vain, which is most of our kernels' time.

- When a kernel calls another function, it replaces the builtins of triton.language again, though
  the launch has done that. The replacement copies the keyword arguments of each call.
- It computes whether integers overflow, for an assertion that it leaves out without `debug`.
- It builds a table of all dtypes for each operation, and the shape and the name of each result.
- It broadcasts operands of one shape to that shape.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    """Replace builtins once in a launch, compute no overflow, and keep what types determine."""
    _builtins()
    _types()
    assert not interpreter.interpreter_builder.options.debug
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


def _builtins() -> None:
    replace, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    ready: set[frozenset[int]] = set()  # the modules of which this launch has replaced the builtins

    def replace_once(function: Any) -> Any:
        modules = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if modules in ready:
            return None
        ready.add(modules)
        return replace(function)

    def end(scope: Any) -> None:
        ready.clear()
        restore(scope)

    def replace_attribute(place: Any, name: str, builtin: Any, _: Any, scope: Any) -> None:
        function = getattr(builtin, "__wrapped__", builtin)  # that it wraps asks for `_semantic`

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = replace_once, end
    interpreter._patch_attr = replace_attribute


def _types() -> None:
    block, tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    numpy_of, broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
    dtypes: dict[str, np.dtype[Any]] = {}
    blocks: dict[Any, tuple[Any, int, str]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def numpy_by_name(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_of(dtype)
        return dtypes[name]

    def block_by_name(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape), tuple(map(type, shape))  # a size of 16.0 is an error
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor_by_shape(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            tensor(self, handle, type)
            shapes[shape] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    def broadcast_others(self: Any, one: Any, other: Any) -> Any:
        sizes = [tuple(x.type.shape) if x.type.is_block() else () for x in (one, other)]
        return (one, other) if sizes[0] == sizes[1] else broadcast(self, one, other)

    interpreter._get_np_dtype = numpy_by_name
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.block_type.__init__, core.tensor.__init__ = block_by_name, tensor_by_shape
    TritonSemantic.broadcast_impl_value = broadcast_others

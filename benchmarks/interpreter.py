"""Makes Triton's interpreter quicker, with the same results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_interpreter_quicker() -> None:
    """Leaves out what takes more than half of the interpreter's time and changes nothing."""
    interpreter.InterpretedFunction.__call__ = _make_call()
    interpreter._get_np_dtype = _make_numpy_dtype(interpreter._get_np_dtype)
    core.block_type.__init__ = _make_block_type(core.block_type.__init__)
    core.tensor.__init__ = _make_tensor
    TritonSemantic.broadcast_impl_value = _make_broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic._cast_to_computation_type = _make_cast(TritonSemantic._cast_to_computation_type)
    builder = interpreter.interpreter_builder
    # Whether an integer overflows is computed by six operations for one, and told with `debug` alone.
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _make_call() -> Callable[..., object]:
    patched = set[str]()

    def call(function: Any, *args: object, **kwargs: object) -> object:
        """Calls a device function; what its launch has patched of the language is not patched again."""
        if (
            module := function.fn.__module__
        ) not in patched:  # it may import what the launched kernel's does not
            interpreter._patch_lang(function.fn)
            patched.add(module)
        return function.rewrite()(*args, **kwargs)

    return call


def _make_numpy_dtype(find: Callable[[Any], object]) -> Callable[[Any], object]:
    of_scalar = functools.cache(find)

    def numpy_dtype(kind: Any) -> object:
        scalar = kind.scalar
        return find(scalar) if scalar.is_ptr() else of_scalar(scalar)  # pointers have no hash

    return numpy_dtype


def _make_block_type(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[object, dict[str, object]] = {}

    def make_block_type(block: Any, element_ty: Any, shape: Any) -> None:
        """Checks and names each block's type once."""
        if element_ty.is_ptr():  # many of the same name
            return make(block, element_ty, shape)
        key = element_ty.name, tuple(map(core._unwrap_if_constexpr, shape))
        if (fields := known.get(key)) is None:
            make(block, element_ty, shape)
            known[key] = dict(vars(block))
        else:
            vars(block).update(fields)

    return make_block_type


def _make_tensor(tensor: Any, handle: object, kind: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.numel, tensor.shape = _size_of(tuple(kind.shape.values) if kind.is_block() else ())


@functools.cache
def _size_of(shape: Sequence[int]) -> tuple[object, object]:
    """Returns a tensor's number of elements, and its shape, as the language has them."""
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def _make_broadcast(broadcast: Callable[..., object]) -> Callable[..., object]:
    def broadcast_if_shapes_differ(semantic: Any, lhs: Any, rhs: Any) -> object:
        kinds = lhs.type, rhs.type
        shapes = [kind.shape.values if kind.is_block() else None for kind in kinds]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(semantic, lhs, rhs)

    return broadcast_if_shapes_differ


def _make_cast(cast: Callable[..., object]) -> Callable[..., object]:
    def cast_if_types_differ(semantic: Any, value: Any, dtype: object) -> object:
        return value if getattr(value, "dtype", None) is dtype else cast(semantic, value, dtype)

    return cast_if_types_differ

"""A pytest plugin that mends defects of Triton's interpreter and makes it faster. Kernels stay as compiled.

A comparison of scalars is a bool, but the interpreter keeps the operands' dtype beside it, and a mask broadcast from
it is int32. Triton 3.9 refuses such masks; older releases read them as bools.

The interpreter keeps bfloat16 as its bits. It cuts off what a GPU rounds, casts integers to these bits, and multiplies
matrices of them.

The functions of ``triton.language`` are replaced once per launch. Triton does so at every call of a device function,
thousands of times in a launch, which takes a sixth of the time.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_replaced: set[int] = set()
_replace = interpreter._patch_lang
_splat = interpreter.InterpreterBuilder.create_splat
_cast = interpreter.InterpreterBuilder.cast_impl
_dot = interpreter.InterpreterBuilder.create_dot


class _Nothing:
    def restore(self) -> None:
        pass


class _Outermost:
    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        self._scope.restore()
        _replaced.clear()


def _replace_once(function: Any) -> Any:
    seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
    if seen <= _replaced:
        return _Nothing()
    outermost = not _replaced
    _replaced.update(seen)
    scope = _replace(function)
    return _Outermost(scope) if outermost else scope


def _splat_bools(builder: Any, block_type: Any, scalar: Any) -> Any:
    if scalar.data.dtype == np.bool_:
        scalar = interpreter.TensorHandle(scalar.data, tl.int1)
    return _splat(builder, block_type, scalar)


def _cast_rounded(builder: Any, source: Any, kind: Any) -> Any:
    if source.dtype.scalar == tl.bfloat16:
        source = interpreter.TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    if kind.scalar == tl.bfloat16:
        bits = source.data.astype(np.float32).view(np.uint32)
        even = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return interpreter.TensorHandle(even.astype(np.uint16), tl.bfloat16)
    return _cast(builder, source, kind)


def _dot_of_floats(builder: Any, a: Any, b: Any, *given: Any) -> Any:
    if a.dtype.scalar == tl.bfloat16:
        a, b = _cast_rounded(builder, a, tl.float32), _cast_rounded(builder, b, tl.float32)
    return _dot(builder, a, b, *given)


interpreter._patch_lang = _replace_once
interpreter.InterpreterBuilder.create_splat = _splat_bools
interpreter.InterpreterBuilder.cast_impl = _cast_rounded
interpreter.InterpreterBuilder.create_dot = _dot_of_floats

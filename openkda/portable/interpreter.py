"""bf16 in Triton's interpreter. It keeps bf16 as 16-bit integers: casts to bf16 truncate instead of rounding to nearest even, and matrix
products multiply the integers. Both would make the kernels' arithmetic on a CPU another one than on a GPU; `repair` puts them right.

Only TRITON_INTERPRET=1 processes load this module."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 values as bf16 bit patterns (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) as fp32 values."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def repair() -> None:
    """Replace the interpreter's bf16 casts and products, once per process."""
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot
    if cast.__module__ == __name__:
        return
    handle = interpreter.TensorHandle

    def cast_impl(self, src, dst_type):
        to, source = dst_type.scalar, src.dtype.scalar
        if source == tl.float32 and to == tl.bfloat16:
            return handle(to_bf16(src.data), to)
        if source == tl.bfloat16 and to == tl.float32:
            return handle(from_bf16(src.data), to)
        return cast(self, src, dst_type)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (handle(from_bf16(x.data), tl.float32) for x in (a, b))
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot

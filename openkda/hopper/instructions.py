"""Arithmetic in the instructions that suit it, for kernels in plain Triton; for the interpreter, which has none, the same in Triton.

exp2, divide: without the steps that save results below 2^-126, one or two instructions instead of four.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from openkda.portable.forward import interpreted


@triton.jit
def plain_exp2(x):
    return tl.exp2(x)


@triton.jit
def plain_divide(x, y):
    return x / y


@triton.jit
def rounded(x, element: tl.constexpr):
    """x fp32 as an element of a tile: in fp32 tiles what the matrix unit reads of it, tf32, to nearest."""
    if element == tl.float32:
        return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x.to(element)


exp2 = plain_exp2 if interpreted() else libdevice.exp2
divide = plain_divide if interpreted() else libdevice.fast_dividef

"""Arithmetic in the instructions that suit it, for kernels in plain Triton; for the interpreter, which has none, the same in Triton.

exp2, divide: without the steps that save results below 2^-126, one or two instructions instead of four.

to_bf16, to_fp32: two elements at a time, so that a bf16 tile takes half a register per element wherever it waits. Converted one by one, its
elements stay apart, and their fp32 copies alive from first use to last.
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
def plain_to_bf16(x):
    return x.to(tl.bfloat16)


@triton.jit
def plain_to_fp32(x):
    return x.to(tl.float32)


@triton.jit
def paired_to_bf16(x):
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def paired_to_fp32(x):
    # Not pure: two uses are two conversions.
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2
    )


exp2 = plain_exp2 if interpreted() else libdevice.exp2
divide = plain_divide if interpreted() else libdevice.fast_dividef
to_bf16 = plain_to_bf16 if interpreted() else paired_to_bf16
to_fp32 = plain_to_fp32 if interpreted() else paired_to_fp32

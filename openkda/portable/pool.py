"""States between a pool and the dense [N, ..] tensors that the chunk forward takes. Pads and slots out of range are never touched.

    gather    dense[n] = pool[index[n]] in fp32, zero where there is no slot or no initial state
    scatter   pool[index[n]] = dense[n] in the pool's dtype
    clear     rows of sequences without a slot are zeros

Grid: (sequence, block of a slot's elements); for clear (sequence, share of its rows).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.backends import on_its_device

BLOCK = 4096  # elements per program: 16 KiB of fp32 on its way
SHARES = 16  # programs that clear one sequence's rows


@triton.jit
def _slot(index_ptr, index_stride, n, slots, FIRST_SLOT: tl.constexpr):
    slot = tl.load(index_ptr + n * index_stride).to(tl.int64)
    return slot, (slot >= FIRST_SLOT) & (slot < slots)


@triton.jit(do_not_specialize=["slots"])
def gather_kernel(
    pool_ptr,  # [slots, E] fp32 or bf16, slots slot_stride apart
    dense_ptr,  # [N, E] fp32
    index_ptr,  # [N] int32 or int64
    has_initial_ptr,  # [N] bool or None
    slots, slot_stride, index_stride, E: tl.constexpr, BLOCK: tl.constexpr, FIRST_SLOT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, ok = _slot(index_ptr, index_stride, n, slots, FIRST_SLOT)
    if has_initial_ptr is not None:
        ok = ok & (tl.load(has_initial_ptr + n) != 0)
    x = tl.load(pool_ptr + tl.where(ok, slot, 0) * slot_stride + offs, mask=(offs < E) & ok, other=0.0)
    tl.store(dense_ptr + n * E + offs, x.to(tl.float32), mask=offs < E)


@triton.jit(do_not_specialize=["slots"])
def scatter_kernel(
    pool_ptr, dense_ptr, index_ptr, slots, slot_stride, index_stride, E: tl.constexpr, BLOCK: tl.constexpr, FIRST_SLOT: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, ok = _slot(index_ptr, index_stride, n, slots, FIRST_SLOT)
    x = tl.load(dense_ptr + n * E + offs, mask=(offs < E) & ok, other=0.0)
    tl.store(pool_ptr + tl.where(ok, slot, 0) * slot_stride + offs, x.to(pool_ptr.dtype.element_ty), mask=(offs < E) & ok)


@triton.jit(do_not_specialize=["slots", "T"])
def clear_kernel(
    out_ptr,  # [T, D], rows out_stride apart
    cu_ptr,  # [N + 1]
    index_ptr, slots, T, out_stride, index_stride, D: tl.constexpr, BD: tl.constexpr, FIRST_SLOT: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    _, ok = _slot(index_ptr, index_stride, n, slots, FIRST_SLOT)
    first = tl.maximum(tl.load(cu_ptr + n).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_ptr + n + 1).to(tl.int64), T)
    count = tl.where(ok, 0, tl.maximum(end - first, 0))
    offs = tl.arange(0, BD)
    zeros = tl.zeros([BD], dtype=out_ptr.dtype.element_ty)
    for i in tl.range(tl.program_id(1), count, SHARES):
        tl.store(out_ptr + (first + i) * out_stride + offs, zeros, mask=offs < D)


@on_its_device
def gather_states(pool: torch.Tensor, index: torch.Tensor, has_initial: torch.Tensor | None, pad_slot: int) -> torch.Tensor:
    """pool [slots, HV, ., .], index [N], has_initial [N] bool or None -> [N, HV, ., .] fp32."""
    N, E = index.shape[0], pool[:1].numel() if pool.shape[0] else 0
    dense = torch.empty(N, *pool.shape[1:], dtype=torch.float32, device=pool.device)
    if dense.numel() == 0 or E == 0:
        return dense.zero_()
    has_initial = None if has_initial is None else has_initial.contiguous()
    gather_kernel[(N, triton.cdiv(E, BLOCK))](
        pool, dense, index, has_initial, pool.shape[0], pool.stride(0), index.stride(0), E, BLOCK, pad_slot + 1
    )
    return dense


@on_its_device
def scatter_states(dense: torch.Tensor, pool: torch.Tensor, index: torch.Tensor, pad_slot: int) -> None:
    """Write dense [N, HV, ., .] fp32 into the slots of index [N]."""
    if dense.numel() == 0 or pool.shape[0] == 0:
        return
    E = dense[0].numel()
    grid = (dense.shape[0], triton.cdiv(E, BLOCK))
    scatter_kernel[grid](pool, dense, index, pool.shape[0], pool.stride(0), index.stride(0), E, BLOCK, pad_slot + 1)


@on_its_device
def clear_rows(out: torch.Tensor, cu_seqlens: torch.Tensor, index: torch.Tensor, slots: int, pad_slot: int) -> None:
    """Zero the rows of out [1, T, HV, V] (each row dense) that belong to sequences without a slot."""
    D = out.shape[2] * out.shape[3]
    if index.shape[0] and out.shape[1]:
        cu = cu_seqlens.contiguous()
        clear_kernel[(index.shape[0], SHARES)](
            out, cu, index, slots, out.shape[1], out.stride(1), index.stride(0), D, triton.next_power_of_2(D), pad_slot + 1, SHARES
        )

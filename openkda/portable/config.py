"""`Problem` in, `Config` out: how the portable kernels are launched. Pure, cached, printable; nothing is tuned on the call path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from openkda.problem import Problem


@dataclass(frozen=True)
class Config:
    """Launch configuration of the portable forward."""

    chunk: int  # C, tokens per chunk: 32 or 64. 32 everywhere: 64 spills, and chunk-entry states are every second 32's
    form: str  # pairs within 16 tokens: "any" (level form, every gate) or "matrix" (one anchor, bounded gates)
    precision: str  # input precision of fp32 matrix products: "tf32x3" on NVIDIA matrix units, "ieee" elsewhere
    gate_block_k: int  # channels per program of the gate kernel
    gate_warps: int
    block_k: int  # channels per step of the score and output kernels
    intra_warps: int
    intra_stages: int  # depth of the load pipeline over channel blocks
    wy_block: int  # columns per step of the w, u, kg, qg kernel
    wy_warps: int
    scan_block_v: int  # value columns per program of the state scan
    scan_block_k: int  # keys per block of the state
    scan_precision: str  # as precision, for the state scan
    scan_warps: int
    scan_stages: int  # depth of the load pipeline over chunks
    output_block_v: int  # value columns per program of the output kernel
    output_warps: int


def pad(n: int) -> int:
    """Tile width for n columns: a power of two, at least 16 (the smallest matrix-unit tile)."""
    return max(16, 1 << (n - 1).bit_length())


def shared_limit(capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory that one block may use; capability None stands for AMD (64 KiB of LDS on gfx942)."""
    if capability is None or capability < (8, 0):
        return 64 * 1024
    if capability in ((8, 0), (8, 7)):
        return 163 * 1024
    if capability[0] in (9, 10):
        return 227 * 1024
    return 99 * 1024


def multiprocessors(capability: tuple[int, int] | None) -> int:
    """Blocks that fill the device, roughly; it only steers how V is split."""
    return 132 if capability is not None and capability[0] in (9, 10) else 108


@lru_cache(maxsize=1024)
def configure(problem: Problem) -> Config:
    """The launch configuration of `problem`. Measured on an H200 where a figure is given (T = 8192, H = 64, K = V = 128, bf16)."""
    wide = problem.dtype == torch.float32
    nvidia = problem.capability is not None
    chunk = 32
    form = "matrix" if problem.bounded and problem.dtype != torch.float16 else "any"
    K, V = pad(problem.K), pad(problem.V)
    scan_block_v = scan_block(problem, K, V, wide)
    return Config(
        chunk=chunk,
        form=form,
        precision="tf32x3" if nvidia else "ieee",
        gate_block_k=min(K, 128),
        gate_warps=2 if K >= 128 else 1,
        block_k=16,
        intra_warps=intra_warps(problem, form, wide),
        intra_stages=2 if nvidia and not wide and form == "matrix" else 1,  # matrix: 299 us against 415; any: 513 against 437
        wy_block=min(32 if wide else 128, max(K, V)),
        wy_warps=4 if wide or max(K, V) < 128 else 8,  # 368 us; 450 with 4 warps on 64 columns
        scan_block_v=scan_block_v,
        scan_block_k=min(K, (32 if K > 128 else 64) if wide else 128),
        scan_precision="ieee" if wide and K > 128 else "tf32x3" if nvidia else "ieee",  # the split operands of tf32x3 would spill
        scan_warps=8 if wide and K > 128 else 4,
        scan_stages=1 if wide else scan_stages(problem, chunk, K, scan_block_v),
        output_block_v=min(V, 64),
        output_warps=4,
    )


def intra_warps(problem: Problem, form: str, wide: bool) -> int:
    """Warps of the score kernel. One waits for nobody: without prefetch 415 us against 500 (2 warps) and 675 (4)."""
    if wide or problem.capability is None:
        return 4
    return 2 if form == "any" and problem.capability < (9, 0) else 1  # one would spill there


def scan_block(problem: Problem, K: int, V: int, wide: bool) -> int:
    """Value columns per scan program: as many as registers allow (304 us with 64, 500 with 128), fewer where the grid would leave
    multiprocessors idle (H = 16: 227 us with 16, 269 with 32)."""
    large = problem.capability is not None and problem.capability[0] in (9, 10)
    block = min(V, max(16, (2048 if wide else 8192 if large else 4096) // K))
    while block > 16 and 2 * problem.N * problem.HV * (V // block) <= multiprocessors(problem.capability):
        block //= 2
    return block


def scan_stages(problem: Problem, chunk: int, K: int, block_v: int) -> int:
    """The deepest load pipeline, up to 3 stages, whose tiles fit in shared memory beside the operands of one step."""
    element = problem.dtype.itemsize
    tiles = chunk * (3 * K + block_v + chunk) * element  # w, kg, qg, u, Aqk
    operands = (K * block_v + 2 * chunk * block_v) * element
    for stages in (3, 2):
        if tiles * stages + operands <= shared_limit(problem.capability) * 3 // 4:
            return stages
    return 1

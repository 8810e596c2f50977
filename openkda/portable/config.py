"""`Problem` in, `Config` out: how the portable kernels are launched. Pure, cached, printable; nothing is tuned on the call path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from openkda.problem import Problem

SUB_CHUNK = 16  # rows served by one anchor in the matrix form; 15 steps of -5 * log2(e) stay inside fp32 and bf16


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
    solve_warps: int  # one for chunks of 32: a lane per column, no barriers
    wy_block: int  # columns per step of the w, u, kg, qg kernel
    wy_warps: int
    scan_block_v: int  # value columns per program of the state scan
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
    """The launch configuration of `problem`."""
    wide = problem.dtype == torch.float32
    chunk = 32
    K, V = pad(problem.K), pad(problem.V)
    scan_block_v = scan_block(problem, K, V, wide)
    return Config(
        chunk=chunk,
        form="matrix" if problem.bounded and problem.dtype != torch.float16 else "any",
        precision="ieee" if problem.capability is None else "tf32x3",
        gate_block_k=min(K, 64),
        gate_warps=4,
        block_k=min(K, 16 if wide else 32),
        intra_warps=4,
        solve_warps=1,
        wy_block=32 if wide else 64,
        wy_warps=4,
        scan_block_v=scan_block_v,
        scan_warps=4 if K * scan_block_v <= 8192 else 8,
        scan_stages=scan_stages(problem, chunk, K, scan_block_v),
        output_block_v=min(V, 64),
        output_warps=4,
    )


def scan_block(problem: Problem, K: int, V: int, wide: bool) -> int:
    """Value columns per scan program: as wide as registers allow, narrower while the grid does not fill the device."""
    block = min(V, 16384 // K, 32 if wide else 128)
    while block > 16 and problem.N * problem.HV * (V // block) * 2 <= 2 * multiprocessors(problem.capability):
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

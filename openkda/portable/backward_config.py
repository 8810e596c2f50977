"""`Problem` in, `BackwardConfig` out: how the portable gradient kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from openkda.portable.config import Config, configure, pad, scan_block, shared_limit
from openkda.problem import Problem


@dataclass(frozen=True)
class BackwardConfig:
    """Launch configuration of the portable backward."""

    forward: Config  # of the stages that are recomputed; its chunk size is the backward's
    precision: str  # input precision of fp32 matrix products, as in the forward
    scan_block_k: int  # keys per block of the state and its gradient
    scan_block_v: int  # value columns per program of both scans
    scan_warps: int
    scan_stages: int  # depth of the load pipeline over chunks
    block_v: int  # value columns per step of the score gradients
    scores_warps: int
    block_k: int  # channels per program of the input gradients
    input_block_v: int  # value columns per step of their products with the states
    input_warps: int


@lru_cache(maxsize=1024)
def configure_backward(problem: Problem) -> BackwardConfig:
    """The launch configuration of `problem`'s gradients."""
    wide = problem.dtype == torch.float32
    K, V = pad(problem.K), pad(problem.V)
    forward = configure(problem)
    scan_block_v = 16 if wide else scan_block(problem, K, V, wide)
    return BackwardConfig(
        forward=forward,
        precision=forward.precision,
        scan_block_k=min(K, 128),
        scan_block_v=scan_block_v,
        scan_warps=8 if wide or K * scan_block_v > 8192 else 4,
        scan_stages=1 if wide else reverse_scan_stages(problem, forward.chunk, K, scan_block_v),  # fp32 operands fill the registers
        block_v=min(V, 32 if wide else 64),
        scores_warps=4,
        block_k=min(K, 16 if wide else input_block_k(problem)),
        input_block_v=min(V, 32 if wide else 64),
        input_warps=8 if wide else 4,  # H200: 4 warps with a few spills 0.98 ms, 8 without 1.58 (T 8192, H 32): two programs overlap
    )


def input_block_k(problem: Problem) -> int:
    """Channels per program of the input gradients: 64 rows feed Hopper's matrix unit best. Less on AMD (registers), and on capability 10,
    where Triton 3.6 cannot lower this kernel's [64, C] accumulators in tensor memory."""
    return 32 if problem.capability is None or problem.capability[0] == 10 else 64


def reverse_scan_stages(problem: Problem, chunk: int, K: int, block_v: int) -> int:
    """The deepest load pipeline, up to 3 stages, whose tiles fit in shared memory beside the operands of one step."""
    element = problem.dtype.itemsize
    tiles = chunk * (3 * K + block_v + chunk) * element  # w, kg, qg, do, Aqk
    operands = (K * block_v + chunk * block_v) * element
    for stages in (3, 2):
        if tiles * stages + operands <= shared_limit(problem.capability) * 7 // 8:
            return stages
    return 1

"""What the offline compilation test compiles of decoding: calls whose configurations span those that dispatch can choose."""

from itertools import product

import torch

from openkda import serving_problem
from openkda.portable.decode import decode_launch
from openkda.portable.fused_step import fused_launch

BF16, FP32 = torch.bfloat16, torch.float32


def arguments(N: int, S: int, H: int, K: int, V: int, state: torch.dtype, v_first: bool, W: int) -> list[torch.Tensor | None]:
    """Tensors of one kda_decode call, empty but for their layout."""
    empty = lambda *shape, dtype=BF16: torch.empty(*shape, dtype=dtype)
    pool = torch.empty(1, H, *((V, K) if v_first else (K, V)), dtype=state)
    index = torch.empty(N, W, dtype=torch.int32)
    tokens = [empty(N, S, H, K), empty(N, S, H, K), empty(N, S, H, V), empty(N, S, H, K), empty(N, S, H), empty(N, S, H, V)]
    return [*tokens, empty(H, dtype=FP32), empty(H, K, dtype=FP32), pool, index, None]


def check(tensors: list[torch.Tensor | None], v_first: bool, bounded: bool) -> serving_problem.PoolProblem:
    options = serving_problem.Options(-5.0 if bounded else None, None, -1, False, True, False, v_first, True, True)
    layouts = [serving_problem.layout(t) for t in tensors]
    return serving_problem.check_decode(*layouts, None, options)


def compile_decode(target: str) -> None:
    """kda_decode: both layouts and state dtypes, few and many programs, one token and three drafted, odd and wide heads."""
    device = torch.device("cpu")
    for v_first, state, N in product((True, False), (FP32, BF16), (1, 256)):
        tensors = arguments(N, 1, 8, 128, 128, state, v_first, 1)
        decode_launch(check(tensors, v_first, bounded=N == 1), device)(*tensors, None)
    for S, K, V, W in ((3, 128, 128, 4), (1, 256, 256, 1), (1, 100, 72, 1)):
        tensors = arguments(64, S, 8, K, V, FP32, True, W)
        decode_launch(check(tensors, True, bounded=True), device)(*tensors, None)


def compile_fused(target: str) -> None:
    """kda_fused_decode: one token with few and many programs, and four drafted tokens."""
    for N, S, W in ((1, 1, 1), (256, 1, 1), (8, 4, 5)):
        tensors = arguments(N, S, 8, 128, 128, FP32, True, W)
        C = 3 * 8 * 128
        more = [tensors[2], torch.empty(128), torch.empty(C, 4, dtype=BF16), None, torch.empty(1, C, 3, dtype=BF16)]
        problem = serving_problem.check_step(check(tensors, True, bounded=True), *map(serving_problem.layout, more), 1e-5)
        fused_launch(problem, torch.device("cpu"))(*tensors, *more)

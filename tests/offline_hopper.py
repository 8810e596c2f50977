"""What the offline compilation test compiles of the Hopper forward: every kernel that dispatch can choose for a bounded gate, and the two
forward kernels of an unbounded one."""

import re

import torch
from offline import CAPABILITY

from openkda.hopper import launch
from openkda.hopper.config import Config, choose
from openkda.problem import Problem
from openkda.testing import make_case

SHAPES = (
    dict(T=128, H=8), dict(T=1024, H=4), dict(T=2048, H=12), dict(T=8192, H=8), dict(T=512, H=96), dict(T=64, H=200), dict(T=8192, H=40),
    dict(T=512, H=16),
)  # fmt: skip
PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[a-z](\d+) (?:\.ptr \.global \.align \d+ )?\w+_param_\d+(?:\[(\d+)\])?")


def compile_hopper(target: str, shapes: tuple[dict, ...] = SHAPES, bounded: bool = True, v_first: bool = True) -> None:
    """Every launch of one call per kind of Config."""
    for shape in shapes:
        problem, _ = make_case("init", T=64, H=2, K=128, dtype=torch.bfloat16, state_v_first=v_first, bounded=bounded).described()
        problem = problem.replace(device_type="cuda", capability=CAPABILITY[target], **shape, HV=shape["H"])
        compile_launches(problem, choose(problem))


def compile_launches(problem: Problem, config: Config) -> None:
    for one in launch.launches(problem, config, None, (torch.float32, torch.float32, torch.int32))[0]:
        sizes = [int(array or bits) // (1 if array else 8) for bits, array in PARAMETER.findall(one.compile().asm["ptx"])]
        assert sizes == one.parameters().sizes, one.kernel


def compile_any_gate(target: str) -> None:
    """One block a head, two, and segments with tails of their own."""
    compile_hopper(target, (dict(T=512, H=96), dict(T=128, H=8), dict(T=1024, H=4)), bounded=False)


def compile_tickets(target: str) -> None:
    """Blocks that take the sequences of a ragged batch in turn."""
    lengths = (64,) * 70
    problem, _ = make_case("init", lengths=lengths, H=2, K=128, dtype=torch.bfloat16).described()
    problem = problem.replace(device_type="cuda", capability=CAPABILITY[target])
    config = choose(problem, lengths)
    assert config.forward.split == "turns"
    compile_launches(problem, config)


def compile_with_states(target: str) -> None:
    """Chunk-entry states of both layouts: of blocks of 128 rows, of segments with tails of their own, and of what runs unsplit where these
    fail."""
    for v_first in (True, False):
        compile_hopper(target, tuple(dict(T=512, H=H, return_intermediate_states=True) for H in (96, 8)), v_first=v_first)

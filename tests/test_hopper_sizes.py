"""The Hopper forward at sizes that only a large GPU holds: long sequences, tensors beyond 2^31 elements, very uneven batches; and beside
other work on the device."""

import pytest
import torch

from openkda.benchmarking import Shape, make_cases, oracles
from openkda.hopper import forward, why_not
from openkda.testing import Case, assert_close, make_case, rounded_chunk

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]
PER_HEAD = ("A_log", "dt_bias")
WINDOW = 1024  # tokens that a sharp gate certainly forgets within


def big_case(regime, *lengths, H):
    """bf16 inputs made on the device"""
    device = torch.device("cuda", torch.cuda.current_device())
    return make_cases(Shape("big", lengths, H, H, 128), [("bounded", regime)], device)[0]


def check_last_chunk(case, heads):
    """o of the last 64 tokens and the final state of some heads, for a gate that forgets: from an empty state WINDOW tokens earlier"""
    problem, inputs = case.described()
    assert why_not(problem) is None
    o, final, _ = forward(problem, inputs)
    assert o.isfinite().all() and final.isfinite().all()
    args = dict(case.args)
    for name in ("q", "k", "v", "g", "beta"):
        args[name] = args[name][:, -WINDOW:, heads].contiguous()
    args.update({name: args[name][heads] for name in PER_HEAD}, initial_state=torch.zeros_like(args["initial_state"][:, heads]))
    window = Case(args, case.regime)
    assert_close("o", o[:, -64:, heads], window.oracle[0][:, -64:], window.twin[0][:, -64:])
    assert_close("final_state", final[:, heads], window.oracle[1], window.twin[1])


def check_whole(case):
    """Everything, against the chunk algebra in fp64"""
    problem, inputs = case.described()
    assert why_not(problem) is None
    o, final, _ = forward(problem, inputs)
    ((o64, final64),) = oracles([case], problem.H)
    twin = rounded_chunk(problem, inputs)
    assert_close("o", o, o64, twin[0])
    assert_close("final_state", final, final64, twin[1])


def test_a_quarter_of_a_million_tokens(much_memory):
    check_whole(big_case("init", 2**18, H=8))


def test_more_elements_than_31_bits_count(much_memory):
    case = big_case("random", 2**18 + 33, H=64)
    assert case.args["q"].numel() > 2**31
    check_last_chunk(case, [0, 31, 63])


def test_a_million_tokens(much_memory):
    check_last_chunk(big_case("random", 10**6, H=8), [0, 7])


def test_sixty_short_sequences_beside_a_long_one():
    short = tuple(7 + 11 * i % 293 for i in range(60))
    check_whole(big_case("init", *short[:30], 2**14, *short[30:], H=4))


@pytest.mark.parametrize("T", [1000, 8192])
def test_other_work_on_the_device_changes_nothing(T):
    case = make_case("init", T=T, H=12, K=128, dtype=torch.bfloat16, state_v_first=True, device="cuda")
    described = case.described()
    first = forward(*described)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(300):
            x @ x
    for _ in range(50):
        o, final, _ = forward(*described)
        assert torch.equal(o, first[0]) and torch.equal(final, first[1])
    torch.cuda.synchronize()

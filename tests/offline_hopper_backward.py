"""What the offline compilation test compiles of the Hopper gradients."""

import torch
from offline import CAPABILITY

from openkda.autograd import TENSORS
from openkda.hopper import backward_fused, backward_fused_levels, backward_operands, backward_scan
from openkda.hopper.backward_config import Scans
from openkda.hopper.gradients import gradients
from openkda.testing import make_case

PROBLEMS = {
    "all options": dict(),
    "gate computed outside, ragged, grouped": dict(raw=False, qk_l2norm=False, lengths=(70, 3), H=1, HV=2, state_v_first=True),
    "64 channels": dict(K=64, V=64, initial_state=False),
    "softplus": dict(bounded=False),
    "unbounded gate computed outside": dict(bounded=False, raw=False, qk_l2norm=False, lengths=(70, 3), H=1, HV=2, V=64),
}


def compile_only(make, key, operands, device) -> None:
    """In place of runtime.start"""
    make(*key).compile()


def compile_segments(target: str) -> None:
    """The same with sequences cut into segments."""
    backward_scan.choose_scans = lambda problem, lengths: Scans(1, 1)
    compile_gradients(target)


def compile_gradients(target: str) -> None:
    """Compile the gradients of every problem above."""
    backward_operands.start = backward_fused.start = backward_fused_levels.start = compile_only
    for options in PROBLEMS.values():
        problem, inputs = make_case("random", **{**dict(T=73, H=2, K=128, V=128, dtype=torch.bfloat16), **options}).described()
        problem = problem.replace(device_type="cuda", capability=CAPABILITY[target])
        needs = tuple(getattr(inputs, name) is not None for name in TENSORS)
        o, final = torch.zeros_like(inputs.v), torch.zeros(problem.state_shape, dtype=problem.state_dtype)
        gradients(problem, inputs, needs, o, o, final)

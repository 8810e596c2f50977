"""What the offline compilation test compiles of the portable backward."""

import torch
from offline import CAPABILITY, problems

from openkda.autograd import TENSORS
from openkda.portable import backward
from openkda.testing import make_case

BF16, FP32 = torch.bfloat16, torch.float32

PROBLEMS = {
    "bounded": dict(dtype=BF16),
    "any gate, ragged, grouped": dict(dtype=BF16, bounded=False, lengths=(70, 3), H=1, HV=2, state_v_first=True),
    "wide heads": dict(dtype=BF16, K=256, V=256),
    "fp32": dict(dtype=FP32),
    "odd sizes, gate computed outside": dict(dtype=BF16, K=40, V=72, raw=False, qk_l2norm=False, initial_state=False),
}


def compile_backward(target: str) -> None:
    """Compile the gradients of the problems above."""
    for options in problems(target, PROBLEMS, ("any gate, ragged, grouped", "wide heads")):
        problem, inputs = make_case("random", **{**dict(T=73, H=2, K=128), **options}).described()
        problem = problem.replace(device_type="cuda", capability=CAPABILITY[target])
        needs = tuple(getattr(inputs, name) is not None for name in TENSORS)
        o, final = torch.zeros_like(inputs.v), torch.zeros(problem.state_shape, dtype=problem.state_dtype)
        backward(problem, inputs, needs, o, o, final)

"""What the offline compilation test compiles of the portable forward: problems whose configurations span those that dispatch can choose."""

import torch
from offline import CAPABILITY, problems

from openkda.portable import forward
from openkda.portable.gated_norm import gated_norm
from openkda.portable.short_conv import silu_conv
from openkda.tables import ragged_tables
from openkda.testing import make_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PROBLEMS = {
    "bf16 bounded, few heads": dict(H=2, K=128, dtype=BF16),
    "bf16 softplus, many heads": dict(H=128, K=128, dtype=BF16, bounded=False),
    "fp16, K 64, V 128, states": dict(H=16, K=64, V=128, dtype=FP16, return_intermediate_states=True),
    "bf16, widest head": dict(H=64, K=256, dtype=BF16),
    "fp32 softplus, widest head": dict(H=2, K=256, dtype=FP32, bounded=False),
}


def compile_pointwise(target: str) -> None:
    """Compile the short convolution and the output norm of a layer, and their gradients."""
    stream, weight = torch.zeros(2, 99, 512, dtype=BF16, requires_grad=True), torch.zeros(512, 1, 4, requires_grad=True)
    torch.autograd.grad(silu_conv(stream, weight, None).sum(), (stream, weight))
    x, gate, weight = (torch.zeros(*shape, dtype=BF16, requires_grad=True) for shape in ((99, 128), (99, 128), (128,)))
    torch.autograd.grad(gated_norm(x, gate, weight, 1e-5).sum(), (x, gate, weight))


def compile_tables(target: str) -> None:
    """Compile what makes the chunk tables of a ragged batch."""
    for dtype in (torch.int32, torch.int64):
        ragged_tables(torch.tensor([0, 5, 9], dtype=dtype), 9, 64)


def compile_all(target: str) -> None:
    """Compile the forward of PROBLEMS."""
    for options in problems(target, PROBLEMS, ("bf16 softplus, many heads", "fp32 softplus, widest head")):
        problem, inputs = make_case("random", T=32, **options).described()
        forward(problem.replace(device_type="cuda", capability=CAPABILITY[target]), inputs)

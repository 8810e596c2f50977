"""Plain Triton kernels for any GPU: every stage of the pipeline as its own function, and the forward and backward that chain them."""

from openkda.portable.backward import backward, keep, why_not_backward
from openkda.portable.forward import forward, interpreted, why_not

if interpreted():
    from openkda.portable.interpreter import repair

    repair()

__all__ = ["backward", "forward", "keep", "why_not", "why_not_backward"]

"""Plain Triton kernels for any GPU: every stage of the pipeline as its own function, and the forward that chains them."""

from openkda.portable.forward import forward, interpreted, why_not

if interpreted():
    from openkda.portable.interpreter import repair

    repair()

__all__ = ["forward", "why_not"]

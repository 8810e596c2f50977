"""Plain Triton kernels for any GPU: every stage of the pipeline as its own function, and the forward that chains them."""

from openkda.portable.forward import forward, why_not

__all__ = ["forward", "why_not"]

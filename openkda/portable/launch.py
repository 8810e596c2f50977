"""Launches without Triton's argument inspection, for calls whose host cost matters.

`kernel[grid](...)` looks at every argument to find the compiled kernel that fits: over 20 us for a kernel of this library's size. When all
but the pointers of a call are known to repeat, only their 16-byte alignment can select another kernel. So the kernel that Triton returned
for the first call with all pointers aligned is run directly afterwards; a call with an unaligned pointer goes the long way. Triton's
launch hooks are not called on the short way (profilers that trace the device do not need them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from triton.runtime import driver


class PreparedLaunch:
    """One kernel, grid and set of constants; calling it with the tensors launches it on the current stream of their device."""

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], build: Callable[[Sequence], tuple], device: torch.device, **options: int
    ) -> None:
        """build: from the tensors (None where absent), or from their addresses, in the order of the call to the kernel's arguments."""
        self.kernel, self.build, self.options = kernel, build, options
        self.grid = (*grid, 1, 1)[:3]
        self.device = device.index if device.type == "cuda" else None
        self.compiled: triton.compiler.CompiledKernel | None = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if self.device is not None and self.device != driver.active.get_current_device():
            with torch.cuda.device(self.device):
                return self(*tensors)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        compiled = self.compiled
        if bits & 15 or compiled is None:
            compiled = self.kernel[self.grid](*self.build(tensors), **self.options)
            if not bits & 15:
                self.compiled = compiled  # None from the interpreter, which compiles nothing
            return None
        x, y, z = self.grid
        stream = driver.active.get_current_stream(self.device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *self.build(addresses))
        return None

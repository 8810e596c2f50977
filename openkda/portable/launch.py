"""Launches without Triton's argument inspection, for calls whose host cost matters.

`kernel[grid](...)` looks at every argument to find the compiled kernel that fits: over 20 us for a kernel of this library's size. When all
but the pointers of a call are known to repeat, only their 16-byte alignment can select another kernel, so the kernel that Triton returned
for the first call of an alignment is launched directly afterwards.
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
        """build: from the tensors (or their addresses; None where absent) in the order of the call to the kernel's arguments."""
        self.kernel, self.build, self.options = kernel, build, options
        self.grid = (*grid, 1, 1)[:3]
        self.device = device.index if device.type == "cuda" else None
        self.runners: dict[tuple[int, ...], Callable] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if self.device is not None and self.device != driver.active.get_current_device():
            with torch.cuda.device(self.device):
                return self(*tensors)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        alignment = tuple([p & 15 for p in addresses])
        runner = self.runners.get(alignment)
        if runner is None:
            compiled = self.kernel[self.grid](*self.build(tensors), **self.options)
            if compiled is not None:  # the interpreter compiles nothing
                self.runners[alignment] = compiled[self.grid]
        else:
            runner(*self.build([p or None for p in addresses]), stream=driver.active.get_current_stream(self.device))
        return None

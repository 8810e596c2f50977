"""Every Triton and Gluon name that has moved between releases, imported in one place; `why_not` names the releases verified."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

"""Every decode kernel that dispatch can choose compiles for real GPUs, without spills."""

import pytest
from offline import faults, in_subprocess


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_decode_compiles_without_spills(target):
    kernels = in_subprocess(target, "offline_decode:compile_decode")
    assert len(kernels) >= 8 and not faults(target, kernels), faults(target, kernels)


@pytest.mark.parametrize("target", ["sm_90"])
def test_fused_step_compiles_without_spills(target):
    kernels = in_subprocess(target, "offline_decode:compile_fused")
    assert len(kernels) == 3 and not faults(target, kernels), faults(target, kernels)

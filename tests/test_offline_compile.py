"""Every portable kernel compiles for every target, without spills and within the target's shared memory (no GPU needed)."""

import pytest
from offline import TARGETS, faults, in_subprocess


@pytest.mark.parametrize("target", TARGETS)
def test_portable_forward(target):
    kernels = in_subprocess(target, "offline_portable:compile_all")
    assert {k.name for k in kernels} == {"gate_cumsum_kernel", "intra_kernel", "solve_kernel", "wy_kernel", "scan_kernel"}
    assert faults(target, kernels) == []

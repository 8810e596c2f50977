"""tools/sanitize.py: what it takes for clean."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
sanitize = pytest.importorskip("sanitize")

HAND_OVER = [
    "Error: Race reported between Read access at forward_kernel+0x140 in prefill.py:61",
    "and Write access at forward_kernel+0x11860 in prefill.py:28 [37 hazards]",
]
OURS = [
    "Error: Race reported between Write access at forward_kernel+0x3ce0 in prep.py:139",
    "and Read access at forward_kernel+0x300 in prefill.py:28 [24 hazards]",
]


def test_only_reports_at_the_hand_over_alone_are_known():
    ours, known = sanitize.judged(["COMPUTE-SANITIZER", *HAND_OVER, *OURS, "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"])
    assert ours == [OURS] and known == [HAND_OVER]
    assert sanitize.judged([]) == ([], [])
    assert sanitize.kind(HAND_OVER) == "states"
    assert sanitize.kind([HAND_OVER[1], HAND_OVER[1].replace("Write", "Read")]) == "arguments"


def test_the_files_named_touch_no_shared_memory():
    """A report at a line of these can be nothing but the hand-over."""
    root = Path(__file__).parent.parent
    for line in (root / "openkda" / "hopper" / "prefill.py").read_text().splitlines():
        assert ".load(" not in line and ".store(" not in line and "mbarrier" not in line

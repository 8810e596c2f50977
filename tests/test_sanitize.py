"""tools/sanitize.py: what it takes for clean."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
sanitize = pytest.importorskip("sanitize")

(LINE, *_) = sorted(int(at.partition(":")[2]) for at in sanitize.holding() if at.startswith("prefill.py:"))
HAND_OVER = [
    f"Error: Race reported between Read access at forward_kernel+0x140 in prefill.py:{LINE + 1}",
    f"and Write access at forward_kernel+0x11860 in prefill.py:{LINE} [37 hazards]",
]
OURS = [
    "Error: Race reported between Write access at forward_kernel+0x3ce0 in prep.py:139",
    f"and Read access at forward_kernel+0x300 in prefill.py:{LINE} [24 hazards]",
]


def test_only_reports_at_the_hand_over_alone_are_known():
    ours, known = sanitize.judged(["COMPUTE-SANITIZER", *HAND_OVER, *OURS, "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"])
    assert ours == [OURS] and known == [HAND_OVER]
    assert sanitize.judged([]) == ([], [])
    assert sanitize.kind(HAND_OVER) == "states"
    assert sanitize.kind([HAND_OVER[1], HAND_OVER[1].replace("Write", "Read")]) == "arguments"


def test_the_functions_named_touch_no_shared_memory():
    """A report at a line of these can be nothing but the hand-over."""
    names = []
    for path in (Path(__file__).parent.parent / "openkda" / "hopper").glob("*.py"):
        for function in sanitize.holders(path.read_text()):
            names.append(function.name)
            own = ast.unparse(function).replace("gl.load(", "").replace("gl.store(", "")
            assert ".load(" not in own and ".store(" not in own and "mbarrier" not in own, function.name
    assert sorted(names) == ["forward_kernel", "forward_walk_kernel", "reverse_walk_kernel", "run_roles", "state_kernel"]

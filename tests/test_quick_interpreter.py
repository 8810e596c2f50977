"""What conftest.py makes of Triton's interpreter gives the interpreter's own bits."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import hashlib, sys
if sys.argv[1:] == ["quick"]:
    import quick_interpreter
    quick_interpreter.install()
import torch
from openkda import chunk_kda
from openkda.testing import gradients, make_case
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    case = make_case("mixed", lengths=(3, 1), H=1, K=16, bounded=False, dtype=dtype)
    for x in (*chunk_kda(**case.args, backend="portable"), *gradients(case, backend="portable").values()):
        digest.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def digest(*arguments: str) -> str:
    here = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_same_bits():
    assert digest("quick") == digest()

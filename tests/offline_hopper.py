"""What the offline compilation test compiles of the Hopper forward: every kernel that dispatch can choose for a bounded gate."""

import torch
from offline import CAPABILITY

from openkda.hopper import launch, runtime
from openkda.hopper.config import choose
from openkda.testing import make_case

SHAPES = (dict(T=128, H=8), dict(T=8192, H=8), dict(T=512, H=96), dict(T=64, H=200), dict(T=8192, H=40))


class Forgetful(dict):
    """Keeps nothing, so that every launch goes through Triton, which compiles; a kept kernel would be run."""

    def __setitem__(self, key: object, value: object) -> None:
        return None


def compile_hopper(target: str) -> None:
    """One call per kind of Config; sizes come from the problem, the tensors stay small."""
    runtime._compiled = Forgetful()
    for shape in SHAPES:
        small = {**shape, "T": 64}
        problem, inputs = make_case("init", K=128, dtype=torch.bfloat16, state_v_first=True, **small).described()
        config = choose(problem.replace(device_type="cuda", capability=CAPABILITY[target], **shape, HV=shape["H"]))
        launch.forward(problem, inputs, config)

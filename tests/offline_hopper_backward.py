"""What the offline compilation test compiles of the Hopper gradients."""

import torch
from offline import CAPABILITY

from openkda.autograd import TENSORS
from openkda.hopper.backward_config import Scans
from openkda.hopper.gradients import script
from openkda.testing import make_case

WHOLE = Scans()
PROBLEMS = {
    "all options": dict(),
    "gate computed outside, ragged, grouped": dict(raw=False, qk_l2norm=False, lengths=(70, 3), H=1, HV=2, state_v_first=True),
    "64 channels": dict(K=64, V=64, initial_state=False),
    "softplus": dict(bounded=False),
    "parameters in bf16": dict(parameters=torch.bfloat16),
    "unbounded gate computed outside": dict(bounded=False, raw=False, qk_l2norm=False, lengths=(70, 3), H=1, HV=2, V=64),
}

SCANS = ("table_kernel", "tails_kernel", "summaries_kernel", "combine_kernel", "scans_kernel")
HALF = {"all options": dict(), "softplus, grouped": dict(bounded=False, H=1, HV=2, initial_state=False), "64 channels": dict(K=64, V=64)}


def compile_half(target: str) -> None:
    """float16, in one piece, and the first of them cut."""
    half = {name: dict(dtype=torch.float16) | options for name, options in HALF.items()}
    compile_gradients(target, problems=half)
    compile_gradients(target, Scans(1, 1), {"all options": half["all options"]})


def compile_segments(target: str) -> None:
    """The scans with sequences cut into segments."""
    compile_gradients(target, Scans(1, 1), kernels=SCANS)


def compile_walks(target: str) -> None:
    """A forward that keeps and its gradients, side by side and one after the other."""
    heads = {"32 heads": dict(H=32)}
    for scans, names in ((Scans(walks=True, beside=True), ("all options", "64 channels", *heads)), (Scans(walks=True), ("softplus",))):
        for part in ("forward", "rest"):
            compile_gradients(target, scans, {name: (PROBLEMS | heads)[name] for name in names}, part)


def compile_gradients(
    target: str, scans: Scans = WHOLE, problems: dict[str, dict[str, object]] = PROBLEMS, part: str = "all",
    kernels: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Compile the gradients of every problem, or a part of them, or these kernels alone. `parameters`: the dtype of A_log and dt_bias."""
    for options in problems.values():
        options = dict(options)
        dtype = options.pop("parameters", torch.float32)
        problem, inputs = make_case("random", **{**dict(T=73, H=2, K=128, V=128, dtype=torch.bfloat16), **options}).described()
        problem = problem.replace(device_type="cuda", capability=CAPABILITY[target])
        needs = tuple(getattr(inputs, name) is not None for name in TENSORS)
        kinds = tuple(None if x is None else dtype for x in (inputs.A_log, inputs.dt_bias))
        kinds += (None if inputs.cu_seqlens is None else inputs.cu_seqlens.dtype,)
        for launch in script(problem, needs, scans, None, kinds, problem.state_dtype, False, part).launches:
            if not kernels or launch.kernel.rpartition(".")[2] in kernels:
                launch.compile()

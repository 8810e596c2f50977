"""Times every way the Hopper forward can cut a call, per shape and gate regime: the measurements behind the thresholds of
openkda/hopper/config.py. Needs a GPU of compute capability 9.0.

python tools/tune_hopper.py T8192_H64 T1024_H4 --steps 4 8 32 128
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from openkda.benchmarking import GPU_SHAPES, Shape
from openkda.hopper import config as forms
from openkda.hopper import launch
from openkda.hopper.config import Config, base_tiles, choose
from openkda.problem import Problem
from openkda.testing import make_case
from openkda.timing import eager_ms, graph_ms

BLOCKS = {"full": forms.FULL, "half": forms.HALF}


def configurations(problem: Problem, steps: list[int]) -> Iterator[tuple[str, Config]]:
    """(name, Config): each block shape unsplit, and each cut of `steps` with summaries, or with unsplit sequences behind the tails, of a
    pass or of the segments themselves."""
    state = base_tiles(problem, forms.PAIRS, outputs=False, split="state", pdl=True)
    for name, block in BLOCKS.items():
        yield name, Config(base_tiles(problem, block))
        for length in steps:
            tail = max(1, min(forms.TAIL, length // 4))
            yield f"{name}/{length} summaries", Config(base_tiles(problem, block, split="segments", pdl=True), length, tail, state)
            whole = base_tiles(problem, forms.HALF, split="whole", pdl=True)
            yield f"{name}/{length} whole", Config(base_tiles(problem, block, split="segments_all", pdl=True), length, tail, state, whole)
    for length in steps:
        whole = base_tiles(problem, forms.HALF, split="whole", pdl=True)
        yield f"own tails/{length}", Config(base_tiles(problem, forms.FULL, split="tails", pdl=True), length, 1, None, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(GPU_SHAPES), help="names as in openkda bench")
    parser.add_argument("--regimes", nargs="+", default=["random", "init"])
    parser.add_argument("--steps", nargs="+", type=int, default=[4, 8, 16, 32, 64, 128], help="steps of 32 tokens in a segment")
    arguments = parser.parse_args()
    for name in arguments.shapes:
        shape = Shape.parse(name)
        lengths = shape.lengths if len(shape.lengths) > 1 else None
        for regime in arguments.regimes:
            case = make_case(
                regime, T=sum(shape.lengths), lengths=lengths, H=shape.H, HV=shape.HV, K=shape.D, dtype=torch.bfloat16, state_v_first=True,
                device="cuda",
            )  # fmt: skip
            problem, inputs = case.described()
            times = {}
            for label, config in (("chosen", choose(problem, max(shape.lengths))), *configurations(problem, arguments.steps)):
                call = lambda config=config: launch.forward(problem, inputs, config)  # noqa: B023 (called before the next case)
                call()
                times[label] = graph_ms([call], eager_ms(call, inputs.q.device, calls=3, repeats=1))
            best = sorted(times, key=times.get)[:4]
            print(
                f"{name} {regime}: chosen {times['chosen'] * 1e3:.1f} us; " + "; ".join(f"{n} {times[n] * 1e3:.1f}" for n in best),
                flush=True,
            )


if __name__ == "__main__":
    main()

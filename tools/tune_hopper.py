"""Measures what the choice of launches of the Hopper forward (openkda/hopper/config.py) rests on. Needs a GPU of compute capability 9.0.

python tools/tune_hopper.py costs                                       the numbers of `Costs`, by gate form
python tools/tune_hopper.py T8192_H64 T1024_H4 --steps 4 8 32 128       every way to cut a call, per shape and gate regime
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from openkda.benchmarking import GPU_SHAPES, Shape, make_cases
from openkda.hopper import config as forms
from openkda.hopper import driver, launch
from openkda.hopper.config import COSTS, Config, Costs, Cut, choose, config_of
from openkda.problem import Inputs, Problem
from openkda.timing import eager_ms, graph_ms


def case(name: str, regime: str, gate: str) -> tuple[Problem, Inputs]:
    """A call of the benchmark."""
    return make_cases(Shape.parse(name), [(gate, regime)], torch.device("cuda", torch.cuda.current_device()))[0].described()


def config(problem: Problem, how: str, shape: str = "half", steps: int = 0, tail: int = 0) -> Config:
    """The launches of a way to run a call."""
    return config_of(problem, Cut(how, shape, steps, tail), (0.0, 0.0))


def stages(problem: Problem, inputs: Inputs, chosen: Config) -> list[float]:
    """Microseconds of each launch of a call, run by itself on what the call left behind."""
    p, x = problem, inputs
    kinds = (x.A_log.dtype, x.dt_bias.dtype, None if x.cu_seqlens is None else x.cu_seqlens.dtype)
    plan = launch.plan(p, chosen, None, kinds, x.q.device)
    o, final = torch.empty_like(x.v), torch.empty(p.state_shape, device=x.q.device)
    work = None if plan.work is None else torch.empty_like(plan.work, memory_format=torch.contiguous_format)
    tensors = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens, o, final, plan.tables, work, None)
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    device = x.q.device.index

    def run(number: int) -> None:
        one = plan.program.ready[number].bind(addresses, torch._C._cuda_getCurrentRawStream(device))
        driver.launch([one], device)

    numbers = range(len(plan.program.ready))
    for number in numbers:
        run(number)
    return [1e3 * graph_ms([partial(run, number)], 0.1) for number in numbers]


def line(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """(slope, value at 0) through two points"""
    slope = (b[1] - a[1]) / (b[0] - a[0])
    return slope, a[1] - slope * a[0]


def costs(gate: str) -> Costs:
    """Measured on calls that fill the chip with blocks of one kind; the rest (turn, overlap) as in use."""
    points: dict[str, list[tuple[float, float]]] = {}
    add = lambda name, steps, time: points.setdefault(name, []).append((steps, time))
    for tokens in (1024, 4096):
        for shape, heads in (("full", 128), ("half", 64)):
            p, x = case(f"T{tokens}_H{heads}", "init", gate)
            add(shape, tokens / 32, stages(p, x, config(p, "unsplit", shape))[0])
    for tokens, heads, steps, tail in ((1024, 4, 1, 2), (2048, 8, 4, 4)):
        p, x = case(f"T{tokens}_H{heads}", "random", gate)
        add("own", steps + tail / 2, stages(p, x, config(p, "tails", "half", steps, tail))[0])
    for tokens in (2048, 8192):
        p, x = case(f"T{tokens}_H16", "init", gate)
        steps = tokens // 256
        tails, summaries, chain, forward = stages(p, x, config(p, "summaries", "full", steps, 4))
        add("tails", 2, tails), add("state", steps, summaries), add("entry", steps, forward), add("chain", 7, chain)
    p, x = case("T8192_H8", "init", gate)
    add("chain", 15, stages(p, x, config(p, "summaries", "full", 16, 4))[2])
    p, x = case("T8192_H32", "init", gate)
    late = Config(forms.base_tiles(p, forms.HALF, split="lanes"), lanes=(1008,))  # 252 steps through the state alone, then 4
    quiet = stages(p, x, late)[0]
    p, x = case("T8192_H16", "random", gate)
    idle = stages(p, x, config(p, "summaries", "full", 32, 4))[1]
    (full, start), (half, half_start), (own, own_start), (state, summary_start), (_, entry_start), (link, _) = (
        line(found[0], found[-1]) for found in (points[n] for n in ("full", "half", "own", "state", "entry", "chain"))
    )
    return replace(
        COSTS["product" if p.bounded else "halves"],
        full=full, half=half, own=own, state=state, start=start, half_start=half_start, own_start=own_start, entry_start=entry_start,
        tail_start=points["tails"][-1][1] - 2 * state, summary_start=summary_start, idle=idle, link=link,
        quiet=(quiet - half_start - 4 * half) / (252 * half),
    )  # fmt: skip


def ways(problem: Problem, steps: list[int]) -> Iterator[tuple[str, Config]]:
    """(name, Config): each block shape unsplit, and each cut."""
    for shape in ("full", "half"):
        yield shape, config(problem, "unsplit", shape)
    for length in steps:
        tail = min(forms.TAIL, 2 * length)
        yield f"{length} summaries", config(problem, "summaries", "full", length, tail)
        for shape in ("full", "half"):
            yield f"{length} whole, {shape}", config(problem, "whole", shape, length, tail)
            if 2 * length + tail <= forms.own_tail_blocks(forms.base_tiles(problem, forms.FULL, split="tails")):
                yield f"{length} own tails, {shape}", config(problem, "tails", shape, length, tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(GPU_SHAPES), help="'costs', or names as in openkda bench")
    parser.add_argument("--regimes", nargs="+", default=["random", "init"])
    parser.add_argument("--gates", nargs="+", choices=("bounded", "softplus"), default=["bounded"])
    parser.add_argument("--steps", nargs="+", type=int, default=[4, 8, 16, 32, 64, 128], help="steps of 32 tokens in a segment")
    arguments = parser.parse_args()
    if arguments.shapes == ["costs"]:
        for gate, form in (("bounded", "product"), ("softplus", "halves")):
            if gate in arguments.gates:
                print(form, "measured", costs(gate), "in use", COSTS[form], sep="\n  ", flush=True)
        return
    for name in arguments.shapes:
        lengths = Shape.parse(name).lengths
        for gate in arguments.gates:
            for regime in arguments.regimes:
                problem, inputs = case(name, regime, gate)
                times = {}
                for label, one in (("chosen", choose(problem, lengths if problem.varlen else None)), *ways(problem, arguments.steps)):
                    call = lambda one=one: launch.forward(problem, inputs, one)  # noqa: B023 (called before the next case)
                    call()
                    times[label] = graph_ms([call], eager_ms(call, inputs.q.device, calls=3, repeats=1))
                best = sorted(times, key=times.get)[:4]
                others = "; ".join(f"{n} {times[n] * 1e3:.1f}" for n in best)
                print(f"{name} {gate} {regime}: chosen {times['chosen'] * 1e3:.1f} us; {others}", flush=True)


if __name__ == "__main__":
    main()

"""What the tests of the Hopper forward on a GPU share: its cases, and ways to run them whatever `choose` says."""

from dataclasses import replace

import torch

from openkda.hopper import config
from openkda.hopper.config import TAIL, Config, base_tiles, own_tail_blocks, own_tail_tiles
from openkda.testing import make_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 33, 530, 1, 64)
SPLIT = ["summaries", "whole", "tails"]  # ways of cutting sequences
LANES = (0, 700)  # where the lanes of what runs unsplit begin, of 1024


def case(regime="init", **kw):
    return make_case(regime, **{**dict(H=2, K=128, dtype=BF16, state_v_first=True, device="cuda"), **kw})


def split_config(problem, how, steps=4, tail=TAIL, lanes=LANES):
    """A Config that cuts sequences as asked whatever their number; segments with their own tails are no longer than the ring allows."""
    if how == "lanes":
        return Config(base_tiles(problem, config.HALF, split="lanes"), lanes=lanes)
    if how == "full":
        return Config(base_tiles(problem, config.FULL))
    if how == "half":
        return Config(base_tiles(problem, config.HALF))
    if how == "apart":  # V in two, every block preparing for itself
        return Config(replace(base_tiles(problem, config.HALF, split="turns"), split="none"))
    if how.startswith("turns"):
        return Config(base_tiles(problem, config.HALF if how == "turns half" else config.FULL, split="turns"))
    if how == "tails":
        steps = min(steps, (own_tail_blocks(base_tiles(problem, config.FULL, split="tails")) - tail) // 2)
        first = own_tail_tiles(problem, 2 * steps + tail)
        return Config(first, steps, tail, None, base_tiles(problem, config.HALF, split="rest"), lanes=lanes)
    tail = min(tail, 2 * steps)
    if how == "summaries":
        state = base_tiles(problem, config.PAIRS, outputs=False, split="state")
        return Config(base_tiles(problem, config.FULL, split="segments"), steps, tail, state)
    state = base_tiles(problem, config.PAIRS, outputs=False, split="state")
    whole = base_tiles(problem, config.HALF, split="whole")
    return Config(base_tiles(problem, config.FULL, split="segments_all"), steps, tail, state, whole, lanes=lanes)

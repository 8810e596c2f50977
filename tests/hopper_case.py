"""What the tests of the Hopper forward on a GPU share: its cases, and ways to run them whatever `choose` says."""

import torch

from openkda.hopper import config
from openkda.hopper.config import Config, base_tiles
from openkda.testing import make_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 33, 530, 1, 64)
SPLIT = ["summaries", "whole", "tails"]  # ways of cutting sequences


def case(regime="init", **kw):
    return make_case(regime, **{**dict(H=2, K=128, dtype=BF16, state_v_first=True, device="cuda"), **kw})


def split_config(problem, how, steps=4):
    """A Config that cuts sequences as asked whatever their number."""
    if how == "full":
        return Config(base_tiles(problem, config.FULL))
    if how == "half":
        return Config(base_tiles(problem, config.HALF))
    if how.startswith("turns"):
        return Config(base_tiles(problem, config.HALF if how == "turns half" else config.FULL, split="turns"))
    state = base_tiles(problem, config.PAIRS, outputs=False, split="state")
    if how == "tails":
        first = base_tiles(problem, config.FULL, split="tails")
        return Config(first, steps, min(2, steps), None, base_tiles(problem, config.HALF, split="whole"))
    if how == "summaries":
        return Config(base_tiles(problem, config.FULL, split="segments"), steps, min(2, steps), state)
    whole = base_tiles(problem, config.HALF, split="whole")
    return Config(base_tiles(problem, config.FULL, split="segments_all"), steps, min(2, steps), state, whole)

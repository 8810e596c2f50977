"""Gate statistics of a trained KDA layer: the `trained` regime of openkda/testing.py.

The numbers come from the layer recorded in examples/data/kda_layer.safetensors and are refreshed by tools/record_gate_statistics.py.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

import torch


@cache
def trained_gate_statistics() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A_log [HV], and the mean (bias included) and the standard deviation over tokens of the gate logits [HV, K], fp32."""
    statistics = json.loads(files("openkda").joinpath("data", "trained_gate.json").read_text())
    A_log, mean, spread = (torch.tensor(statistics[name], dtype=torch.float32) for name in ("A_log", "mean", "spread"))
    return A_log, mean, spread

"""Kimi Delta Attention: kernels, reference, layer and model."""

import sys

# `python -m openkda` comes here before it reads __main__.py
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] in (["openkda"], ["-mopenkda"]):
    from openkda_command import watch

    watch()

from openkda.ops import chunk_kda, fused_kda_gate, fused_recurrent_kda
from openkda.reference import naive_chunk_kda, naive_recurrent_kda
from openkda.serving import kda_decode
from openkda.serving_prefill import Checkpoints, kda_prefill
from openkda.serving_step import kda_fused_decode

__version__ = "0.1.0"
__all__ = [
    "Checkpoints",
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "kda_decode",
    "kda_fused_decode",
    "kda_prefill",
    "naive_chunk_kda",
    "naive_recurrent_kda",
]

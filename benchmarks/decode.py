"""Decoding against a state pool: time, bandwidth beside a plain copy kernel in the same run, host cost, the fused step beside its parts.

    python benchmarks/decode.py --json benchmarks/results

One token per sequence, H = HV = 32, K = V = 128, bf16 inputs, bounded gate, everything inside the call. GPU times are CUDA-graph replays
on one pool; a pool of N = 16 or less stays in the L2 cache of an H200. Bytes are the states read plus written, nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

import openkda
from openkda import kda_decode, kda_fused_decode
from openkda.portable.copy import TILES, copy
from openkda.testing import gate_logits
from openkda.timing import eager_ms, graph_ms, host_us

H, K, V, W = 32, 128, 128, 4
SEQUENCES = (1, 16, 64, 256)


def tensors(N: int, state_dtype: torch.dtype, v_first: bool) -> dict[str, object]:
    """Arguments of one kda_decode call, a slot per sequence."""
    gen = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=gen).to("cuda", torch.bfloat16)
    logits, A_log, dt_bias = gate_logits("init", N, H, K, bounded=True, generator=gen)
    return dict(
        q=draw(N, 1, H, K), k=draw(N, 1, H, K), v=draw(N, 1, H, V), gate=logits.view(N, 1, H, K).to("cuda", torch.bfloat16),
        beta=draw(N, 1, H), A_log=A_log.cuda(), dt_bias=dt_bias.cuda(), lower_bound=-5.0, state_v_first=v_first,
        state_pool=torch.zeros(N, H, V, K, dtype=state_dtype, device="cuda"),
        state_indices=torch.arange(N, dtype=torch.int32, device="cuda"), out=draw(N, 1, H, V),
    )  # fmt: skip


def graph_us(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    return 1e3 * graph_ms([call], eager_ms(call, torch.device("cuda")))


def timed(what: str, call: Callable[[], object], state_bytes: int | None = None, **labels: object) -> dict[str, object]:
    """One row: graph time, host time, and the bandwidth of the states read and written."""
    us = graph_us(call)
    rate = {} if state_bytes is None else {"TBps": 2e-6 * state_bytes / us}
    return dict(what=what, **labels, us=us, **rate, host_us=host_us(call))


def copy_row(N: int) -> dict[str, object]:
    """The best tile of a plain copy kernel on buffers of N fp32 states."""
    x = torch.zeros(N * H * K * V, dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    return min((timed("copy", partial(copy, x, y, *tile), x.nbytes, N=N) for tile in TILES), key=lambda row: row["us"])


def decode_row(N: int, state_dtype: torch.dtype, v_first: bool) -> dict[str, object]:
    args = tensors(N, state_dtype, v_first)
    call = lambda: kda_decode(**args)
    return timed("kda_decode", call, args["state_pool"].nbytes, N=N, state=str(state_dtype)[6:], v_first=v_first)


def fused_rows(N: int) -> list[dict[str, object]]:
    """The fused step, and the same by torch operations for convolution and norm with kda_decode between them."""
    C = 2 * H * K + H * V
    weight, norm = torch.randn(C, W, device="cuda", dtype=torch.bfloat16), torch.ones(V, device="cuda")
    args = tensors(N, torch.float32, True)
    z = torch.randn(N, 1, H, V, device="cuda", dtype=torch.bfloat16)
    windows = torch.zeros(N, C, W - 1, device="cuda", dtype=torch.bfloat16)
    x = torch.cat([args[n].flatten(1) for n in ("q", "k", "v")], 1)

    def parts() -> torch.Tensor:
        taps = torch.cat([windows, x[..., None]], -1)
        windows.copy_(taps[..., 1:])
        y = F.silu((taps * weight).sum(-1)).split([H * K, H * K, H * V], 1)
        q, k, v = (t.view(N, 1, H, -1) for t in y)
        o = kda_decode(**{**args, "q": q, "k": k, "v": v})
        return F.rms_norm(o, (V,), norm.to(o.dtype), 1e-5) * torch.sigmoid(z)

    fused = lambda: kda_fused_decode(output_gate=z, conv_weight=weight, norm_weight=norm, conv_pool=windows, **args)
    size = args["state_pool"].nbytes
    return [timed("fused step", fused, size, N=N), timed("torch conv, kda_decode, torch norm", parts, size, N=N)]


def fla_row(N: int, v_first: bool) -> dict[str, object]:
    """fla's token-by-token function; it returns the state instead of updating a pool."""
    from fla.ops.kda import fused_recurrent_kda

    a = tensors(N, torch.float32, v_first)

    @torch.inference_mode()
    def call() -> object:
        return fused_recurrent_kda(
            a["q"], a["k"], a["v"], a["gate"], a["beta"], A_log=a["A_log"], dt_bias=a["dt_bias"].flatten(), initial_state=a["state_pool"],
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0, state_v_first=v_first,
        )  # fmt: skip

    return timed("fla", call, a["state_pool"].nbytes, N=N, v_first=v_first)


def rows() -> Iterator[dict[str, object]]:
    yield from (copy_row(N) for N in SEQUENCES)
    for state_dtype, v_first in product((torch.float32, torch.bfloat16), (True, False)):
        yield from (decode_row(N, state_dtype, v_first) for N in SEQUENCES)
    for N in SEQUENCES:
        yield from fused_rows(N)
    if importlib.util.find_spec("fla") is not None:
        yield from (fla_row(N, v_first) for v_first in (True, False) for N in SEQUENCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="folder for a dated result file")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = dict(
        date=datetime.date.today().isoformat(), command=" ".join(["python", *sys.argv]), commit=commit or None,
        device=torch.cuda.get_device_name(), python=platform.python_version(), torch=torch.__version__, triton=triton.__version__,
        openkda=openkda.__version__, rows=[],
    )  # fmt: skip
    for row in rows():
        report["rows"].append(row)
        print(" ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        if options.json:  # after every row: a run that is cut short keeps what it measured
            (options.json / f"{report['date']}-decode.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Other implementations of KDA that may be installed beside this one, called on the same tensors for comparison.

A peer says whether it is installed (`version`), whether it serves a call (`why_not`), and gives a function of no arguments that runs it
(`bind`). Nothing here is imported unless a benchmark asks for it, and openkda depends on none of them.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from openkda.problem import Problem
from openkda.reference import activate_gate, l2norm

Args = dict[str, object]  # keyword arguments of chunk_kda
Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # runs once: o (any view of [B, T, HV, V]), final state [N, HV, V, K]


@dataclass(frozen=True)
class Training:
    """A differentiable forward and the tensors it is differentiated by."""

    forward: Callable[[], torch.Tensor]  # o, any view of [B, T, HV, V]
    leaves: Args  # name -> tensor that requires a gradient
    raw: bool = True  # False: q, k, gate and beta were normalised and activated outside, so their gradients are of other quantities


@dataclass(frozen=True)
class Peer:
    """One foreign implementation."""

    name: str
    package: str  # distribution that holds it
    what: str  # one line for tables and documents
    why_not: Callable[[Problem], str | None]  # None, or one sentence
    bind: Callable[[Args], Call]
    train: Callable[[Args, Args], Training] | None = None  # (arguments, leaves among them)

    @property
    def version(self) -> str | None:
        """Installed version, None when it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def _why_not_common(name: str, problem: Problem) -> str | None:
    if problem.device_type != "cuda":
        return f"{name} runs on CUDA devices only"
    if not (problem.qk_l2norm and problem.beta_sigmoid and problem.gate != "none" and problem.state_v_first):
        return f"{name} is compared on raw inputs (l2norm, gate and sigmoid inside) with V-first states only"
    return None


def _fla_why_not(problem: Problem) -> str | None:
    return _why_not_common("fla", problem)


def _fla_bind(args: Args) -> Call:
    os.environ["FLA_FLASH_KDA"] = "0"  # fla's own kernels; FlashKDA is a peer by itself
    from fla.ops.kda import chunk_kda

    args = dict(args, dt_bias=args["dt_bias"].flatten(), safe_gate=args.get("lower_bound") is not None)
    return lambda: chunk_kda(**args)


def _fla_train(args: Args, leaves: Args) -> Training:
    os.environ["FLA_FLASH_KDA"] = "0"
    from fla.ops.kda import chunk_kda

    leaves = leaves | dict(dt_bias=leaves["dt_bias"].detach().flatten().requires_grad_())
    args = args | leaves | dict(safe_gate=args.get("lower_bound") is not None)
    return Training(lambda: chunk_kda(**args)[0], leaves)


def _cudnn_why_not(problem: Problem) -> str | None:
    if problem.gate == "softplus":
        return "cudnn has no softplus gate inside its kernels"
    return _why_not_common("cudnn", problem)


def _cudnn_table(args: Args) -> torch.Tensor:
    """Sequence bounds [N + 1] int32, which cuDNN wants for a fixed batch too."""
    B, T = args["q"].shape[:2]
    cu = args.get("cu_seqlens")
    return (torch.arange(B + 1, device=args["q"].device) * T if cu is None else cu).to(torch.int32)


def _cudnn_bind(gate_dtype: torch.dtype | None) -> Callable[[Args], Call]:
    """gate_dtype: dtype that g and beta are handed over in, converted before the clock starts; None keeps the caller's."""

    def bind(args: Args) -> Call:
        from cudnn.linear_attention.ops.kda import kimi_delta_attention

        q, k, v, g, beta = (args[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
        if gate_dtype is not None:
            g, beta = g.to(gate_dtype), beta.to(gate_dtype)
        options = dict(
            cu_seqlens=_cudnn_table(args), initial_state=args["initial_state"], output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=True, gate_lower_bound=args["lower_bound"], a_log=args["A_log"],
            dt_bias=args["dt_bias"],
        )  # fmt: skip

        return lambda: kimi_delta_attention(q, k, v, g, beta, **options)[:2]

    return bind


@torch.no_grad()
def _cudnn_train(args: Args, leaves: Args) -> Training:
    """cuDNN differentiates its plain form alone: normalisation, gate and sigmoid happen here, before the clock starts."""
    from cudnn.linear_attention.ops.kda import kimi_delta_attention

    fp32 = {name: x.detach().flatten(0, 1).float() for name, x in leaves.items() if name in ("q", "k", "g", "beta")}
    plain = dict(
        q=l2norm(fp32["q"]).to(args["q"].dtype), k=l2norm(fp32["k"]).to(args["k"].dtype), v=leaves["v"].detach().flatten(0, 1),
        g=activate_gate(fp32["g"], args["A_log"], args["dt_bias"], args["lower_bound"]), beta=torch.sigmoid(fp32["beta"]),
    )  # fmt: skip
    plain = {name: x.requires_grad_() for name, x in plain.items()}
    table = _cudnn_table(args)
    return Training(lambda: kimi_delta_attention(*plain.values(), table, output_final_state=True)[0], plain, raw=False)


def _flash_kda_why_not(problem: Problem) -> str | None:
    if problem.gate == "softplus":
        return "flash_kda has the bounded gate only"
    if problem.dtype != torch.bfloat16 or (problem.K, problem.V) != (128, 128) or problem.H != problem.HV:
        return "flash_kda serves bf16, K = V = 128 and equal head counts only"
    return _why_not_common("flash_kda", problem)


def _flash_kda_bind(args: Args) -> Call:
    import flash_kda

    q, v, cu = args["q"], args["v"], args.get("cu_seqlens")
    scale = q.shape[-1] ** -0.5
    options = dict(A_log=args["A_log"], dt_bias=args["dt_bias"], lower_bound=args["lower_bound"], initial_state=args["initial_state"],
                   cu_seqlens=None if cu is None else cu.to(torch.int64))  # fmt: skip

    def call():
        o, final = torch.empty_like(v), torch.empty_like(args["initial_state"])
        flash_kda.fwd(q, args["k"], v, args["g"], args["beta"], scale, o, final_state=final, **options)
        return o, final

    return call


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fla", "fla-core", "flash-linear-attention, Triton; tunes itself for every head count", _fla_why_not, _fla_bind, _fla_train),
        Peer("cudnn", "nvidia-cudnn-frontend", "cuDNN frontend on the very same tensors", _cudnn_why_not, _cudnn_bind(None)),
        Peer(
            "cudnn_fp32", "nvidia-cudnn-frontend", "cuDNN frontend with gate and beta handed over in fp32, as its kernel reads them",
            _cudnn_why_not, _cudnn_bind(torch.float32), _cudnn_train,
        ),
        Peer("flash_kda", "flash-kda", "FlashKDA, CUTLASS", _flash_kda_why_not, _flash_kda_bind),
    )
}  # fmt: skip


def installed() -> list[Peer]:
    """The peers that are installed here."""
    return [peer for peer in PEERS.values() if peer.version is not None]

"""Inputs, gate regimes and comparisons: used by the tests, the benchmarks, `openkda check`, and by users who test their own code.

A `Case` holds the keyword arguments of one chunk_kda call. Its oracle is the token recurrence in fp64. A tolerance is earned: an output may
be at most twice as far from the oracle as `twin`, the chunk algorithm in torch with its matrix operands rounded to the inputs' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from itertools import pairwise

import torch

from openkda.autograd import CONSTANTS, TENSORS
from openkda.ops import chunk_kda
from openkda.problem import Inputs, Problem, describe, fail
from openkda.recorded import trained_gate_statistics
from openkda.reference import naive_recurrent_kda, prepare

REGIMES = ("random", "init", "trained", "zero", "extreme", "mixed")
"""Gate regimes. random: standard normal logits, the state is forgotten in a few tens of tokens. init: a layer at its published
initialisation, some channels remember thousands of tokens. trained: per-channel statistics of a recorded trained layer. zero: no decay
at all. extreme: 20 to 1000 nats per token (softplus), or the lower bound itself (bounded). mixed: fast and slow channels side by side."""

ORACLE_PIECE = 64  # tokens between two reports of the oracle's progress


@dataclass
class Case:
    """Keyword arguments of one call, with its oracle. Build one with `make_case`."""

    args: dict[str, object]
    regime: str
    lengths: tuple[int, ...] | None = field(default=None)

    @property
    def arguments(self) -> dict[str, object]:
        """Those of `describe`."""
        defaults = dict.fromkeys(("A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu", "scale", "lower_bound"))
        defaults |= dict.fromkeys(
            ("use_gate_in_kernel", "safe_gate", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
             "output_final_state", "return_intermediate_states", "state_v_first"), False,
        )  # fmt: skip
        known = signature(describe).parameters  # the rest, such as backend, says how to run the call, not what it computes
        return {**defaults, "chunk_size": 64, **{name: value for name, value in self.args.items() if name in known}}

    def described(self) -> tuple[Problem, Inputs]:
        """The call as backends see it."""
        return describe(**self.arguments)

    @cached_property
    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o [B, T, HV, V] and the final states [N, HV, K, V] (V-first as asked) in fp64."""
        return oracle(*self.described())

    @cached_property
    def twin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in torch at the inputs' precision: what a kernel's error is measured against."""
        return rounded_chunk(*self.described())


def gate_logits(
    regime: str, T: int, HV: int, K: int, *, bounded: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate logits [T, HV, K], A_log [HV], dt_bias [HV, K] of a regime, fp32 on the generator's device."""
    at = dict(device=generator.device)
    rand = lambda *shape: torch.rand(*shape, generator=generator, **at)
    randn = lambda *shape: torch.randn(*shape, generator=generator, **at)
    slow = torch.exp(rand(HV, K) * math.log(100.0) + math.log(1e-3)).clamp(min=1e-4)  # published initialisation of the time step
    slow_bias = slow + torch.log(-torch.expm1(-slow))  # inverse softplus
    zeros = torch.zeros(HV, **at)
    if regime == "random":
        return randn(T, HV, K), rand(HV), rand(HV, K)
    if regime == "init":
        return 0.5 * randn(T, HV, K), zeros, slow_bias
    if regime == "zero":
        return torch.full((T, HV, K), -1e4, **at), zeros, torch.zeros(HV, K, **at)
    if regime == "extreme":
        if bounded:
            return randn(T, HV, K), zeros, torch.full((HV, K), 20.0, **at)
        spike = torch.where(rand(T, HV, 1) < 0.1, 1000.0, 50.0)
        return 20.0 + rand(T, HV, K) * (spike - 20.0), zeros, torch.zeros(HV, K, **at)
    if regime == "mixed":
        fast = torch.arange(K, **at) % 2 == 0
        return randn(T, HV, K), zeros, torch.where(fast, 20.0 if bounded else 50.0, slow_bias)
    if regime == "trained":
        A_log, mean, spread = (x.to(generator.device) for x in trained_gate_statistics())
        heads = torch.arange(HV, **at) % A_log.shape[0]
        channels = torch.arange(K, **at) % mean.shape[1]
        return spread[heads][:, channels] * randn(T, HV, K), A_log[heads], mean[heads][:, channels]
    raise ValueError(f"regime is {regime!r}; it must be one of " + ", ".join(REGIMES))


def make_case(
    regime: str = "random",
    *,
    B: int = 1,
    T: int = 64,
    H: int = 2,
    HV: int | None = None,
    K: int = 32,
    V: int | None = None,
    lengths: tuple[int, ...] | None = None,
    pad_to: int = 0,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    raw: bool = True,
    bounded: bool = True,
    lower_bound: float = -5.0,
    qk_l2norm: bool = True,
    neg_eigval: bool = False,
    initial_state: bool = True,
    state_v_first: bool = False,
    state_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    scale: float | None = None,
    chunk_size: int | None = None,
    return_intermediate_states: bool = False,
) -> Case:
    """Random inputs of one call. lengths packs sequences of those lengths (B = 1, T = their sum, or pad_to where that is larger).

    raw: g and beta are logits, activated inside; else they are a log decay (with safe_gate when bounded) and a write strength.
    scale, chunk_size, return_intermediate_states: as chunk_kda's, among the arguments only where they differ from the default here.
    ValueError or TypeError for a regime or a size that is none; the other arguments are checked where the case is used."""
    HV, V = H if HV is None else HV, K if V is None else V
    sizes = [("B", B, 0), ("T", T, 0), ("H", H, 1), ("HV", HV, 1), ("K", K, 1), ("V", V, 1), ("pad_to", pad_to, 0)]
    for name, size, least in sizes + [(f"lengths[{n}]", length, 0) for n, length in enumerate(() if lengths is None else lengths)]:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}; it must be an int")
        if size < least:
            raise fail(name, size, f"at least {least}")
    if lengths is not None:
        B, T = 1, max(sum(lengths), pad_to)
    gen = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    q, k, v = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V)
    logits, A_log, dt_bias = gate_logits(regime, B * T, HV, K, bounded=bounded, generator=gen)
    g, beta = logits.view(B, T, HV, K), randn(B, T, HV)
    N = B if lengths is None else len(lengths)
    S0 = randn(N, HV, V, K) if state_v_first else randn(N, HV, K, V)
    args: dict[str, object] = dict(output_final_state=True, state_v_first=state_v_first, use_qk_l2norm_in_kernel=qk_l2norm)
    optional = dict(scale=scale, chunk_size=chunk_size, return_intermediate_states=return_intermediate_states or None)
    args |= {name: value for name, value in optional.items() if value is not None}
    if not qk_l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if bounded:
        args["lower_bound"] = lower_bound
    if raw:
        args.update(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg_eigval)
        args.update(A_log=A_log.to(device), dt_bias=dt_bias.to(device))
    else:
        activated = prepare(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, gate="bounded" if bounded else "softplus", lower_bound=lower_bound,
            qk_l2norm=False, beta_sigmoid=True, neg_eigval=neg_eigval,
        )  # fmt: skip
        g, beta = activated[3:]
        args["safe_gate"] = bounded
    args.update(q=q.to(device, dtype), k=k.to(device, dtype), v=v.to(device, dtype))
    args.update(g=g.to(device, gate_dtype or dtype), beta=beta.to(device, beta_dtype or dtype))
    if initial_state:
        args["initial_state"] = (0.1 * S0).to(device, state_dtype)
    if lengths is not None:
        args["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0], device=device)
    return Case(args, regime, lengths)


def _per_sequence(problem: Problem, inputs: Inputs):
    """(n, rows of the flattened token axis) of every sequence."""
    if not problem.varlen:
        return [(n, slice(n * problem.T, (n + 1) * problem.T)) for n in range(problem.B)]
    cu = inputs.cu_seqlens.tolist()
    return [(n, slice(a, b)) for n, (a, b) in enumerate(pairwise(cu))]


def _prepared(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = prepare(
        *(x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)), A_log=inputs.A_log, dt_bias=inputs.dt_bias,
        gate=problem.gate, lower_bound=problem.lower_bound, qk_l2norm=problem.qk_l2norm, beta_sigmoid=problem.beta_sigmoid,
        neg_eigval=problem.neg_eigval,
    )  # fmt: skip
    return [x.flatten(0, 1) for x in tensors]  # [R, HV, *]


def _entry_state(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    if inputs.initial_state is None:
        return torch.zeros(problem.N, problem.HV, problem.K, problem.V, dtype=dtype, device=inputs.q.device)
    return (inputs.initial_state.mT if problem.state_v_first else inputs.initial_state).to(dtype)


def oracle(problem: Problem, inputs: Inputs, progress: Callable[[int], None] = lambda tokens: None) -> tuple[torch.Tensor, torch.Tensor]:
    """The token recurrence in fp64 on every sequence of a call: o [B, T, HV, V], final states (Problem.state_shape).

    progress is called with the count of tokens done since its last call, after every ORACLE_PIECE tokens or fewer."""
    q, k, v, g, beta = _prepared(problem, inputs, torch.float64)
    S = _entry_state(problem, inputs, torch.float64)
    o = torch.zeros_like(v)
    final = S.clone()
    for n, rows in _per_sequence(problem, inputs):
        Sn = S[n : n + 1]
        for start in range(rows.start, rows.stop, ORACLE_PIECE):
            piece = slice(start, min(start + ORACLE_PIECE, rows.stop))
            on, Sn = naive_recurrent_kda(*(x[None, piece] for x in (q, k, v, g, beta)), problem.scale, Sn, True)
            o[piece] = on[0]
            progress(piece.stop - piece.start)
        final[n] = Sn[0]
    o = o.view(problem.B, problem.T, problem.HV, problem.V)
    return o, final.mT.contiguous() if problem.state_v_first else final


def rounded_chunk(problem: Problem, inputs: Inputs, chunk: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk form with every matrix operand rounded to the inputs' dtype and sums in fp32: the arithmetic of a matrix unit."""
    low = lambda x: x.to(problem.dtype).to(torch.float32)
    q, k, v, g, beta = _prepared(problem, inputs, torch.float32)
    states = _entry_state(problem, inputs, torch.float32)
    o, final = torch.zeros_like(v), states.clone()
    for n, rows in _per_sequence(problem, inputs):
        S = states[n]  # [HV, K, V]
        for start in range(rows.start, rows.stop, chunk):
            at = slice(start, min(start + chunk, rows.stop))
            qc, kc, vc, gc, bc = (x[at].transpose(0, 1) for x in (q, k, v, g, beta[..., None]))  # [HV, C, *]
            G = gc.cumsum(-2)
            keep = torch.ones(G.shape[-2], G.shape[-2], dtype=torch.bool, device=G.device).tril()[..., None]
            decay = (G[:, :, None] - G[:, None]).masked_fill(~keep, float("-inf")).exp()  # [HV, C, C, K]
            Aqk = problem.scale * torch.einsum("hrc,hic,hric->hri", low(qc), low(kc), decay)
            L = (bc * torch.einsum("hrc,hic,hric->hri", low(kc), low(kc), decay)).tril(-1)
            eye = torch.eye(L.shape[-1], device=L.device).expand_as(L)
            Linv = low(torch.linalg.solve_triangular(eye + L, eye, upper=False, unitriangular=True))
            w = low(Linv @ low(bc * G.exp() * kc))
            r = low(Linv @ low(bc * vc) - w @ low(S))
            o[at] = (problem.scale * low(G.exp() * qc) @ low(S) + low(Aqk) @ r).transpose(0, 1)
            S = G[:, -1, :, None].exp() * S + low((G[:, -1:] - G).exp() * kc).mT @ r
        final[n] = S
    o = o.to(problem.dtype).view(problem.B, problem.T, problem.HV, problem.V)
    return o, (final.mT.contiguous() if problem.state_v_first else final).to(problem.state_dtype)


def entry_states(problem: Problem, inputs: Inputs, run: Callable[[Problem, Inputs], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The states before every chunk of Problem.chunk_size tokens, those of all sequences in turn [chunks, HV, K, V] (V first as asked):
    `oracle` or `rounded_chunk` run chunk by chunk, its states kept in its own precision."""
    p = problem.replace(B=1, N=1, varlen=False, state_dtype=torch.float32)
    flat = {name: getattr(inputs, name).flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    found = []
    for n, rows in _per_sequence(problem, inputs):
        given = inputs.initial_state
        S = torch.zeros(1, *p.state_shape[1:], device=inputs.q.device) if given is None else given[n : n + 1]
        for start in range(rows.start, rows.stop, p.chunk_size):
            piece = slice(start, min(start + p.chunk_size, rows.stop))
            found.append(S[0])
            tokens = {name: x[:, piece] for name, x in flat.items()}
            _, S = run(p.replace(T=piece.stop - start), replace(inputs, **tokens, initial_state=S, cu_seqlens=None))
    return torch.stack(found)


def cotangents(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Random gradients of o and final_state, the same for equal sizes."""
    problem, inputs = case.described()
    gen = torch.Generator().manual_seed(7)
    do = torch.randn(inputs.v.shape, generator=gen)
    dfinal = 0.1 * torch.randn(problem.state_shape, generator=gen)
    return do.to(inputs.v), dfinal.to(inputs.v.device, problem.state_dtype)


def leaves(case: Case, wanted: tuple[str, ...] | None = None) -> dict[str, object]:
    """The case's arguments, its floating-point tensors (or those wanted) as fresh leaves."""
    fresh = lambda name, x: x.detach().clone().requires_grad_(wanted is None or name in wanted)
    return {n: fresh(n, x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in case.args.items()}


def gradients(
    case: Case, wanted: tuple[str, ...] | None = None, *, backend: str | None = None, disable_recompute: bool = False
) -> dict[str, torch.Tensor]:
    """Gradients of the case's floating-point arguments (or those wanted) through chunk_kda, for `cotangents`."""
    args = leaves(case, wanted)
    torch.autograd.backward(chunk_kda(**args, backend=backend, disable_recompute=disable_recompute), cotangents(case))
    return {n: x.grad for n, x in args.items() if isinstance(x, torch.Tensor) and x.requires_grad}


def reference_gradients(
    case: Case, forward: Callable[[Problem, Inputs], tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The same by autograd of `oracle` or `rounded_chunk`, on the case's tensors in `dtype` (default: their own)."""
    problem, inputs = case.described()
    tensors = {n: getattr(inputs, n) for n in TENSORS if getattr(inputs, n) is not None}
    tensors = {n: x.detach().to(dtype or x.dtype).clone().requires_grad_() for n, x in tensors.items()}
    absent = dict.fromkeys(set(TENSORS) - set(tensors))
    o, final = forward(problem, Inputs(**tensors, **absent, **{n: getattr(inputs, n) for n in CONSTANTS}))
    do, dfinal = cotangents(case)
    found = torch.autograd.grad([o, final], list(tensors.values()), [do.to(o.dtype), dfinal.to(final.dtype)])
    return dict(zip(tensors, found))


def gradient_triples(case: Case, found: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(name, gradient, fp64 reference, torch twin) of every gradient in `found`, for `assert_close`; A_log's and dt_bias's together."""
    expected, twin = reference_gradients(case, oracle, torch.float64), reference_gradients(case, rounded_chunk)
    K = case.args["k"].shape[-1]
    found, expected, twin = (with_gate_joined({n: x[n] for n in found}, K) for x in (found, expected, twin))
    return [(f"d({n})" if "A_log" in n or "dt_bias" in n else f"d{n}", found[n], expected[n], twin[n]) for n in found]


def with_gate_joined(gradients: dict[str, torch.Tensor], K: int) -> dict[str, torch.Tensor]:
    """Gradients by input, those of A_log and dt_bias as one vector in fp64 under both names.

    A_log's one number per head joins dt_bias, whose sums it is made of: a ratio of errors needs more than a few numbers. It is the sum of K
    channels and its rounding error that of sqrt(K) of them, so it counts K^-0.5: as it is, the luck of a few numbers would decide."""
    shares = {n: share for n, share in (("A_log", K**-0.5), ("dt_bias", 1.0)) if n in gradients}
    result = {n: x for n, x in gradients.items() if n not in shares}
    if shares:
        result[", ".join(shares)] = torch.cat([gradients[n].flatten().double() * share for n, share in shares.items()])
    return result


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """||actual - reference|| / ||reference|| in fp64; infinite where only one of them is finite, 0 for two empty or zero tensors."""
    actual, reference = actual.detach().double().cpu(), reference.detach().double().cpu()
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {list(actual.shape)} and {list(reference.shape)}")
    if not torch.equal(actual.isfinite(), reference.isfinite()):
        return math.inf
    finite = reference.isfinite()
    difference = torch.where(finite, actual - reference, 0.0).norm().item()
    size = torch.where(finite, reference, 0.0).norm().item()
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)


def allowed_error(twin: torch.Tensor, reference: torch.Tensor, factor: float = 2.0) -> float:
    """The relative error that `assert_close` grants: `factor` times the twin's, plus 8 fp32 ulps of rounding."""
    return factor * relative_error(twin, reference) + 8 * torch.finfo(torch.float32).eps


def assert_close(name: str, actual: torch.Tensor, reference: torch.Tensor, twin: torch.Tensor, factor: float = 2.0) -> None:
    """Fails unless `actual` is at most `factor` times as far from the fp64 `reference` as `twin` is (`allowed_error`).

    Distances are relative L2; non-finite values must sit in the same places."""
    error, allowed = relative_error(actual, reference), allowed_error(twin, reference, factor)
    if not error <= allowed:
        raise AssertionError(f"{name}: relative error {error:.3e}, allowed {allowed:.3e} ({factor} times the torch twin's)")

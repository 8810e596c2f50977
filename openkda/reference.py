"""The definition of KDA in plain torch: the token recurrence and the chunk algebra. The oracle of every test, never dispatched to.

One head, one sequence (docs/math.md; Kimi Linear, arXiv 2510.26692, eq. 1):

    D_t = Diag(exp(g_t)) S_{t-1}
    S_t = D_t + beta_t k_t (v_t - k_t^T D_t)^T
    o_t = scale * S_t^T q_t

Computes in fp64 for fp64 inputs and in fp32 otherwise; differentiable in every tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from openkda.problem import check_scale, fail, meta

L2_EPS = 1e-6  # added to the sum of squares


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def activate_gate(g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float | None) -> torch.Tensor:
    """Log decay from gate logits g [..., HV, K]: lower_bound * sigmoid(exp(A_log) (g + dt_bias)), or -exp(A_log) softplus(g + dt_bias).

    A_log [HV] or None (exp(A_log) = 1), dt_bias [HV, K] or None (0), both cast to g's dtype."""
    x = g if dt_bias is None else g + dt_bias.to(g.dtype)
    a = 1.0 if A_log is None else A_log.to(g.dtype).exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(a * x)
    return -a * F.softplus(x, threshold=80.0)  # beyond torch's default threshold of 20 the linear branch is not exact in fp64


def activate_beta(beta: torch.Tensor, beta_sigmoid: bool, neg_eigval: bool) -> torch.Tensor:
    """Write strength from its logit (or itself), times two when negative eigenvalues are allowed."""
    if not beta_sigmoid:
        return beta
    return torch.sigmoid(beta) * (2.0 if neg_eigval else 1.0)


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, gate: str, lower_bound: float | None, qk_l2norm: bool, beta_sigmoid: bool, neg_eigval: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The optional input stages: q, k, v, log decay and beta in the computing dtype, q and k repeated to the value heads."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    if gate != "none":
        g = activate_gate(g, A_log, dt_bias, lower_bound if gate == "bounded" else None)
    group = v.shape[-2] // q.shape[-2]
    if group > 1:
        q, k = (x.repeat_interleave(group, dim=-2) for x in (q, k))
    return q, k, v, g, activate_beta(beta, beta_sigmoid, neg_eigval)


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float | None,
    initial_state: torch.Tensor | None,
) -> None:  # fmt: skip
    """One sentence for tensors that do not fit: torch would broadcast most of them without a word."""
    given = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    for name, t in given.items():
        if meta(name, t, optional=name == "initial_state") and not t.is_floating_point():
            raise fail(f"{name}'s dtype", t.dtype, "a floating-point one")
    for name, t, last in (("q", q, "H, K"), ("v", v, "HV, V")):
        if t.ndim != 4 or min(t.shape[2:]) < 1:
            raise fail(f"{name}'s shape", list(t.shape), f"[B, T, {last}], heads and dimensions at least 1")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if HV % H:
        raise fail("v's head count", HV, f"a multiple of q's head count {H}")
    shapes = dict(k=(B, T, H, K), v=(B, T, HV, V), g=(B, T, HV, K), beta=(B, T, HV), initial_state=(B, HV, K, V))
    for name, shape in shapes.items():
        if given[name] is not None and given[name].shape != shape:
            raise fail(f"{name}'s shape", list(given[name].shape), str(list(shape)))
        if given[name] is not None and given[name].device != q.device:
            raise fail(f"{name}'s device", given[name].device, f"{q.device}, where q is")
    check_scale(scale)


def naive_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence, one token at a time.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K] natural-log decay; beta [B, T, HV]; initial_state [B, HV, K, V]; in any
    floating-point dtypes. scale defaults to K^-0.5. Returns o [B, T, HV, V] in v's dtype and the final state [B, HV, K, V] (fp32, or fp64
    where q is), None unless output_final_state. Computes in fp32, or fp64 where q is. ValueError or TypeError, one sentence, for
    arguments that do not fit."""
    check(q, k, v, g, beta, scale, initial_state)
    dtype = v.dtype
    q, k, v, g, beta = prepare(
        q, k, v, g, beta, A_log=None, dt_bias=None, gate="none", lower_bound=None, qk_l2norm=False, beta_sigmoid=False, neg_eigval=False
    )
    B, T, HV, K = q.shape
    q = q * (K**-0.5 if scale is None else scale)
    S = v.new_zeros(B, HV, K, v.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    decay = g.exp()
    o = []
    for t in range(T):
        S = S * decay[:, t, :, :, None]
        r = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ S).squeeze(-2))  # [B, HV, V]
        S = S + k[:, t, :, :, None] * r[:, :, None]
        o.append((q[:, t, :, None] @ S).squeeze(-2))
    out = torch.stack(o, 1) if o else v.new_zeros(v.shape)
    return out.to(dtype), S if output_final_state else None


def naive_chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The chunk form (docs/math.md), written for reading: arguments and results as naive_recurrent_kda, any T.

    The decay differences G_r - G_i are formed before the exponential, so any gate is finite; memory grows with T * chunk_size * K.
    chunk_size: an int of at least 1."""
    check(q, k, v, g, beta, scale, initial_state)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size is {chunk_size!r}; it must be an int")
    if chunk_size < 1:
        raise fail("chunk_size", chunk_size, "at least 1")
    dtype = v.dtype
    q, k, v, g, beta = prepare(
        q, k, v, g, beta, A_log=None, dt_bias=None, gate="none", lower_bound=None, qk_l2norm=False, beta_sigmoid=False, neg_eigval=False
    )
    B, T, HV, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S = v.new_zeros(B, HV, K, v.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    o = [v.new_zeros(B, 0, HV, v.shape[-1])]
    for start in range(0, T, chunk_size):
        rows = slice(start, min(start + chunk_size, T))
        qc, kc, vc, gc, bc = (x[:, rows].transpose(1, 2) for x in (q, k, v, g, beta[..., None]))  # [B, HV, C, *]
        G = gc.cumsum(-2)
        lower = torch.ones(G.shape[-2], G.shape[-2], dtype=torch.bool, device=G.device).tril()
        difference = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(~lower[..., None], float("-inf")).exp()  # [B, HV, C, C, K]
        Aqk = scale * torch.einsum("bhrc,bhic,bhric->bhri", qc, kc, difference)
        L = (bc * torch.einsum("bhrc,bhic,bhric->bhri", kc, kc, difference)).tril(-1)
        unit = torch.eye(G.shape[-2], dtype=G.dtype, device=G.device)
        Linv = torch.linalg.solve_triangular(unit + L, unit.expand_as(L), upper=False, unitriangular=True)
        w = Linv @ (bc * G.exp() * kc)
        u = Linv @ (bc * vc)
        r = u - w @ S
        o.append((scale * (G.exp() * qc) @ S + Aqk @ r).transpose(1, 2))
        kg = (G[..., -1:, :] - G).exp() * kc
        S = G[..., -1, :, None].exp() * S + kg.transpose(-1, -2) @ r
    return torch.cat(o, 1).to(dtype), S if output_final_state else None

"""The reverse recurrence (docs/math.md) and the chunk form (docs/backward.md) of every gradient, in fp64 against autograd."""

import math

import pytest
import torch

from openkda.reference import naive_recurrent_kda

T, K, V, C = 44, 6, 10, 16  # a ragged tail of 12
EXACT = 1e-10


def inputs(regime: str) -> list[torch.Tensor]:
    """q, k [T, K], v [T, V], g [T, K], beta [T], S0 [K, V], and gradients do [T, V], dS_final [K, V]; fp64."""
    gen = torch.Generator().manual_seed(3)
    randn = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    q, k, v, g = randn(T, K), randn(T, K), randn(T, V), -randn(T, K).exp()
    k = k / k.norm(dim=-1, keepdim=True)
    if regime == "slow":
        g = 1e-4 * g
    elif regime == "zero":
        g = 0 * g
    elif regime == "extreme":
        g = torch.where(torch.rand(T, 1, generator=gen) < 0.3, 400.0, 20.0) * g
    elif regime == "mixed":
        g = torch.where(torch.arange(K) % 2 == 0, 50.0, 1e-4) * g
    elif regime == "equal keys":
        k = k[:1] + 0.01 * k
        k = k / k.norm(dim=-1, keepdim=True)
    return [q, k, v, g, torch.sigmoid(randn(T)), randn(K, V), randn(T, V), randn(K, V)]


def by_autograd(q, k, v, g, beta, S0, do, dS_final) -> dict[str, torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta, S0)]
    per_head = [x[None, :, None] for x in leaves[:5]]
    o, S = naive_recurrent_kda(*per_head, 1.0, leaves[5][None, None], True)
    found = torch.autograd.grad([o, S], leaves, [do[None, :, None], dS_final[None, None]])
    return dict(zip(("q", "k", "v", "g", "beta", "S0"), found))


def by_tokens(q, k, v, g, beta, S0, do, dS_final) -> dict[str, torch.Tensor]:
    """The reverse recurrence of docs/math.md, with scale 1."""
    states, decayed, S = [], [], S0
    for t in range(T):
        decayed.append(g[t].exp()[:, None] * S)
        S = decayed[t] + beta[t] * torch.outer(k[t], v[t] - k[t] @ decayed[t])
        states.append(S)
    out = {n: torch.zeros_like(x) for n, x in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta))}
    dS = dS_final
    for t in reversed(range(T)):
        D, left = decayed[t], v[t] - k[t] @ decayed[t]
        dS = dS + torch.outer(q[t], do[t])
        dr = k[t] @ dS
        dv = beta[t] * dr
        dD = dS - torch.outer(k[t], dv)
        out["q"][t], out["v"][t], out["beta"][t] = states[t] @ do[t], dv, dr @ left
        out["k"][t], out["g"][t] = dS @ (beta[t] * left) - D @ dv, (D * dD).sum(-1)
        dS = g[t].exp()[:, None] * dD
    return out | {"S0": dS}


def chunk_terms(q, k, v, G, beta, S):
    """The forward of one chunk: x [r, i, c] = exp(G_r - G_i) for i <= r, T = Linv Diag(beta), Aqk, r = T (v - decayed k S)."""
    lower = torch.ones(len(G), len(G), dtype=torch.bool).tril()
    x = (G[:, None] - G[None]).masked_fill(~lower[..., None], -math.inf).exp()
    L = beta[:, None] * torch.einsum("rc,ic,ric->ri", k, k, x).tril(-1)
    Tm = torch.linalg.solve_triangular(torch.eye(len(G), dtype=G.dtype) + L, torch.diag(beta), upper=False, unitriangular=True)
    Aqk = torch.einsum("rc,ic,ric->ri", q, k, x)
    return x, Tm, Aqk, Tm @ (v - (k * G.exp()) @ S)


def by_chunks(q, k, v, g, beta, S0, do, dS_final, taps: dict | None = None) -> dict[str, torch.Tensor]:
    """Equations (1) to (8) of docs/backward.md, from the last chunk to the first. taps receives the sizes of identities' violations."""
    bounds = [(a, min(a + C, T)) for a in range(0, T, C)]
    S, entries = S0, []
    for a, b in bounds:
        entries.append(S)
        G = g[a:b].cumsum(0)
        r = chunk_terms(q[a:b], k[a:b], v[a:b], G, beta[a:b], S)[3]
        S = G[-1].exp()[:, None] * S + (k[a:b] * (G[-1] - G).exp()).T @ r
    out = {n: torch.zeros_like(x) for n, x in zip("qkvg", (q, k, v, g))} | {"beta": torch.zeros_like(beta)}
    dS = dS_final
    for (a, b), S in zip(reversed(bounds), reversed(entries)):
        qc, kc, vc, doc, bc = q[a:b], k[a:b], v[a:b], do[a:b], beta[a:b]
        G = g[a:b].cumsum(0)
        x, Tm, Aqk, r = chunk_terms(qc, kc, vc, G, bc, S)
        E, decay = G.exp(), G[-1].exp()[:, None]
        kg = kc * (G[-1] - G).exp()
        dr = Aqk.T @ doc + kg @ dS  # (1)
        dv = Tm.T @ dr  # (2)
        exit_dS, dS = dS, decay * dS + (qc * E).T @ doc - (kc * E).T @ dv  # (4)
        N = dv @ r.T
        dZ, dA = (doc @ r.T).tril(), -N.tril(-1)  # (5)
        dq = E * (doc @ S.T) + torch.einsum("ri,ic,ric->rc", dZ, kc, x)  # (6)
        read = -E * (dv @ S.T) + torch.einsum("ri,ic,ric->rc", dA, kc, x)
        by_state = (G[-1] - G).exp() * (r @ exit_dS.T)
        written = by_state + torch.einsum("ri,rc,ric->ic", dZ, qc, x) + torch.einsum("ri,rc,ric->ic", dA, kc, x)
        dG = qc * dq + kc * (read - written)  # (8)
        rho_exit = decay[:, 0] * (S * exit_dS).sum(-1) + (kc * by_state).sum(0)
        suffix = dG.flip(0).cumsum(0).flip(0)
        dbeta = N.diagonal() / bc**2
        for name, value in (("q", dq), ("k", read + written), ("v", dv), ("g", rho_exit + suffix), ("beta", dbeta)):
            out[name][a:b] = value
        if taps is not None:
            o = (qc * E) @ S + Aqk @ r
            rho_entry = (S * dS).sum(-1)
            for name, left, right in (
                ("prefix form of dg", rho_entry - (dG.cumsum(0) - dG), rho_exit + suffix),
                ("q.dq = o.do", (qc * dq).sum(-1), (o * doc).sum(-1)),
                ("k.dk = 2 beta dbeta - v.dv", (kc * (read + written)).sum(-1), 2 * bc * dbeta - (vc * dv).sum(-1)),
            ):
                taps[name] = max(taps.get(name, 0.0), ((left - right).abs().max() / right.abs().max()).item())
    return out | {"S0": dS}


@pytest.mark.parametrize("regime", ["random", "slow", "zero", "extreme", "mixed", "equal keys"])
@pytest.mark.parametrize("form", [by_tokens, by_chunks])
def test_both_forms_equal_autograd_of_the_recurrence(form, regime):
    x = inputs(regime)
    expected, found = by_autograd(*x), form(*x)
    for name, reference in expected.items():
        error = (found[name] - reference).norm() / reference.norm()
        assert error < EXACT, f"d{name}: {error:.1e}"


@pytest.mark.parametrize("regime", ["random", "slow", "mixed"])
def test_row_sums_and_the_two_forms_of_dg(regime):
    taps: dict[str, float] = {}
    by_chunks(*inputs(regime), taps=taps)
    assert len(taps) == 3
    assert max(taps.values()) < EXACT, taps


def test_zero_beta_by_its_floor():
    """beta = 0 would divide by zero; 2^-30 in its place leaves every gradient right to 1e-8."""
    x = inputs("random")
    x[4][5:9] = 0.0
    expected = by_autograd(*x)
    x[4] = x[4].clamp(min=2.0**-30)
    for name, value in by_chunks(*x).items():
        assert (value - expected[name]).norm() / expected[name].norm() < 1e-8, name


def test_segments_chain_by_the_transposed_map():
    """dS_in = M^T dS_out + c for a segment whose forward is S_out = M S_in + b."""
    q, k, v, g, beta, S0, do, dS_final = inputs("random")
    whole = by_autograd(q, k, v, g, beta, S0, do, dS_final)["S0"]
    M = torch.eye(K, dtype=torch.float64)
    for t in range(T):  # the state map without values
        M = g[t].exp()[:, None] * M
        M = M - beta[t] * k[t][:, None] * (k[t] @ M)[None]
    c = by_autograd(q, k, v, g, beta, S0, do, torch.zeros_like(dS_final))["S0"]
    assert (M.T @ dS_final + c - whole).norm() / whole.norm() < EXACT


def test_bound_behind_the_cut():
    """|dg_t| <= exp(g_t) |S_{t-1}| |dD_t| per channel; where g_t < -24 that is under half an fp32 ulp of the sums which give dg_t."""
    q, k, v, g, beta, S, do, dS_final = inputs("extreme")
    S.requires_grad_()
    states, decayed, loss = [S], [], 0.0
    for t in range(T):
        D = g[t].exp()[:, None] * S
        D.retain_grad()
        S = D + beta[t] * k[t][:, None] * (v[t] - k[t] @ D)[None]
        states.append(S)
        decayed.append(D)
        loss = loss + (q[t] @ S) @ do[t]
    (loss + (S * dS_final).sum()).backward()
    dg = by_autograd(q, k, v, g, beta, states[0].detach(), do, dS_final)["g"]
    bound = torch.stack([g[t].exp() * states[t].detach().norm(dim=-1) * decayed[t].grad.norm(dim=-1) for t in range(T)])
    assert (g < -24.0).any() and (g >= -24.0).any()
    assert (dg.abs() <= bound * (1 + 1e-9) + 1e-300).all()
    assert math.exp(-24.0) < torch.finfo(torch.float32).eps / 4

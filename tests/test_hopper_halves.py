"""The any-gate form of the Hopper forward (openkda/hopper/halves.py): its algebra and ranges in torch; on a GPU against the recurrence."""

import math
import re
import struct

import pytest
import torch

from openkda.hopper.config import choose
from openkda.hopper.halves import ANCHOR, MOST
from openkda.hopper.tiles import softplus2
from openkda.testing import make_case, relative_error

A = ANCHOR.value
BF16 = lambda x: x.to(torch.bfloat16).float()


def constants(function):
    """The fp32 constants in a function's PTX, in order"""
    return [struct.unpack(">f", bytes.fromhex(word))[0] for word in re.findall(r"0f([0-9A-F]{8})", function.src)]


def ex2(x):
    y = torch.exp2(x)
    return torch.where(y < 2.0**-126, 0.0, y)


def halves(k, q, g):
    """(k.k scores, q.k scores, kd, qd, kg, decay) of blocks [N, 16, K] from log2 decays g, every tile rounded to bf16"""
    x = g.clamp(min=-MOST.value)
    G0, G1 = x[:, :8].cumsum(1), x[:, 8:].cumsum(1)
    e0, e1 = G0[:, -1:], G1[:, -1:]
    n = e0.floor()
    n0 = (n * 0.5).floor()
    E = torch.cat([G0 + A, G1 + (e0 - n + A)], 1)
    columns = k * ex2(-E)
    near = [BF16(x * ex2(E)) for x in (k, q)]
    shifted = lambda x: torch.cat([x[:, :8], BF16(BF16(x[:, 8:] * ex2(n0)) * ex2(n - n0))], 1)
    far = [shifted(x) for x in near]
    i, j = torch.arange(16)[:, None], torch.arange(16)[None]
    across = (i >= 8) & (j < 8)
    kk, qk = (torch.where(across, f @ BF16(columns).mT, r @ BF16(columns).mT) for r, f in zip(near, far, strict=True))
    kg = BF16(columns * torch.cat([torch.exp2(e0 + e1 + A).expand_as(G0), torch.exp2(e1 + e0 - n + A).expand_as(G1)], 1))
    return torch.where(i > j, kk, 0.0), torch.where(i >= j, qk, 0.0), *(x.double() * 2.0**-A for x in far), kg, ex2(e0 + e1)


def decays(g):
    """[N, 17, 17, K] fp64: from row i to row r the decay of tokens i .. r-1, 0 for i > r. Sums token by token: differences of prefix
    sums would lose what lies beside a spike."""
    out = torch.full((g.shape[0], 17, 17, g.shape[2]), -torch.inf, dtype=torch.float64)
    for r in range(17):
        out[:, r, r] = 0.0
        for i in range(r - 1, -1, -1):
            out[:, r, i] = out[:, r, i + 1] + g[:, i]
    return torch.exp2(out)


GATES = {
    "zero": lambda u: 0.0 * u,
    "slow": lambda u: -0.01 * u,
    "fast": lambda u: -24.0 * u,
    "fastest": lambda u: -25.0 + 0.0 * u,
    "spikes": lambda u: torch.where(u < 0.2, -1000.0, -0.05),
    "one spike": lambda u: torch.where(u == u.amax(1, keepdim=True), -1e30, -0.1 * u),
    "mixed": lambda u: torch.where(torch.arange(u.shape[2]) % 2 == 0, -72.0, -0.01) * u,
    "given -inf": lambda u: torch.where(u < 0.1, -torch.inf, -1.0 * u),
}


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**19])
@pytest.mark.parametrize("gate", GATES)
def test_tiles_and_scores_of_any_gate(gate, size):
    """Each within bf16's rounding of what it is made of, plus 2^-25 of what a token forgets (2^-22 where the halves meet)."""
    gen = torch.Generator().manual_seed(0)
    k, q = BF16(size * torch.randn(8, 16, 64, generator=gen)), BF16(torch.randn(8, 16, 64, generator=gen))
    g = GATES[gate](torch.rand(8, 16, 64, generator=gen))
    kk, qk, kd, qd, kg, decay = halves(k, q, g)
    true = decays(g)
    within = true[:, 1:, 1:]
    for mine, rows, low in ((kk, k, -1), (qk, q, 0)):
        pairs = lambda a, b, f: torch.einsum("nrc,nic,nric->nri", a.double(), b.double(), f).tril(low)  # noqa: B023
        assert mine.isfinite().all()
        assert ((mine.double() - pairs(rows, k, within)).abs() <= pairs(rows.abs(), k.abs(), 2.0**-7 * within + 2.0**-22)).all()
    for mine, raw, factor in ((kd, k, true[:, 1:, 0]), (qd, q, true[:, 1:, 0]), (kg, k, true[:, 16, 1:])):
        want = raw.double() * factor
        assert ((mine.double() - want).abs() <= 2.0**-7 * want.abs() + 2.0**-25 * raw.double().abs()).all()
    assert ((decay.double() - true[:, 16:, 0]).abs() <= 1e-5 * true[:, 16:, 0] + 2.0**-25).all()


def test_softplus_polynomial():
    """Relative error of log2(1 + 2^x) below 1e-5 however slow the decay is."""
    *words, zero = constants(softplus2)
    assert zero == 0.0
    x = torch.linspace(-60, 60, 100001)
    e = torch.exp2(-x.abs())
    p = torch.full_like(e, words[0])
    for c in words[1:]:
        p = p * e + c
    want = torch.log1p(torch.exp2(x.double())) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    assert (((p * e + x.clamp(min=0)).double() - want) / want).abs().max() < 9e-6


def spiked(**kw):
    """Resets of single tokens, of stretches across a half's and a block's end, of half the channels, among slow decays"""
    c = make_case(
        "init", T=160, H=2, K=128, dtype=torch.bfloat16, bounded=False, raw=False, gate_dtype=torch.float32, state_v_first=True, **kw
    )  # fmt: skip
    g = c.args["g"]
    for at, value in ((5, -1000.0), (37, -11.0), (slice(70, 82), -50.0), (100, -1e4), (127, -30.0), (128, -30.0)):
        g[:, at] = value
    g[:, 120, :, ::2] = -300.0
    return c


def in_torch(case):
    """o [1, T, H, V] by blocks of 16 tokens with the tiles above, matrix operands in bf16 and sums in fp32; T divides by 16"""
    problem, inputs = case.described()
    heads = []
    for h in range(problem.H):
        q, k, v, g, beta = (getattr(inputs, n)[0, :, h].cpu().float().unflatten(0, (-1, 16)) for n in ("q", "k", "v", "g", "beta"))
        S = inputs.initial_state[0, h].cpu().float().mT  # [K, V]
        norms = [torch.rsqrt((x * x).sum(-1) + 1e-6) if problem.qk_l2norm else torch.ones(x.shape[:2]) for x in (q, k)]
        kk, qk, kd, qd, kg, decay = (x.float() for x in halves(k, q, g / math.log(2.0)))
        for i, (nq, nk) in enumerate(zip(*norms, strict=True)):
            L = beta[i, :, None] * nk[:, None] * kk[i] * nk
            Linv = torch.linalg.inv(torch.eye(16) + L) * beta[i]
            r = BF16(BF16(Linv) @ BF16(v[i] - nk[:, None] * (kd[i] @ BF16(S))))
            heads.append(problem.scale * nq[:, None] * (qd[i] @ BF16(S) + BF16(qk[i] * nk) @ r))
            S = decay[i].squeeze(0)[:, None] * S + (kg[i] * nk[:, None]).mT @ r
    return BF16(torch.stack(heads).unflatten(0, (problem.H, -1)).flatten(1, 2).transpose(0, 1)[None])


def worst_row(o, want):
    return ((o.double().cpu() - want.cpu()).norm(dim=-1) / want.cpu().norm(dim=-1)).max()


@pytest.mark.parametrize("qk_l2norm", [True, False])
def test_the_whole_form_in_torch(qk_l2norm):
    """Within the earned error as a whole. Right after a reset a row is its own q.k alone; where that nearly cancels, rounding shows."""
    c = spiked(qk_l2norm=qk_l2norm)
    want, twin = c.oracle[0], c.twin[0]
    o = in_torch(c)
    assert relative_error(o, want) <= 2 * relative_error(twin, want)
    assert worst_row(o, want) < 0.06  # token 72 of head 1: q.k is 0.006 |q| |k|, a sum of 128 products of two numbers in bf16


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("qk_l2norm", [True, False])
def test_resets_row_by_row(qk_l2norm):
    """The worst row of the kernel and of the same form in torch: a row's error is a sum of few rounded numbers."""
    from openkda.hopper import launch

    c = spiked(qk_l2norm=qk_l2norm, device="cuda")
    problem, inputs = c.described()
    o, _ = launch.forward(problem, inputs, choose(problem))
    assert worst_row(o, c.oracle[0]) <= 2 * worst_row(in_torch(c), c.oracle[0])


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_size_of_keys_and_queries_cancels(size):
    """l2norm is inside: keys and queries of any size give what normal ones give."""
    from openkda.hopper import launch

    c = make_case("mixed", T=100, H=2, K=128, dtype=torch.bfloat16, bounded=False, state_v_first=True, device="cuda")
    for name in ("q", "k"):
        c.args[name] = c.args[name] * size
    problem, inputs = c.described()
    o, _ = launch.forward(problem, inputs, choose(problem))
    assert relative_error(o, c.oracle[0]) <= 2 * relative_error(c.twin[0], c.oracle[0])


@pytest.mark.gpu
@pytest.mark.hopper
def test_nan_in_the_gate_is_seen():
    from openkda.hopper import launch

    c = make_case("init", T=64, H=2, K=128, dtype=torch.bfloat16, bounded=False, state_v_first=True, device="cuda")
    c.args["g"][0, 40, 1, 7] = torch.nan
    problem, inputs = c.described()
    o, _ = launch.forward(problem, inputs, choose(problem))
    assert o[:, 40:, 1].isnan().all() and o[:, :32].isfinite().all() and o[:, :, 0].isfinite().all()

"""Each stage of the portable forward alone, against its equation in fp64 (docs/math.md)."""

import math
from dataclasses import replace

import pytest
import torch

from openkda.plan import Plan
from openkda.portable.config import Config, configure
from openkda.portable.gate import gate_cumsum
from openkda.portable.intra import intra_diagonal, intra_offdiagonal
from openkda.portable.output import output
from openkda.portable.segment import combine_segments, segment_summary
from openkda.portable.solve import solve
from openkda.portable.state import state_scan
from openkda.portable.wy import prepare, wy
from openkda.problem import Inputs, Problem
from openkda.reference import prepare as activate
from openkda.testing import make_case, relative_error

FP32 = 4e-6  # fp32 sums of up to 64 terms in another order than fp64's; each test compares one stage only


def setup(chunk: int = 32, regime: str = "random", **sizes) -> tuple[Problem, Inputs, Config, Plan]:
    problem, inputs = make_case(regime, **{"T": 50, "H": 2, "K": 16, **sizes}).described()
    config = replace(configure(problem), chunk=chunk)
    return problem, inputs, config, inputs.plan(problem, chunk)


def exact(problem: Problem, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Activated inputs in fp64, [R, HV, ...]."""
    tensors = activate(
        *(x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)), A_log=inputs.A_log, dt_bias=inputs.dt_bias,
        gate=problem.gate, lower_bound=problem.lower_bound, qk_l2norm=problem.qk_l2norm, beta_sigmoid=problem.beta_sigmoid,
        neg_eigval=problem.neg_eigval,
    )  # fmt: skip
    return {name: x.flatten(0, 1) for name, x in zip(("q", "k", "v", "g", "beta"), tensors)}


def pieces(plan: Plan) -> list[slice]:
    return [slice(first, end) for _, first, end, _ in plan.chunks.tolist() if end > first]


def exact_G(x: dict[str, torch.Tensor], plan: Plan) -> torch.Tensor:
    G = torch.zeros_like(x["g"])
    for rows in pieces(plan):
        G[rows] = x["g"][rows].cumsum(0) / math.log(2)
    return G


def exact_scores(problem: Problem, x: dict[str, torch.Tensor], rows: slice, G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Aqk, L of one chunk, [HV, n, n] fp64."""
    q, k, beta = (x[name][rows].transpose(0, 1) for name in ("q", "k", "beta"))
    Gc = G[rows].transpose(0, 1)
    n = Gc.shape[1]
    lower = torch.ones(n, n, dtype=torch.bool, device=Gc.device).tril()[..., None]
    decay = torch.exp2((Gc[:, :, None] - Gc[:, None]).masked_fill(~lower, -math.inf))
    Aqk = problem.scale * torch.einsum("hrc,hic,hric->hri", q, k, decay)
    L = beta[..., None] * torch.einsum("hrc,hic,hric->hri", k, k, decay)
    return Aqk, L.tril(-1)


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = FP32) -> None:
    assert relative_error(actual, expected) <= tolerance


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", ["random", "init", "extreme", "mixed"])
def test_gate_cumsum(device, regime, bounded, chunk):
    problem, inputs, config, plan = setup(chunk, regime, bounded=bounded, lengths=(33, 0, 17), device=device)
    G = gate_cumsum(problem, config, plan, inputs.g, inputs.A_log, inputs.dt_bias)
    near(G.flatten(0, 1), exact_G(exact(problem, inputs), plan), 1e-6)


def test_plain_cumsum_of_a_given_decay(device):
    problem, inputs, config, plan = setup(raw=False, gate_dtype=torch.bfloat16, device=device)
    G = gate_cumsum(problem, config, plan, inputs.g)
    near(G.flatten(0, 1), exact_G(exact(problem, inputs), plan), 1e-6)


@pytest.mark.parametrize("bounded", [True, False])
def test_slow_decay_keeps_its_digits(device, bounded):
    """The log decay's relative error stays below 1e-5 down to 1e-30 per token: element by element, held over the sequence."""
    problem, inputs, config, plan = setup(bounded=bounded, T=32, H=1, device=device)
    inputs.g = torch.linspace(-69.0, 8.0, 16, device=device).expand(1, 32, 1, 16).contiguous()
    inputs.A_log, inputs.dt_bias = torch.zeros(1, device=device), None
    G = gate_cumsum(problem, config, plan, inputs.g, inputs.A_log, inputs.dt_bias).double()
    expected = exact_G(exact(problem, inputs), plan).view_as(G)
    assert ((G - expected) / expected).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize(
    ("form", "bounded", "regime"),
    [("matrix", True, "random"), ("matrix", True, "extreme"), ("any", True, "random"), ("any", False, "extreme"), ("any", False, "mixed"),
     ("any", True, "zero")],
)  # fmt: skip
def test_scores_and_inverse(device, form, bounded, regime, chunk):
    problem, inputs, config, plan = setup(chunk, regime, bounded=bounded, H=1, HV=2, K=24, lengths=(41, 1, 16), device=device)
    G = gate_cumsum(problem, config, plan, inputs.g, inputs.A_log, inputs.dt_bias)
    arguments = (problem, config, plan, inputs.q, inputs.k, G, inputs.beta)
    Aqk, L = intra_diagonal(*arguments, form=form)
    diagonal = L.clone()
    Aqk, L = intra_offdiagonal(*arguments, Aqk, L)
    Linv = solve(config, plan, L)
    x = exact(problem, inputs)
    # the exponent's rounding grows with |G|: one fp32 ulp of the largest sum, as in any fp32 chunk form
    tolerance = FP32 + 2 * torch.finfo(torch.float32).eps * G[G.isfinite()].abs().max().item()
    for rows in pieces(plan):
        n = rows.stop - rows.start
        expected_A, expected_L = exact_scores(problem, x, rows, G.flatten(0, 1).double())
        for actual, expected in ((Aqk, expected_A), (L, expected_L)):
            got = actual.flatten(0, 1)[rows].transpose(0, 1)
            near(got[..., :n], expected, tolerance)
            assert not got[..., n:].any()
        block = torch.arange(n, device=device) // 16
        outside = block[:, None] != block[None, :]
        assert not diagonal.flatten(0, 1)[rows].transpose(0, 1)[..., :n][:, outside].any()
        eye = torch.eye(n, dtype=torch.float64, device=device)
        exact_inverse = torch.linalg.inv(eye + L.flatten(0, 1)[rows].transpose(0, 1)[..., :n].double())
        near(Linv.flatten(0, 1)[rows].transpose(0, 1)[..., :n], exact_inverse)


def test_diagonal_refuses_an_unknown_form(device):
    problem, inputs, config, plan = setup(device=device)
    with pytest.raises(ValueError, match="form is 'middle'"):
        intra_diagonal(problem, config, plan, inputs.q, inputs.k, inputs.g, inputs.beta, form="middle")


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("strength", [0.999, 1.999])
def test_inverse_of_near_equal_keys(device, strength, chunk):
    """Near-equal keys, hardly any decay, beta near 1 and near 2 (condition number 5000), where powers of L cancel or overflow: the error
    of a backward stable fp32 inverse, unit roundoff times condition number."""
    gen = torch.Generator().manual_seed(1)
    heads = 6
    k = torch.randn(heads, 1, 48, generator=gen) + 0.05 * torch.randn(heads, chunk, 48, generator=gen)
    k = torch.nn.functional.normalize(k, dim=-1)
    L = (strength * (k @ k.mT)).tril(-1)
    _, _, config, plan = setup(chunk, T=chunk, H=heads, device=device)
    Linv = solve(config, plan, L.transpose(0, 1)[None].contiguous().to(device))[0].transpose(0, 1)
    exact_matrix = torch.eye(chunk, dtype=torch.float64) + L.double()
    condition = torch.linalg.cond(exact_matrix).max().item()
    assert relative_error(Linv, torch.linalg.inv(exact_matrix)) <= torch.finfo(torch.float32).eps / 2 * condition


@pytest.mark.parametrize("l2norm", [True, False])
def test_wy_and_the_fused_preparation(device, l2norm):
    problem, inputs, config, plan = setup(regime="mixed", H=1, HV=2, K=24, V=40, lengths=(33, 17), qk_l2norm=l2norm, device=device)
    G = gate_cumsum(problem, config, plan, inputs.g, inputs.A_log, inputs.dt_bias)
    arguments = (problem, config, plan, inputs.q, inputs.k, G, inputs.beta)
    Aqk, L = intra_offdiagonal(*arguments, *intra_diagonal(*arguments, form=config.form))
    stages = (Aqk, *wy(problem, config, plan, inputs.q, inputs.k, inputs.v, G, inputs.beta, solve(config, plan, L)))
    x = exact(problem, inputs)
    for rows in pieces(plan):
        Gc = G.flatten(0, 1)[rows].transpose(0, 1).double()
        _, exact_L = exact_scores(problem, x, rows, G.flatten(0, 1).double())
        q, k, v, beta = (x[name][rows].transpose(0, 1) for name in ("q", "k", "v", "beta"))
        Linv = torch.linalg.inv(torch.eye(Gc.shape[1], dtype=torch.float64, device=device) + exact_L)
        w = Linv @ (beta[..., None] * torch.exp2(Gc) * k)
        u = Linv @ (beta[..., None] * v)
        kg = torch.exp2(Gc[:, -1:] - Gc) * k
        qg = problem.scale * torch.exp2(Gc) * q
        for actual, expected in zip(stages[1:], (w, u, kg, qg)):
            near(actual.flatten(0, 1)[rows].transpose(0, 1), expected, 1e-5)
    fused = prepare(problem, config, plan, inputs.q, inputs.k, inputs.v, G, inputs.beta)
    for actual, expected in zip(fused, stages):
        near(actual, expected, FP32)


def recurrence_over_chunks(plan, w, kg, u, G, S0):
    """h by plan entry, r and the final states, in fp64: w, kg, G [R, HV, K], u [R, HV, V], S0 [N, HV, K, V]."""
    w, kg, u, G = (x.flatten(0, 1).double() for x in (w, kg, u, G))
    h, r, final = (
        torch.zeros(plan.num_chunks, *S0.shape[1:], dtype=torch.float64, device=S0.device),
        torch.zeros_like(u),
        S0.clone().double(),
    )
    for c, (n, first, end, _) in enumerate(plan.chunks.tolist()):
        if end > first:
            rows = slice(first, end)
            S = final[n]
            h[c] = S
            r[rows] = u[rows] - torch.einsum("thk,hkv->thv", w[rows], S)
            final[n] = torch.exp2(G[end - 1])[..., None] * S + torch.einsum("thk,thv->hkv", kg[rows], r[rows])
    return h, r, final


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize(("K", "V", "lengths"), [(24, 40, (33, 0, 64, 1)), (16, 3, None), (16, 72, (33, 0, 1))])  # 72: two blocks of V
def test_state_scan_and_output(device, K, V, lengths, v_first):
    problem, inputs, config, plan = setup(regime="init", K=K, V=V, lengths=lengths, state_v_first=v_first, device=device)
    G = gate_cumsum(problem, config, plan, inputs.g, inputs.A_log, inputs.dt_bias)
    Aqk, w, u, kg, qg = prepare(problem, config, plan, inputs.q, inputs.k, inputs.v, G, inputs.beta)
    S0 = inputs.initial_state.mT if v_first else inputs.initial_state
    h, r, final = state_scan(problem, config, plan, w, kg, u, G, inputs.initial_state)
    expected_h, expected_r, expected_final = recurrence_over_chunks(plan, w, kg, u, G, S0)
    used = [c for c, (_, first, end, _) in enumerate(plan.chunks.tolist()) if end > first]
    near(h[used], expected_h[used])
    near(r.flatten(0, 1), expected_r)
    near(final.mT if v_first else final, expected_final)
    o = output(problem, config, plan, qg, Aqk, r, h, torch.zeros_like(inputs.v)).flatten(0, 1)
    for c, (_, first, end, _) in enumerate(plan.chunks.tolist()):
        rows = slice(first, end)
        scores = Aqk.flatten(0, 1)[rows][..., : end - first].double()
        inner = torch.einsum("rhi,ihv->rhv", scores, expected_r[rows])
        expected = torch.einsum("thk,hkv->thv", qg.flatten(0, 1)[rows].double(), expected_h[c]) + inner
        near(o[rows], expected)


@pytest.mark.parametrize("regime", ["init", "random", "zero"])
def test_segment_summaries_chain_to_the_whole_scan(device, regime):
    """Entry states from (M, b) of segments equal those of the unbroken scan; an empty segment is the identity."""
    problem, inputs, config, plan = setup(regime=regime, T=150, H=1, K=24, V=20, device=device)
    G = gate_cumsum(problem, config, plan, inputs.g, inputs.A_log, inputs.dt_bias)
    _, w, u, kg, _ = prepare(problem, config, plan, inputs.q, inputs.k, inputs.v, G, inputs.beta)
    h, _, final = state_scan(problem, config, plan, w, kg, u, G, inputs.initial_state)
    segments = torch.tensor([[0, 64, 0, 2], [64, 64, 2, 0], [64, 96, 2, 1], [96, 150, 3, 2]], dtype=torch.int32, device=device)
    M, b = segment_summary(problem, config, segments, 32, w, kg, u, G)
    assert torch.equal(M[1], torch.eye(24, device=device).expand(1, 24, 24)) and not b[1].any()
    chains = torch.tensor([[0, 4]], dtype=torch.int32, device=device)
    entry, end = combine_segments(problem, config, chains, M, b, inputs.initial_state)
    for segment, chunk in ((0, 0), (1, 2), (2, 2), (3, 3)):
        near(entry[segment], h[chunk], 1e-5)
    near(end, final, 1e-5)

"""The token recurrence and kda_decode: values against the fp64 recurrence, slots, speculation, verification. Triton and torch alike."""

import pytest
import torch
from fault_case import vast
from serving_case import TOKENS, assert_matches, assert_untouched, check, make

from openkda import fused_recurrent_kda, kda_decode
from openkda.portable.decode import config
from openkda.reference import prepare
from openkda.serving import recurrent_in_pool
from openkda.testing import assert_close, make_case

pytestmark = pytest.mark.parametrize("backend", ["portable", "torch"])


def run(case, backend, indices, **options):
    """kda_decode with state_indices given as a list."""
    indices = torch.tensor(indices, dtype=torch.int32, device=case.pool.device)
    for name in ("num_accepted", "cu_seqlens"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32, device=case.pool.device)
    return kda_decode(**case.arguments(state_indices=indices, backend=backend, **options))


@pytest.mark.parametrize("regime", ["random", "init", "zero", "extreme", "mixed"])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("v_first", [True, False])
def test_every_gate_and_layout(backend, regime, bounded, v_first, device):
    case = make(N=2, S=3, regime=regime, bounded=bounded, v_first=v_first, device=device)
    o = run(case, backend, [2, 1])
    check(case, o, [2, 1], {2: (0, 3), 1: (1, 3)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("S", [1, 2])
def test_dtypes(backend, dtype, state_dtype, S, device):
    case = make(N=2, S=S, dtype=dtype, state_dtype=state_dtype, device=device)
    o = run(case, backend, [1, 2])
    assert o.dtype == dtype
    check(case, o, [1, 2], {1: (0, S), 2: (1, S)})


@pytest.mark.parametrize("K, V", [(1, 1), (3, 40), (64, 128), (100, 33), (256, 5), (17, 256)])
@pytest.mark.parametrize("v_first", [True, False])
def test_head_dims(backend, K, V, v_first, device):
    case = make(N=1, S=1, HV=1, K=K, V=V, v_first=v_first, device=device)
    check(case, run(case, backend, [1]), [1], {1: (0, 1)})


def test_options(backend, device):
    case = make(N=1, S=2, H=2, HV=6, dt_bias=False, allow_neg_eigval=True, scale=0.3, use_qk_l2norm_in_kernel=False, device=device)
    case.tokens["k"] = torch.nn.functional.normalize(case.tokens["k"], dim=-1)
    check(case, run(case, backend, [1]), [1], {1: (0, 2)})


def test_bounded_gate_without_A_log(backend, device):
    case = make(N=1, S=2, device=device)
    case.params["A_log"] = None
    check(case, run(case, backend, [1]), [1], {1: (0, 2)})


def test_slow_gate_keeps_its_relative_precision(backend, device):
    """A decay of 1e-4 per token, constant per channel, over many steps: an approximate sigmoid would show in the state."""
    case = make(N=1, S=64, HV=1, K=8, V=8, device=device)
    case.tokens["gate"] = torch.full_like(case.tokens["gate"], -10.8) + 0.1 * torch.arange(8, device=device)
    check(case, run(case, backend, [1]), [1], {1: (0, 64)})


def test_inputs_scaled_by_eight_are_normalised(backend, device):
    case = make(N=2, device=device)
    plain = run(case, backend, [1, 2], verify=True)
    for name in ("q", "k"):
        case.tokens[name] = case.tokens[name] * 8
    assert_matches("o", run(case, backend, [1, 2], verify=True), plain.double())


@pytest.mark.parametrize("pad_slot", [-1, 0])
def test_pads_and_wild_indices(backend, pad_slot, device):
    case = make(N=6, slots=5, used=[3, 4], device=device)
    pad = -1 if pad_slot == -1 else 0
    o = run(case, backend, [pad, 3, 5, -7, 2**31 - 1, 4], pad_slot=pad_slot)
    check(case, o, [None, 3, None, None, None, 4], {3: (1, 1), 4: (5, 1)})


def test_slot_zero_is_a_slot_by_default(backend, device):
    case = make(N=1, used=[0], device=device)
    check(case, run(case, backend, [0]), [0], {0: (0, 1)})


def test_duplicate_slots_touch_nothing_else(backend, device):
    case = make(N=3, used=[1, 2], device=device)
    o = run(case, backend, [1, 1, 2])
    assert_matches("o of the unshared slot", o[2], case.oracle(2, 2)[0])
    assert_untouched(case, {1, 2})


def test_strided_slices_of_one_projection(backend, device):
    case = make(N=3, S=2, H=2, HV=2, K=16, V=24, device=device)
    names = list(TOKENS)
    widths = [case.tokens[n].flatten(2).shape[2] for n in names]
    packed = torch.full((3, 2, sum(widths) + 3), float("nan"), device=device)
    start = 0
    for name, width in zip(names, widths):
        piece = packed[..., start : start + width]
        piece.copy_(case.tokens[name].flatten(2))
        case.tokens[name] = piece.unflatten(2, case.tokens[name].shape[2:]) if name != "beta" else piece
        start += width
    out = torch.full((3, 2, 2, 30), float("nan"), device=device)
    o = run(case, backend, [1, 2, 3], out=out[..., :24])
    check(case, o, [1, 2, 3], {1: (0, 2), 2: (1, 2), 3: (2, 2)})
    assert out[..., 24:].isnan().all() and o.data_ptr() == out.data_ptr()


def test_indices_from_a_table_column(backend, device):
    case = make(N=3, device=device)
    table = torch.full((3, 9), 99, dtype=torch.int64, device=device)
    table[:, 0] = torch.tensor([2, 3, 1])
    o = kda_decode(**case.arguments(state_indices=table[:, 0], backend=backend))
    check(case, o, [2, 3, 1], {2: (0, 1), 3: (1, 1), 1: (2, 1)})


@pytest.mark.parametrize("S", [1, 3])
def test_speculation_reads_and_writes_the_right_columns(backend, S, device):
    case = make(N=3, S=S, slots=16, used=[1, 2, 3, 5, 6, 7, 9, 10, 11], device=device)
    table = [[1, 2, 3], [5, 6, 7], [9, 10, 11]]
    o = run(case, backend, table, num_accepted=[1, 3, 2])
    writes = {table[n][t]: (n, t + 1) for n in range(3) for t in range(S)}
    check(case, o, [1, 7, 10], writes)


@pytest.mark.parametrize("accepted", [0, -1, 4, 2**30])
def test_bad_num_accepted_skips_the_sequence(backend, accepted, device):
    case = make(N=2, S=2, slots=9, used=[1, 2, 3, 4, 5, 6], device=device)
    o = run(case, backend, [[1, 2, 3], [4, 5, 6]], num_accepted=[accepted, 2])
    check(case, o, [None, 5], {4: (1, 1), 5: (1, 2)})


def test_pads_among_the_columns_drop_only_their_states(backend, device):
    case = make(N=2, S=3, slots=9, used=[1, 4], device=device)
    o = run(case, backend, [[1, -1, 2], [-1, 4, 5]])
    check(case, o, [1, None], {1: (0, 1), 2: (0, 3)})


def test_verify_keeps_the_base_state(backend, device):
    case = make(N=2, S=3, slots=9, used=[1, 5], device=device)
    check(case, run(case, backend, [1, 5], verify=True), [1, 5], {})
    o = run(case, backend, [[1, 2, 3, 4], [5, 6, 7, 8]], verify=True)
    writes = {first + t: (n, t) for n, first in enumerate((1, 5)) for t in (1, 2, 3)}
    check(case, o, [1, 5], writes)


@pytest.mark.parametrize("accept", [0, 1, 2, 3, 4])
def test_draft_rounds_equal_sequential_decoding(backend, accept, device):
    """Three rounds of a drafted token stream: the accepted ones must leave the state that plain decoding leaves. Errors gather over the
    rounds, so they are held against those of the recurrence in fp32."""
    case = make(N=1, S=16, HV=1, slots=8, used=[1], device=device)
    stream = dict(case.tokens)
    table, base, done = [1, 2, 3, 4, 5], 0, 0
    for _ in range(3):
        case.tokens = {n: x[:, done : done + 4] for n, x in stream.items()}
        order = [table[base], *(s for i, s in enumerate(table) if i != base)]
        o = run(case, backend, [order], verify=True)
        table, base = order, accept
        keep = o[:, :accept]
        case.tokens = stream
        want, twin = case.oracle(0, 1), case.oracle(0, 1, dtype=torch.float32)
        if accept:
            assert_close("o", keep[0], want[0][done : done + accept], twin[0][done : done + accept])
        done += accept
        assert_close("state", case.pool[table[base]], want[1][done], twin[1][done])


def test_ragged_rows(backend, device):
    case = make(lengths=[2, 0, 3, 1], used=[1, 2, 3, 4], device=device)
    tail = {n: torch.cat([x, torch.full_like(x[:, :2], float("nan"))], 1) for n, x in case.tokens.items()}
    case.tokens, kept = tail, case.tokens
    o = run(case, backend, [4, 3, -1, 1], cu_seqlens=[0, 2, 2, 5, 6])
    case.tokens = kept
    assert (o[:, 6:] == 0).all()
    check(case, o[:, :6], [4, 3, None, 1], {4: (0, 2), 3: (1, 0), 1: (3, 1)})


def test_ragged_speculation(backend, device):
    """Sequences with different numbers of drafted tokens; a token past the table's last column leaves no state."""
    case = make(lengths=[3, 1, 4, 0], slots=14, used=list(range(1, 13)), device=device)
    table = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    o = run(case, backend, table, num_accepted=[2, 1, 3, 0], cu_seqlens=[0, 3, 4, 8, 8])
    writes = {table[n][t]: (n, t + 1) for n, count in ((0, 3), (1, 1), (2, 3)) for t in range(count)}
    check(case, o, [2, 4, 9, None], writes)


def test_cu_seqlens_past_the_rows_is_clamped(backend, device):
    case = make(lengths=[2, 2], device=device)
    o = run(case, backend, [1, 2], cu_seqlens=[0, 2, 900])
    check(case, o, [1, 2], {1: (0, 2), 2: (1, 2)})


def test_nothing_to_do(backend, device):
    for case, indices in ((make(N=0, device=device), []), (make(N=2, slots=0, used=[], device=device), [1, 2])):
        o = run(case, backend, indices)
        assert o.shape == case.tokens["v"].shape and (o == 0).all()


def test_no_tokens_leave_the_pool_as_it_is(backend, device):
    case = make(N=2, S=0, device=device)
    q, k, v, gate, beta = case.tokens.values()
    o, pool = fused_recurrent_kda(
        q, k, v, gate, beta, **case.params, initial_state=case.pool, state_indices=torch.tensor([2, 1], device=device), backend=backend,
        use_gate_in_kernel=True, state_v_first=True,
    )  # fmt: skip
    assert o.shape == v.shape and pool is case.pool
    assert_untouched(case, set())


def test_bounds_from_a_table_column(backend, device):
    """cu_seqlens with gaps between its entries, the states not in place."""
    case = make_case("random", lengths=(3, 0, 5), K=8, device=device)
    args = {name: x for name, x in case.args.items() if name not in ("safe_gate", "chunk_size")}
    args["cu_seqlens"] = torch.stack([args["cu_seqlens"], torch.full((4,), 99, device=device)], 1)[:, 0]
    for name, got, want, twin in zip(("o", "final_state"), fused_recurrent_kda(**args, backend=backend), case.oracle, case.twin):
        assert_close(name, got, want, twin)


def test_many_steps_drift_below_1e_5(backend, device):
    """96 single steps with bf16 logits (4096 in the GPU test below) against fp64 over the same tokens."""
    steps_drift(backend, 96, device)


@pytest.mark.gpu
def test_4096_steps_drift_below_1e_5(backend, device):
    steps_drift(backend, 4096, device)


def steps_drift(backend, steps, device):
    case = make(N=1, S=steps, HV=1, K=8, V=8, regime="init", dtype=torch.bfloat16, device=device)
    want = case.oracle(0, 1)[1][-1]
    stream = case.tokens
    for t in range(steps):
        case.tokens = {n: x[:, t : t + 1] for n, x in stream.items()}
        run(case, backend, [1])
    error = (case.pool[1].double() - want).norm() / want.norm()
    assert error < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("v_first, state_dtype", [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("N, S", [(1, 1), (64, 1), (8, 4)])
def test_real_sizes(backend, v_first, state_dtype, N, S, device):
    options = dict(H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, regime="init", gap=64)
    case = make(N=N, S=S, slots=N + 1, state_dtype=state_dtype, v_first=v_first, device=device, **options)
    slots = list(range(N, 0, -1))
    check(case, run(case, backend, slots), slots, {slot: (n, S) for n, slot in enumerate(slots)})


def test_pool_beyond_2_31_elements(backend, device):
    """Slot 10,950 of a bf16 pool of 11,000 x 12 x 128 x 128: its offset does not fit 31 bits. On a CPU small states lie as far apart."""
    H, D, slots, apart = *((12, 128) if device.type == "cuda" else (1, 8)), 11000, 12 * 128 * 128
    pool = vast(slots * apart, torch.bfloat16, device).as_strided((slots, H, D, D), (apart, D * D, D, 1))
    case = make(N=1, H=H, HV=H, K=D, V=D, slots=2, used=[1], gap=0, state_dtype=torch.bfloat16, device=device)
    pool[10950] = case.pool[1]
    o = run(case, backend, [10950], state_pool=pool)
    answer = case.oracle(0, 1)
    assert_matches("o", o[0], answer[0])
    assert_matches("state", pool[10950], answer[1][1])
    pool[10950] = 0
    assert not pool.any()


@pytest.mark.parametrize("gate", ["none", "softplus", "bounded"])
@pytest.mark.parametrize("lengths", [None, (0, 3, 1, 5)])
@pytest.mark.parametrize("state_v_first", [True, False])
def test_fused_recurrent_kda(backend, gate, lengths, state_v_first, device):
    case = make_case(
        T=9, H=1, HV=2, K=16, V=24, lengths=lengths, pad_to=11, raw=gate != "none", bounded=gate == "bounded", state_v_first=state_v_first,
        device=device,
    ) if lengths else make_case(
        B=2, T=9, H=1, HV=2, K=16, V=24, raw=gate != "none", bounded=gate == "bounded", state_v_first=state_v_first, device=device
    )  # fmt: skip
    args = {k: v for k, v in case.args.items() if k not in ("chunk_size", "safe_gate")}
    if gate == "none":
        args.pop("lower_bound", None)
    o, final = fused_recurrent_kda(**args, backend=backend)
    for name, got, want in zip(("o", "final_state"), (o, final), case.oracle):
        assert_matches(name, got, want)


@pytest.mark.parametrize("raw", [True, False])
def test_fused_recurrent_kda_with_states_in_place(backend, raw, device):
    """The serving form of fla's internal decode entry: ragged rows, a pool, slots, optional input stages."""
    case = make(lengths=[2, 1, 3], slots=9, used=[4, 2, 7], v_first=False, device=device)
    t, p = case.tokens, case.params
    g, beta, gate = t["gate"], t["beta"], dict(p)
    if not raw:
        _, _, _, g, beta = prepare(*(t[n] for n in TOKENS), **p, gate="bounded", qk_l2norm=False, beta_sigmoid=True, neg_eigval=False)
        gate = {}
    cu = torch.tensor([0, 2, 3, 6], device=device)
    slots = torch.tensor([4, 2, 7], dtype=torch.int32, device=device)
    options = dict(use_gate_in_kernel=raw, use_beta_sigmoid_in_kernel=raw, use_qk_l2norm_in_kernel=True, backend=backend)
    o, final = fused_recurrent_kda(
        t["q"], t["k"], t["v"], g, beta, initial_state=case.pool, cu_seqlens=cu, state_indices=slots, **gate, **options
    )
    assert final is case.pool
    check(case, o, [4, 2, 7], {4: (0, 2), 2: (1, 1), 7: (2, 3)})


def test_fused_recurrent_kda_updates_its_initial_state(backend, device):
    case = make(N=2, S=2, slots=2, used=[0, 1], device=device)
    out = torch.empty_like(case.tokens["v"])
    tokens = [case.tokens[n] for n in TOKENS]
    options = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True)
    o, final = fused_recurrent_kda(
        *tokens, **case.params, initial_state=case.pool, inplace_final_state=True, out=out, backend=backend, **options
    )
    assert o is out and final is case.pool
    check(case, o, [0, 1], {0: (0, 2), 1: (1, 2)})
    with pytest.raises(ValueError, match="inplace_final_state is False"):
        fused_recurrent_kda(*tokens, **case.params, inplace_final_state=False, state_indices=torch.tensor([0, 1]), **options)
    with pytest.raises(ValueError, match="initial_state is None"):
        fused_recurrent_kda(*tokens, **case.params, state_indices=torch.tensor([0, 1]), **options)


def test_autocast_and_parameters_change_nothing(backend, device):
    """Under autocast, in grad mode, with the layer's own parameters: the same bits, no graph and a pool that stays plain."""
    want, case = make(N=2, S=2, device=device), make(N=2, S=2, device=device)
    o = run(want, backend, [1, 2])
    case.params = {n: torch.nn.Parameter(x) if isinstance(x, torch.Tensor) else x for n, x in case.params.items()}
    with torch.autocast(device.type, torch.bfloat16):
        got = run(case, backend, [1, 2])
    assert torch.equal(got, o) and torch.equal(case.pool[1:3], want.pool[1:3])
    assert not got.requires_grad and not case.pool.requires_grad


def test_states_in_place_are_checked_as_any_other_call(backend, device):
    case = make(N=2, S=2, slots=4, used=[0, 1], device=device)
    tokens = [case.tokens[n] for n in TOKENS]
    packed = [x.flatten(0, 1)[None] for x in tokens]

    def refused(sentence, tokens=tokens, error=ValueError, **changes):
        options = dict(initial_state=case.pool[:2], inplace_final_state=True, state_v_first=True, backend=backend)
        with pytest.raises(error) as e:
            fused_recurrent_kda(*tokens, **{**options, **changes})
        assert sentence in str(e.value) and "\n" not in str(e.value)

    refused("initial_state's shape is [1, ", initial_state=case.pool[:1])
    refused("initial_state's shape is [4, ", initial_state=case.pool)
    refused("allow_neg_eigval is True", allow_neg_eigval=True)
    refused("lower_bound is -7.0", lower_bound=-7.0)
    refused("scale is a str", scale="a", error=TypeError)
    refused("initial_state is a list", initial_state=[1], error=TypeError)
    refused("initial_state's shape is [2, ", state_v_first=False)  # and no argument by a name of kda_decode's
    refused("initial_state's dtype is torch.float64", initial_state=case.pool[:2].double())
    refused("g's shape is ", [*tokens[:3], tokens[3][..., :-1], tokens[4]])
    refused("fused_recurrent_kda with states in place has no gradient", [tokens[0].clone().requires_grad_(), *tokens[1:]])
    refused("cu_seqlens's shape is []", packed, cu_seqlens=torch.tensor(4, device=device))
    if device.type == "cpu":
        refused("at most T = 4", packed, cu_seqlens=torch.tensor([0, 2, 9]))
        refused("cu_seqlens[2] is 1", packed, cu_seqlens=torch.tensor([0, 2, 1]))
    options = dict.fromkeys(("A_log", "dt_bias", "scale", "state_indices", "num_accepted", "out", "lower_bound"))
    stages = dict.fromkeys(("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), False)
    options |= dict(state_pool=case.pool[:2], cu_seqlens=torch.tensor([0, 2, 4], device=device), state_v_first=True, backend=backend)
    with pytest.raises(ValueError, match="at most T = 4"):
        recurrent_in_pool(*packed, **options, **stages, cu_seqlens_cpu=torch.tensor([0, 2, 9]))
    with pytest.raises(ValueError, match="cu_seqlens_cpu is given; it must be None without cu_seqlens"):
        recurrent_in_pool(*tokens, **{**options, "cu_seqlens": None}, **stages, cu_seqlens_cpu=torch.tensor([0, 2, 4]))
    assert_untouched(case, set())


def test_config_keeps_the_state_tile_in_registers(backend):
    for K in (1, 16, 100, 128, 256):
        for V in (1, 64, 256):
            for heads in (1, 32, 512, 2048, 8192):
                for state_bytes in (2, 4):
                    for v_first in (True, False):
                        c = config(K, V, state_bytes, v_first, heads)
                        assert c.block_v * K <= (64 if v_first or state_bytes == 4 else 128) * 32 * c.num_warps  # state values per lane

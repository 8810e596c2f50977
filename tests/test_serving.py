"""kda_prefill and its meeting with kda_decode, and the custom operators."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from serving_case import TOKENS, assert_matches, assert_untouched, cu, indices, make

from openkda import Checkpoints, chunk_kda, kda_decode, kda_prefill
from openkda.testing import assert_close

BACKENDS = ["portable", "torch"]


def prefill(case, backend, slots, **options):
    options.setdefault("has_initial_state", None)
    options.setdefault("cu_seqlens", cu(case))
    return kda_prefill(**case.arguments(state_indices=indices(slots, case), backend=backend, **options))


def chunk_twin(case, n, slot, tokens=None, backend="torch"):
    """(o, last state) of sequence n by chunk_kda: the pool may not add to its error. With `tokens`, later ones neither fade nor write: the
    last state is that after so many, summed in the order of the whole call."""
    q, k, v, gate, beta = (case.tokens[x].flatten(0, 1)[None, case.rows(n)].clone() for x in TOKENS)
    if tokens is not None:
        gate[:, tokens:] = beta[:, tokens:] = -1e4  # logits
    initial = None if slot is None else case.before.as_strided(case.pool.shape, case.pool.stride())[slot][None].float()
    o, final = chunk_kda(
        q, k, v, gate, beta, **case.params, initial_state=initial, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, output_final_state=True, state_v_first=case.v_first, backend=backend,
    )  # fmt: skip
    return o[0], final[0]


def check(case, o, reads, writes):
    """o [1, T, ..] of every sequence, given the slot it read (None: zeros), and the slot it wrote; nothing else was touched."""
    for n, (slot, target) in enumerate(zip(reads, writes)):
        want, twin = case.oracle(n, slot), chunk_twin(case, n, slot)
        assert_close(f"o of sequence {n}", o[0, case.rows(n)], want[0], twin[0])
        assert_close(f"slot {target}", case.pool[target], want[1][-1], twin[1].to(case.pool.dtype))
    assert_untouched(case, set(writes))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("bounded, regime", [(True, "random"), (True, "mixed"), (False, "init"), (False, "extreme")])
def test_ragged_batch_of_one_token_and_long_sequences(backend, v_first, bounded, regime, device):
    case = make(lengths=[1, 40, 0, 3], slots=7, used=[1, 2, 3, 5], v_first=v_first, bounded=bounded, regime=regime, device=device)
    o = prefill(case, backend, [5, 1, 3, 2])
    check(case, o, [5, 1, 3, 2], [5, 1, 3, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_has_initial_state_false_never_reads_the_slot(backend, device):
    """The slot holds NaN from its previous owner, and the first piece has one token."""
    case = make(lengths=[1, 20, 0], slots=6, used=[2], device=device)
    flags = torch.tensor([False, True, False], device=device)
    o = prefill(case, backend, [1, 2, 4], has_initial_state=flags)
    check(case, o, [None, 2, None], [1, 2, 4])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pad_slot", [-1, 0])
def test_pads_give_zeros(backend, pad_slot, device):
    case = make(lengths=[5, 18, 2, 4], slots=5, used=[3], device=device)
    o = prefill(case, backend, [pad_slot, 3, 5, -9], pad_slot=pad_slot)
    assert_close("o", o[0, 5:23], case.oracle(1, 3)[0], chunk_twin(case, 1, 3)[0])
    assert (o[0, :5] == 0).all() and (o[0, 23:] == 0).all()
    assert_untouched(case, {3})


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_last_sequence_are_zeros(backend, device):
    """An engine pads the token axis, and cu_seqlens by repeating its last entry."""
    case = make(lengths=[6, 17], device=device)
    tail = torch.nan
    short = dict(case.tokens)
    case.tokens = {n: torch.cat([x, torch.full_like(x[:, :4], tail)], 1) for n, x in short.items()}
    padded = torch.tensor([0, 6, 23, 23, 23], device=device)
    o = prefill(case, backend, [1, 2, -1, -1], cu_seqlens=padded)
    case.tokens = short
    assert (o[0, 23:] == 0).all()
    check(case, o[:, :23], [1, 2], [1, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_of_tables(backend, device):
    """Slots, flags and bounds with other entries between theirs."""
    case = make(lengths=[5, 18, 2], used=[2, 3], device=device)
    column = lambda values, other: torch.stack([values, torch.full_like(values, other)], 1)[:, 0]
    flags = column(torch.tensor([True, False, True], device=device), True)
    o = prefill(case, backend, [2, 1, -1], has_initial_state=flags, cu_seqlens=column(cu(case), 1))
    check(case, o[:, :23], [2, None], [2, 1])
    assert (o[0, 23:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_checkpoints(backend, state_dtype, device):
    case = make(lengths=[40, 3, 32], slots=5, used=[1, 2, 3], state_dtype=state_dtype, device=device)
    states = torch.full((5, *case.pool.shape[1:]), float("nan"), device=device)
    sequence, offset = [0, 2, 0, 2, 2], [32, 16, 16, 32, 16]
    o = prefill(case, backend, [1, 2, 3], checkpoints=Checkpoints(states, sequence, offset))
    check(case, o, [1, 2, 3], [1, 2, 3])
    for m, (n, p) in enumerate(zip(sequence, offset)):
        want, twin = case.oracle(n, n + 1)[1][p], chunk_twin(case, n, n + 1, tokens=p)[1]
        assert_close(f"checkpoint {m}", states[m], want, twin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("split", [0, 1, 33, 48])
def test_prefill_then_decode_equals_one_prefill(backend, v_first, split, device):
    """K != V, so a state read in the other layout would show."""
    case = make(lengths=[48], slots=4, used=[2], K=16, V=40, v_first=v_first, device=device)
    want_o, want_states = case.oracle(0, 2)
    whole = case.tokens
    case.tokens = {n: x[:, :split] for n, x in whole.items()}
    o = torch.empty_like(whole["v"])
    o[:, :split] = prefill(case, backend, [2], cu_seqlens=torch.tensor([0, split], device=device))
    for t in range(split, 48, 3):
        case.tokens = {n: x[:, t : t + 3] for n, x in whole.items()}
        o[:, t : t + 3] = kda_decode(**case.arguments(state_indices=indices([2], case), backend=backend))
    case.tokens = whole
    twin = chunk_twin(case, 0, 2)
    assert_close("o", o[0], want_o, twin[0])
    assert_close("state", case.pool[2], want_states[-1], twin[1])


@pytest.mark.gpu
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("split", [1, 100, 8191])
def test_long_splits(split, v_first, device):
    """8192 tokens at once against a piece, then the rest (one token of it decoded), bf16."""
    case = make(
        lengths=[8192], slots=4, used=[1, 2], H=2, HV=2, K=128, V=64, dtype=torch.bfloat16, regime="init", v_first=v_first, device=device
    )  # fmt: skip
    case.pool[2] = case.pool[1]
    one = prefill(case, None, [1])
    whole = case.tokens
    case.tokens = {n: x[:, :split] for n, x in whole.items()}
    parts = [prefill(case, None, [2], cu_seqlens=torch.tensor([0, split], device=device))]
    rest = slice(split, None) if split == 8191 else slice(split, 8191)
    if split < 8191:
        case.tokens = {n: x[:, rest] for n, x in whole.items()}
        parts.append(prefill(case, None, [2], cu_seqlens=torch.tensor([0, 8191 - split], device=device)))
    case.tokens = {n: x[:, 8191:] for n, x in whole.items()}
    parts.append(kda_decode(**case.arguments(state_indices=indices([2], case))))
    both = torch.cat(parts, 1)
    assert (both.double() - one.double()).norm() / one.double().norm() < 0.0048 * 2
    assert (case.pool[2].double() - case.pool[1].double()).norm() / case.pool[1].double().norm() < 0.0040 * 2


def test_out_is_written_in_place(device):
    case = make(lengths=[4, 9], device=device)
    out = torch.full((1, 13, 2, 24), float("nan"), device=device, dtype=torch.bfloat16)
    o = prefill(case, None, [1, 2], out=out)
    assert o is out
    assert_matches("o", out[0, :4], case.oracle(0, 1)[0].to(torch.bfloat16).double())


def test_calls_without_values():
    """On the meta device the operators' fakes tell the shapes."""
    case = make()
    args = case.arguments(state_indices=indices([1, 2], case))
    args = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in args.items()}
    assert kda_decode(**args).shape == case.tokens["v"].shape


def test_checkpoints_named_by_tensors(device):
    case, twin = (make(lengths=[4, 18], device=device) for _ in range(2))
    states, want = (torch.empty(1, 2, 24, 16, device=device) for _ in range(2))
    prefill(case, "torch", [1, 2], checkpoints=Checkpoints(states, torch.tensor([1]), torch.tensor([16])))
    prefill(twin, "torch", [1, 2], checkpoints=Checkpoints(want, [1], [16]))
    assert torch.equal(states, want)


def test_example_engine_agrees_with_one_prefill(monkeypatch, capsys):
    """examples/serve.py checks itself: pieces, a prefix-cache hit, verified drafts against one prefill of every text."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    serve = importlib.import_module("serve")
    sizes = {"requests": 3, "tokens": 5, "prompt": 80, "piece": 64, "layers": 1, "heads": 1, "head-dim": 16}
    serve.main([f"--{name}={value}" for name, value in sizes.items()])
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "prefix cache: 2 hits" in printed and "largest logit gap" in printed


def op_arguments(name, case):
    """Positional arguments of the custom operator for a small call."""
    tokens = [case.tokens[n] for n in ("q", "k", "v", "gate", "beta")]
    out = torch.empty_like(case.tokens["v"])
    head = (*tokens, out, case.params["A_log"], case.params["dt_bias"], case.pool, indices([1, 2], case))
    if name == "kda_decode":
        return (*head, None, None, case.params["lower_bound"], None, -1, False, True, False, True, True, True, False, None)
    return (*head, None, cu(case), None, None, [], [], case.params["lower_bound"], None, -1, True, False, True, None)


@pytest.mark.parametrize("name", ["kda_decode", "kda_prefill"])
def test_opcheck(name, device):
    case = make(N=2, device=device) if name == "kda_decode" else make(lengths=[2, 3], device=device)
    case.storage.nan_to_num_()
    torch.library.opcheck(getattr(torch.ops.openkda, name).default, op_arguments(name, case))


COMPILED_STEP = """
import torch
from serving_case import make
from openkda import kda_decode

device = "cuda" if torch.cuda.is_available() else "cpu"
case, twin = make(N=2, device=device), make(N=2, device=device)
weight = torch.randn(24, 24, device=device)
step = lambda args: kda_decode(**args) @ weight
compiled = torch.compile(step, fullgraph=True)
index = torch.tensor([1, 2], dtype=torch.int32, device=device)
for _ in range(3):
    got, want = compiled(case.arguments(state_indices=index)), step(twin.arguments(state_indices=index))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
assert torch.equal(case.pool[1:3], twin.pool[1:3])
"""


def test_compile_fullgraph_around_a_decode_step():
    """In a process of its own: the compiler must see torch.empty as it is, not filled with NaN."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", COMPILED_STEP], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_graph_replay_with_changing_indices_and_lengths(device):
    """One captured ragged decode step, padded to 4 sequences and 6 rows; tables change between replays, nothing is recompiled."""
    case = make(lengths=[1, 2, 2, 1], H=2, HV=2, K=64, V=128, slots=9, used=list(range(1, 9)), device=device)
    args = case.arguments(out=torch.empty_like(case.tokens["v"]), state_indices=indices([1, 2, 3, 4], case), cu_seqlens=cu(case))
    storage = case.storage.clone()
    kda_decode(**args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda_decode(**args)
    for slots, lengths in (([5, 1, -1, 7], [1, 2, 2, 1]), ([8, 2, 3, -1], [3, 1, 2, 0]), ([-1, -1, -1, 6], [0, 0, 0, 1])):
        args["state_indices"].copy_(indices(slots, case))
        args["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        case.storage.copy_(storage)
        args["out"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        case.lengths = lengths
        flat = args["out"].flatten(0, 1)
        for n, slot in enumerate(slots):
            if slot < 0:
                assert (flat[case.rows(n)] == 0).all()
            else:
                want = case.oracle(n, slot)
                assert_matches(f"o {n}", flat[case.rows(n)], want[0])
                assert_matches(f"slot {slot}", case.pool[slot], want[1][-1])
        assert_untouched(case, {s for s in slots if s >= 0})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["portable", None])
def test_prefill_graph_replay_with_changing_slots_and_lengths(backend, device):
    """One captured prefill of up to four sequences in 200 rows; cu_seqlens is padded by repeating its last entry."""
    case = make(
        lengths=[60, 1, 99, 40], H=2, HV=2, K=128, V=128, slots=9, used=list(range(1, 9)), dtype=torch.bfloat16, device=device
    )  # fmt: skip
    table, flags, out = indices([1, 2, 3, 4], case), torch.ones(4, dtype=torch.bool, device=device), torch.empty_like(case.tokens["v"])
    args = case.arguments(state_indices=table, has_initial_state=flags, cu_seqlens=cu(case), out=out, backend=backend)
    kda_prefill(**args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda_prefill(**args)
    for slots, lengths, initial in (([5, 1, 3, 7], [3, 150, 30, 17], [1, 0, 1, 1]), ([8, -1, 2, -1], [128, 5, 1, 0], [1, 1, 1, 1])):
        table.copy_(indices(slots, case))
        flags.copy_(torch.tensor(initial, dtype=torch.bool))
        args["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        case.storage.copy_(case.before)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        case.lengths = lengths
        for n, (slot, own) in enumerate(zip(slots, initial)):
            rows = out[0, case.rows(n)]
            if slot < 0:
                assert (rows == 0).all()
                continue
            want, twin = case.oracle(n, slot if own else None), chunk_twin(case, n, slot if own else None, backend=backend)
            assert_close(f"o {n}", rows, want[0], twin[0])
            assert_close(f"slot {slot}", case.pool[slot], want[1][-1], twin[1])
        assert (out[0, sum(lengths) :] == 0).all()
        assert_untouched(case, {s for s in slots if s >= 0})


@pytest.mark.gpu
def test_decode_never_allocates_nor_waits(device):
    case = make(N=4, H=2, HV=2, K=128, V=128, slots=8, device=device)
    args = case.arguments(out=torch.empty_like(case.tokens["v"]), state_indices=indices([1, 2, 3, 4], case))
    kda_decode(**args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            kda_decode(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_repeated_calls_are_bit_equal(device):
    case = make(N=256, H=4, HV=4, K=128, V=128, slots=257, used=list(range(1, 257)), device=device)
    table = torch.arange(1, 257, dtype=torch.int32, device=device)
    first = None
    for _ in range(100):
        case.storage.copy_(case.before)
        o = kda_decode(**case.arguments(state_indices=table))
        if first is None:
            first = o, case.pool[1:].clone()
        assert torch.equal(o, first[0]) and torch.equal(case.pool[1:], first[1])

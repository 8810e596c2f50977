"""kda_fused_decode: convolution, recurrence and gated norm in one kernel against their separate definition in fp64."""

import pytest
import torch
import torch.nn.functional as F
from serving_case import assert_matches, assert_untouched, make

from openkda import kda_fused_decode

pytestmark = pytest.mark.parametrize("backend", ["portable", "torch"])


class Step:
    """A serving case with convolution, norm and windows; NaN in every window that is not in use."""

    def __init__(self, *, W=4, bias=True, conv_dtype=None, tokens_last=False, device="cpu", **options):
        self.case = case = make(device=device, **options)
        gen = torch.Generator().manual_seed(7)
        draw = lambda *shape: torch.randn(*shape, generator=gen).to(device)
        dtype = case.tokens["v"].dtype
        C = 2 * case.tokens["q"][0, 0].numel() + case.tokens["v"][0, 0].numel()
        self.z = draw(*case.tokens["v"].shape).to(dtype)
        self.weight, self.bias = draw(C, W), draw(C) if bias else None
        self.norm = draw(case.tokens["v"].shape[-1])
        slots = case.pool.shape[0]
        windows = torch.full((slots, C, W - 1), float("nan"), dtype=conv_dtype or dtype, device=device)
        for slot in case.used:
            windows[slot] = draw(C, W - 1)
        self.windows = windows.mT.contiguous().mT if tokens_last else windows
        self.windows_before = self.windows.clone()

    def run(self, backend, indices, tokens=None, **options):
        device = self.case.pool.device
        if "num_accepted" in options:
            options["num_accepted"] = torch.tensor(options["num_accepted"], device=device)
        args = self.case.arguments(**options)
        z = self.z
        if tokens is not None:
            args.update({n: args[n][:, tokens] for n in ("q", "k", "v", "gate", "beta")})
            z = z[:, tokens]
        return kda_fused_decode(
            output_gate=z, conv_weight=self.weight, conv_bias=self.bias, norm_weight=self.norm, conv_pool=self.windows,
            state_indices=torch.tensor(indices, dtype=torch.int32, device=device), backend=backend, **args,
        )  # fmt: skip

    def oracle(self, n, slot):
        """fp64: outputs [S, HV, V], states [S + 1, ..], windows [S + 1, C, W - 1] of sequence n."""
        case, W = self.case, self.weight.shape[1]
        q, k, v = (case.tokens[x][n].double() for x in "qkv")
        x = torch.cat([t.flatten(1) for t in (q, k, v)], 1).mT  # [C, S]
        taps = torch.cat([self.windows_before[slot].double(), x], 1)
        y = F.conv1d(taps[None], self.weight.double()[:, None], groups=taps.shape[0])[0]
        if self.bias is not None:
            y = y + self.bias.double()[:, None]
        y = F.silu(y).mT.split([q[0].numel(), k[0].numel(), v[0].numel()], 1)
        kept = case.tokens
        case.tokens = {name: t[n : n + 1].double() for name, t in kept.items()}
        for name, part, like in zip("qkv", y, (q, k, v)):
            case.tokens[name] = part.view(1, *like.shape)
        lengths, case.lengths = case.lengths, [q.shape[0]]
        o, states = case.oracle(0, slot)
        case.tokens, case.lengths = kept, lengths
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * self.norm.double() * torch.sigmoid(self.z[n].double())
        return o, states, torch.stack([taps[:, t : t + W - 1] for t in range(x.shape[1] + 1)])

    def check(self, o, reads, writes):
        answers = [None if slot is None else self.oracle(n, slot) for n, slot in enumerate(reads)]
        for n, answer in enumerate(answers):
            if answer is None:
                assert (o[n] == 0).all()
            else:
                assert_matches(f"output of sequence {n}", o[n], answer[0])
        for slot, (n, done) in writes.items():
            assert_matches(f"state in slot {slot}", self.case.pool[slot], answers[n][1][done])
            assert torch.equal(self.windows[slot].double(), answers[n][2][done].to(self.windows.dtype).double())
        assert_untouched(self.case, set(writes))
        rest = [s for s in range(self.windows.shape[0]) if s not in writes]
        assert torch.equal(self.windows[rest].nan_to_num(99.0), self.windows_before[rest].nan_to_num(99.0))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("S", [1, 3])
def test_equals_its_parts(backend, bounded, v_first, S, device):
    step = Step(N=2, S=S, H=2, HV=4, K=16, V=24, bounded=bounded, v_first=v_first, regime="mixed", device=device)
    step.check(step.run(backend, [2, 1]), [2, 1], {2: (0, S), 1: (1, S)})


@pytest.mark.parametrize("v_first", [True, False])
def test_state_in_blocks(backend, v_first, device, monkeypatch):
    """Many programs take the state in blocks of V; V need not fill the last one."""
    from openkda import serving_step
    from openkda.portable import fused_step

    monkeypatch.setattr(fused_step, "config", lambda *args: fused_step.Config(block_v=8, num_warps=1))
    monkeypatch.setattr(serving_step, "_launches", {})
    step = Step(N=2, H=1, HV=2, K=16, V=20, v_first=v_first, device=device)
    step.check(step.run(backend, [2, 1]), [2, 1], {2: (0, 1), 1: (1, 1)})


@pytest.mark.parametrize("W", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens_last", [True, False])
def test_taps_and_window_strides(backend, W, tokens_last, device):
    step = Step(N=2, S=2, W=W, bias=W != 3, tokens_last=tokens_last, K=12, V=9, device=device)
    step.check(step.run(backend, [1, 2]), [1, 2], {1: (0, 2), 2: (1, 2)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("conv_dtype", [None, torch.float32])
def test_dtypes(backend, dtype, conv_dtype, device):
    step = Step(N=2, S=2, dtype=dtype, conv_dtype=conv_dtype, device=device)
    step.check(step.run(backend, [1, 2]), [1, 2], {1: (0, 2), 2: (1, 2)})


def test_pads_and_wild_indices(backend, device):
    step = Step(N=4, slots=5, used=[3], device=device)
    step.check(step.run(backend, [-1, 3, 5, -8]), [None, 3, None, None], {3: (1, 1)})


def test_speculation_overwrites_the_slot_it_reads(backend, device):
    """num_accepted = 1 reads column 0, which the first token's state and window replace while later tokens still need the old taps."""
    step = Step(N=2, S=3, slots=9, used=[1, 2, 3, 5, 6, 7], device=device)
    table = [[1, 2, 3], [5, 6, 7]]
    o = step.run(backend, table, num_accepted=[1, 3])
    step.check(o, [1, 7], {table[n][t]: (n, t + 1) for n in range(2) for t in range(3)})


@pytest.mark.parametrize("accept", [0, 1, 2, 3, 4])
def test_draft_rounds_equal_sequential_decoding(backend, accept, device):
    step = Step(N=1, S=8, HV=1, slots=8, used=[1], device=device)
    want, states, windows = step.oracle(0, 1)
    table, base = [1, 2, 3, 4, 5], 0
    for start in range(0, 2 * accept + 1, max(accept, 1)):
        if start + 4 > 8:
            break
        order = [table[base], *(s for i, s in enumerate(table) if i != base)]
        o = step.run(backend, [order], tokens=slice(start, start + 4), verify=True)
        table, base = order, accept
        assert_matches("o", o[0, :accept], want[start : start + accept]) if accept else None
        assert_matches("state", step.case.pool[table[base]], states[start + accept])
        assert torch.equal(step.windows[table[base]].double(), windows[start + accept])


def test_verify_with_one_column_writes_nothing(backend, device):
    step = Step(N=2, S=2, device=device)
    step.check(step.run(backend, [1, 2], verify=True), [1, 2], {})


def test_opcheck(backend, device):
    if backend == "portable":
        pytest.skip("one operator for both backends")
    step = Step(N=2, device=device)
    case = step.case
    case.storage.nan_to_num_()
    tokens = [case.tokens[n] for n in ("q", "k", "v", "gate", "beta")]
    index = torch.tensor([1, 2], device=device)
    torch.library.opcheck(
        torch.ops.openkda.kda_fused_decode.default,
        (*tokens, torch.empty_like(case.tokens["v"]), case.params["A_log"], case.params["dt_bias"], case.pool, index, None, step.z,
         step.norm, step.weight, step.bias, step.windows.nan_to_num(), 1e-5, -5.0, None, -1, False, True, False, True, None),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("conv_weight", torch.zeros(5, 4), "conv_weight's shape"),
        ("conv_pool", torch.zeros(6, 80, 2), "conv_pool's shape"),
        ("norm_weight", torch.zeros(3), "norm_weight's shape"),
        ("conv_bias", torch.zeros(3), "conv_bias's shape"),
        ("output_gate", torch.zeros(2, 1, 2, 3), "output_gate's shape"),
    ],
)
def test_refusals(backend, name, value, sentence):
    step = Step(N=2)
    args = dict(output_gate=step.z, conv_weight=step.weight, conv_bias=step.bias, norm_weight=step.norm, conv_pool=step.windows)
    args[name] = value
    with pytest.raises(ValueError, match=sentence):
        kda_fused_decode(state_indices=torch.tensor([1, 2]), backend=backend, **args, **step.case.arguments())


def test_autocast_and_parameters_change_nothing(backend, device):
    """Under autocast, in grad mode, with the layer's own parameters: the same bits, no graph and pools that stay plain."""
    want, step = Step(N=2, device=device), Step(N=2, device=device)
    o = want.run(backend, [1, 2])
    for name in ("weight", "bias", "norm"):
        setattr(step, name, torch.nn.Parameter(getattr(step, name)))
    with torch.autocast(device.type, torch.bfloat16):
        got = step.run(backend, [1, 2])
    assert torch.equal(got, o) and torch.equal(step.case.pool[1:3], want.case.pool[1:3])
    assert torch.equal(step.windows[1:3], want.windows[1:3])
    assert not got.requires_grad and not step.case.pool.requires_grad and not step.windows.requires_grad


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        (dict(conv_weight=None), ValueError, "conv_weight is None; it must be a tensor"),
        (dict(conv_weight=[1]), TypeError, "conv_weight is a list; it must be a torch.Tensor"),
        (dict(q=[1]), TypeError, "q is a list; it must be a torch.Tensor"),
        (dict(v=None), TypeError, "v is a NoneType; it must be a torch.Tensor"),
        (dict(scale=torch.tensor(0.5)), TypeError, "scale is a Tensor; it must be a number or None"),
        (dict(norm_eps=None), TypeError, "norm_eps is a NoneType; it must be a number"),
        (dict(norm_eps=-1.0), ValueError, "norm_eps is -1.0; it must be finite and at least 0"),
        (dict(norm_eps=float("nan")), ValueError, "norm_eps is nan; it must be finite and at least 0"),
        (dict(norm_eps=1e39), ValueError, "norm_eps is 1e+39; it must be finite and at least 0 in fp32"),
        (dict(norm_weight=torch.zeros(24, device="meta")), ValueError, "norm_weight's device is meta; it must be cpu, where q is"),
    ],
    ids=str,
)
def test_refuses_types_in_one_sentence(backend, changes, error, sentence):
    step = Step(N=2)
    args = dict(output_gate=step.z, conv_weight=step.weight, conv_bias=step.bias, norm_weight=step.norm, conv_pool=step.windows)
    args = {**args, **step.case.arguments(), **changes}
    with pytest.raises(error) as e:
        kda_fused_decode(state_indices=torch.tensor([1, 2]), backend=backend, **args)
    assert str(e.value).startswith(sentence) and "\n" not in str(e.value)


@pytest.mark.gpu
@pytest.mark.parametrize("N, S", [(1, 1), (64, 1), (4, 4)])
def test_real_sizes(backend, N, S, device):
    step = Step(N=N, S=S, H=16, HV=16, K=128, V=128, slots=N + 1, dtype=torch.bfloat16, regime="init", device=device)
    slots = list(range(N, 0, -1))
    step.check(step.run(backend, slots), slots, {slot: (n, S) for n, slot in enumerate(slots)})


@pytest.mark.gpu
def test_256_sequences_are_bit_equal_over_100_runs(backend, device):
    """An in-place window once raced elsewhere when the grid exceeded a wave."""
    step = Step(N=256, H=4, HV=4, K=128, V=128, slots=257, used=list(range(1, 257)), dtype=torch.bfloat16, device=device)
    first = None
    for _ in range(100):
        step.case.storage.copy_(step.case.before)
        step.windows.copy_(step.windows_before)
        o = step.run(backend, list(range(1, 257)))
        result = o, step.case.pool[1:], step.windows[1:]
        if first is None:
            first = [x.clone() for x in result]
        assert all(torch.equal(a, b) for a, b in zip(result, first))

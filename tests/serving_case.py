"""One serving scenario: tensors of a call, a pool whose unused memory is NaN, and the fp64 answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openkda.reference import naive_recurrent_kda, prepare
from openkda.testing import assert_close, gate_logits

TOKENS = ("q", "k", "v", "gate", "beta")


@dataclass
class Case:
    tokens: dict[str, torch.Tensor]  # [N, S, ..], or [1, T, ..] with lengths
    params: dict[str, object]  # A_log, dt_bias, lower_bound
    pool: torch.Tensor  # [slots, HV, V, K] or K-first, NaN in every slot not in `used`
    storage: torch.Tensor  # what the pool is a view of, gaps between slots included
    before: torch.Tensor  # the storage as it was made
    used: list[int]
    lengths: list[int]
    v_first: bool
    options: dict[str, object]

    def arguments(self, **changes: object) -> dict[str, object]:
        return {**self.tokens, **self.params, "state_pool": self.pool, "state_v_first": self.v_first, **self.options, **changes}

    def rows(self, n: int) -> slice:
        return slice(sum(self.lengths[:n]), sum(self.lengths[: n + 1]))

    def oracle(
        self, n: int, slot: int | None, tokens: int | None = None, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence n from the state in `slot` (None: zeros), by the recurrence in `dtype`, fp64 or fp32: o [tokens, HV, V] and the states
        after each token [tokens + 1, ..]."""
        flat = [self.tokens[name].flatten(0, 1)[self.rows(n)][None, :tokens] for name in TOKENS]
        A_log, dt_bias, bound = (self.params[x] for x in ("A_log", "dt_bias", "lower_bound"))
        q, k, v, g, beta = prepare(
            *(x.to(dtype) for x in flat), A_log=A_log, dt_bias=dt_bias, gate="softplus" if bound is None else "bounded", lower_bound=bound,
            qk_l2norm=self.options.get("use_qk_l2norm_in_kernel", True), beta_sigmoid=True,
            neg_eigval=self.options.get("allow_neg_eigval", False),
        )  # fmt: skip
        HV, K, V = q.shape[2], q.shape[3], v.shape[3]
        S = torch.zeros(1, HV, K, V, dtype=dtype, device=q.device)
        if slot is not None:
            state = self.before.as_strided(self.pool.shape, self.pool.stride())[slot]
            S = (state.mT if self.v_first else state)[None].to(dtype)
        outs, states = [], [S]
        for t in range(q.shape[1]):
            o, S = naive_recurrent_kda(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), self.options.get("scale"), S, True)
            outs.append(o[0])
            states.append(S)
        flip = (lambda x: x.mT) if self.v_first else (lambda x: x)
        return torch.cat(outs) if outs else v[0, :0], flip(torch.cat(states))


def make(
    *, N: int = 2, S: int = 1, H: int = 1, HV: int = 2, K: int = 16, V: int = 24, lengths: list[int] | None = None, slots: int = 6,
    used: list[int] | None = None, regime: str = "random", bounded: bool = True, dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32, v_first: bool = True, gap: int = 5, dt_bias: bool = True, seed: int = 0,
    device: torch.device | str = "cpu", **options: object,
) -> Case:  # fmt: skip
    gen = torch.Generator().manual_seed(seed)
    B, T = (N, S) if lengths is None else (1, sum(lengths))
    draw = lambda *shape: torch.randn(*shape, generator=gen)
    logits, A_log, bias = gate_logits(regime, B * T, HV, K, bounded=bounded, generator=gen)
    tokens = dict(q=draw(B, T, H, K), k=draw(B, T, H, K), v=draw(B, T, HV, V), gate=logits.view(B, T, HV, K), beta=draw(B, T, HV))
    params = dict(A_log=A_log.to(device), dt_bias=bias.to(device) if dt_bias else None, lower_bound=-5.0 if bounded else None)
    E = HV * K * V
    storage = torch.full((slots * (E + gap),), float("nan"))
    pool = storage.to(device, state_dtype)
    view = pool.as_strided((slots, HV, V, K) if v_first else (slots, HV, K, V), (E + gap, K * V, K if v_first else V, 1))
    used = list(range(1, N + 1)) if used is None else used
    for slot in used:
        view[slot] = (0.1 * draw(*view.shape[1:])).to(device, state_dtype)
    tokens = {name: x.to(device, dtype) for name, x in tokens.items()}
    return Case(tokens, params, view, pool, pool.clone(), used, lengths or [S] * N, v_first, options)


def assert_untouched(case: Case, written: set[int]) -> None:
    """Every element of the storage outside the written slots has kept its bits (NaN included)."""
    same = (case.before.view(torch.uint8) == case.storage.view(torch.uint8)).view(case.storage.numel(), -1).all(1)
    stride, size = case.pool.stride(0), case.pool[0].numel()
    for slot in written:
        same[slot * stride : slot * stride + size] = True
    assert same.all(), f"{int((~same).sum())} elements outside slots {sorted(written)} were written"


def assert_matches(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """At most twice the error of rounding the fp64 answer to got's dtype."""
    assert_close(name, got, want, want.to(got.dtype))


def check(case: Case, o: torch.Tensor, reads: list[int | None], writes: dict[int, tuple[int, int]]) -> None:
    """o of every sequence, given the slot it read (None: skipped), and {slot: (sequence, tokens done)} of every slot written."""
    flat = o.flatten(0, 1)
    answers = [None if slot is None else case.oracle(n, slot) for n, slot in enumerate(reads)]
    for n, answer in enumerate(answers):
        if answer is None:
            assert (flat[case.rows(n)] == 0).all()
        else:
            assert_matches(f"o of sequence {n}", flat[case.rows(n)], answer[0])
    for slot, (n, done) in writes.items():
        assert_matches(f"slot {slot}", case.pool[slot], answers[n][1][done])
    assert_untouched(case, set(writes))


def indices(values: list, case: Case) -> torch.Tensor:
    """Slots as state_indices."""
    return torch.tensor(values, dtype=torch.int32, device=case.pool.device)


def cu(case: Case) -> torch.Tensor:
    """The case's cu_seqlens."""
    return torch.tensor([0, *case.lengths], dtype=torch.int32).cumsum(0).to(case.pool.device, torch.int32)

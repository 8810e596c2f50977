"""Kimi Delta Attention as a layer: projections, short convolution, KDA, gated output norm.

The layer of Kimi Linear (arXiv 2510.26692, section 3), for hidden states x [B, T, hidden_size]:

    q, k, v = silu(conv(q_proj x)), silu(conv(k_proj x)), silu(conv(v_proj x))     depthwise, causal, W taps
    gate    = f_b_proj f_a_proj x                      [B, T, HV, K] logits, activated inside the kernel
    beta    = b_proj x                                 [B, T, HV]    logits, sigmoid inside the kernel
    o       = kda(l2norm(q), l2norm(k), v, gate, beta, A_log, dt_bias)
    y       = o_proj (rms_norm(o) * sigmoid(g_b_proj g_a_proj x))

Everything a call leaves behind lives in a `KDACache`: the recurrent state and the last W-1 inputs of the convolution.
Padding masks and packed sequences take one path: valid tokens are packed, and every stage reads `cu_seqlens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openkda.backends import check_name
from openkda.ops import chunk_kda, fused_recurrent_kda
from openkda.problem import check_bounds, check_number, fail, moved_bounds
from openkda.serving_problem import check_types
from openkda.serving_step import kda_fused_decode
from openkda.short_conv import kernels_serve, short_conv

# Below this many tokens per sequence, and without gradients, the token-by-token kernel is the shorter way.
RECURRENT_TOKENS = 16
# What kda_fused_decode accepts: at most so many tokens, these taps, at most so many elements of a head's state.
FUSED_TOKENS, FUSED_TAPS, FUSED_STATE = 8, range(2, 9), 32768


@dataclass
class _Segment:
    """One call's entry states and inputs, kept so that its last tokens can be taken back."""

    conv_state: Tensor
    recurrent_state: Tensor
    qkv: Tensor  # [B, T, channels], before the convolution
    gate: Tensor  # [B, T, HV, K]
    beta: Tensor  # [B, T, HV]

    @property
    def tokens(self) -> int:
        return self.qkv.shape[1]


@dataclass
class KDACache:
    """What one KDA layer carries from call to call.

    Args:
        conv_state: the last W-1 inputs of the short convolution, [N, 2*H*K + HV*V, W-1] in the layer's activation
            dtype; None before the first call.
        recurrent_state: S, [N, HV, K, V] fp32; None before the first call. A decoding step updates both tensors in place,
            so keep a clone, not a reference, of a state to return to.
        rollback_window: how many of the latest tokens `KimiDeltaAttention.rollback` must be able to take back.
            The inputs of the calls that brought them are kept; 0 (the default) keeps none.
    """

    conv_state: Tensor | None = None
    recurrent_state: Tensor | None = None
    rollback_window: int = 0
    _segments: list[_Segment] = field(default_factory=list, repr=False)

    def __post_init__(self):
        if isinstance(self.rollback_window, bool) or not isinstance(self.rollback_window, int):
            raise TypeError(f"rollback_window is {self.rollback_window!r}; it must be an int")
        if self.rollback_window < 0:
            raise fail("rollback_window", self.rollback_window, "at least 0")

    def reorder(self, index: Tensor) -> None:
        """Select sequences, [M] int64: beam search, or dropping finished sequences. Forgets the rollback window."""
        if self.recurrent_state is not None:
            self.conv_state = self.conv_state.index_select(0, index)
            self.recurrent_state = self.recurrent_state.index_select(0, index)
        self._segments.clear()

    def _remember(self, segment: _Segment | None) -> None:
        """Keep a call for `rollback`; None is a call that cannot be taken back, nor can what came before it."""
        if segment is None or not self.rollback_window:
            self._segments.clear()
            return
        self._segments.append(_Segment(*(getattr(segment, f.name).detach() for f in fields(segment))))
        while sum(s.tokens for s in self._segments[1:]) >= self.rollback_window:
            self._segments.pop(0)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * sigmoid(gate) over the last dim, returned in x's dtype. x, gate [..., V]; weight [V]. Computes in
    fp32, or fp64 for fp64. On a GPU one Triton kernel, one more for the gradients; in a compiled graph torch's operators.
    ValueError where shapes differ."""
    if gate.shape != x.shape:
        raise fail("gate's shape", list(gate.shape), f"{list(x.shape)}, as x")
    if weight.shape != x.shape[-1:]:
        raise fail("weight's shape", list(weight.shape), str(list(x.shape[-1:])))
    if kernels_serve(x, weight) and kernels_serve(gate):
        from openkda.portable.gated_norm import gated_norm

        return gated_norm(x, gate, weight, eps)
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps)
    return (y * torch.sigmoid(gate.to(dtype))).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """`gated_rms_norm` with its weight [dim]."""

    def __init__(self, dim: int, eps: float = 1e-5, *, device: torch.device | str | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)


@dataclass(frozen=True)
class Packing:
    """Where the valid tokens of a padded batch go in one packed row; made once and shared by the layers of a model.

    Its shapes do not depend on the mask's values, so a layer with a mask compiles as one graph.
    """

    mask: Tensor  # [B, T] bool
    order: Tensor  # [B*T] int64: the valid tokens first, sequence by sequence
    cu_seqlens: Tensor  # [B+1] int32

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """From a mask [B, T], nonzero where the token counts."""
        mask = mask.bool()
        order = torch.argsort(~mask.flatten(), stable=True)
        return cls(mask, order, F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32))

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [1, B*T, D]."""
        return x.flatten(0, 1).index_select(0, self.order)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """[1, B*T, D] -> [B, T, D], zeros where the mask is zero."""
        y = torch.zeros_like(x).index_copy(1, self.order, x).view(*self.mask.shape, x.shape[-1])
        return torch.where(self.mask[..., None], y, 0)


class KimiDeltaAttention(nn.Module):
    """The KDA layer of Kimi Linear (arXiv 2510.26692).

    Args:
        hidden_size: width of the hidden states.
        num_heads: H, q and k heads.
        head_dim: K, key dim of a head.
        num_v_heads: HV, value heads, a multiple of `num_heads`; default `num_heads`. Value head h reads q/k head h // (HV/H).
        head_v_dim: V, value dim of a head; default `head_dim`. Also the rank of the two gate projections.
        conv_size: W, taps of the short convolution (at least 1); default 4.
        conv_bias: whether the convolutions have a bias; default False.
        lower_bound: None for the softplus gate, or a bound in [-5, 0) for the bounded gate.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1); default False.
        output_gate_bias: whether `g_b_proj` has a bias (fla's layer has, Kimi-Linear-48B has not); default False.
        norm_eps: epsilon of the output norm; default 1e-5.
        backend: name of the kernel backend, or None for the best that serves the problem.
        device: where the parameters are made; default torch's.

    Raises:
        ValueError: a size that does not fit, a bound outside [-5, 0), a negative or infinite epsilon, or a backend that is none.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 16,
        head_dim: int = 128,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        output_gate_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = head_dim if head_v_dim is None else head_v_dim
        self.conv_size, self.lower_bound, self.allow_neg_eigval, self.backend = conv_size, lower_bound, allow_neg_eigval, backend
        for name in ("hidden_size", "num_heads", "head_dim", "num_v_heads", "head_v_dim", "conv_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} is {size!r}; it must be an int")
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads={self.num_v_heads} must be a multiple of num_heads={num_heads}")
        check_number("lower_bound", lower_bound)
        if lower_bound is not None and not -5 <= lower_bound < 0:
            raise ValueError(f"lower_bound={lower_bound} must be None or in [-5, 0)")
        check_number("norm_eps", norm_eps, optional=False)
        if not 0 <= norm_eps < math.inf:
            raise ValueError(f"norm_eps={norm_eps} must be finite and at least 0")
        check_name(backend)

        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        gate_dim = self.num_v_heads * head_dim
        linear = lambda rows, columns: nn.Linear(rows, columns, bias=False, device=device)
        conv = lambda channels: nn.Conv1d(channels, channels, conv_size, groups=channels, bias=conv_bias, device=device)
        self.q_proj, self.k_proj = linear(hidden_size, self.key_dim), linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = conv(self.key_dim), conv(self.key_dim), conv(self.value_dim)
        self.f_a_proj, self.f_b_proj = linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, gate_dim)
        self.b_proj = linear(hidden_size, self.num_v_heads)
        self.g_a_proj = linear(hidden_size, self.head_v_dim)
        self.g_b_proj = nn.Linear(self.head_v_dim, self.value_dim, bias=output_gate_bias, device=device)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim, dtype=torch.float32, device=device))
        # Optimisers that read this mark (fla's convention) leave the two decay parameters out of weight decay.
        self.A_log._no_weight_decay = self.dt_bias._no_weight_decay = True
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, device=device)
        self.o_proj = linear(self.value_dim, hidden_size)
        with torch.no_grad():
            A_log, dt_bias = self.initial_decay()
            self.A_log.copy_(A_log)
            self.dt_bias.copy_(dt_bias)

    def initial_decay(self) -> tuple[Tensor, Tensor]:
        """Fresh A_log [HV] and dt_bias [HV*K] by the published initialisation (fla's layer, transformers' Kimi Linear).

        exp(A_log) uniform in [1, 16] for the softplus gate, 1 for the bounded gate; softplus(dt_bias) log-uniform in
        [1e-3, 1e-1], so a channel starts with a memory of ten to a thousand tokens per unit of exp(A_log).
        """
        device = self.A_log.device
        A_log = torch.zeros(self.num_v_heads, device=device)
        if self.lower_bound is None:
            A_log = torch.empty(self.num_v_heads, device=device).uniform_(1, 16).log()
        dt = torch.empty(self.dt_bias.numel(), device=device).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        return A_log, dt + torch.log(-torch.expm1(-dt))  # inverse of softplus, stable for small dt

    def extra_repr(self) -> str:
        gate = "softplus" if self.lower_bound is None else f"bounded({self.lower_bound})"
        return f"H={self.num_heads}, HV={self.num_v_heads}, K={self.head_dim}, V={self.head_v_dim}, W={self.conv_size}, gate={gate}"

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [B, T, hidden_size] -> q|k|v before the convolution [B, T, 2*H*K + HV*V], gate logits
        [B, T, HV, K], beta logits [B, T, HV]."""
        qkv = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)], -1)
        gate = self.f_b_proj(self.f_a_proj(hidden_states)).unflatten(-1, (self.num_v_heads, self.head_dim))
        return qkv, gate, self.b_proj(hidden_states)

    def _convolution(self) -> tuple[Tensor, Tensor | None]:
        """Weight [2*H*K + HV*V, 1, W] and bias of the three convolutions as one."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([c.weight for c in convs]), None if convs[0].bias is None else torch.cat([c.bias for c in convs])

    def convolve(self, qkv: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The short convolution of all three: q, k [B, T, H, K], v [B, T, HV, V] and the new window [N, channels, W-1]."""
        weight, bias = self._convolution()
        y, state = short_conv(qkv, weight, bias, state=state, cu_seqlens=cu_seqlens)
        q, k, v = y.split([self.key_dim, self.key_dim, self.value_dim], -1)
        heads = lambda x, count: x.unflatten(-1, (count, -1))
        return heads(q, self.num_heads), heads(k, self.num_heads), heads(v, self.num_v_heads), state

    def kernel_options(self) -> dict:
        """The keywords with which this layer calls `chunk_kda`, beside the tensors and the states."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_gate_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "backend": self.backend,
        }

    def kernel_inputs(self, hidden_states: Tensor) -> dict:
        """Everything `chunk_kda` gets for hidden_states [B, T, hidden_size] from a zero state, as its keywords."""
        qkv, gate, beta = self.project(hidden_states)
        q, k, v, _ = self.convolve(qkv)
        return {"q": q, "k": k, "v": v, "g": gate, "beta": beta} | self.kernel_options()

    def _attend(self, qkv: Tensor, gate: Tensor, beta: Tensor, conv_state: Tensor | None, recurrent_state: Tensor | None,
                cu_seqlens: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Convolution and KDA: o [B, T, HV, V], the new window, the new state (None unless `keep_state`)."""
        q, k, v, conv_state = self.convolve(qkv, conv_state, cu_seqlens)
        sequences = q.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 1)
        short = q.shape[0] * q.shape[1] <= RECURRENT_TOKENS * sequences and not torch.is_grad_enabled()
        short = short and not torch.compiler.is_compiling()  # to the compiler only chunk_kda is one operator
        kda, backend = (fused_recurrent_kda, self._step_backend()) if short else (chunk_kda, self.backend)
        o, recurrent_state = kda(
            q, k, v, gate, beta, initial_state=recurrent_state, output_final_state=keep_state, cu_seqlens=cu_seqlens,
            **self.kernel_options() | {"backend": backend},
        )  # fmt: skip
        return o, conv_state, recurrent_state

    def _check_cache(self, cache: KDACache, sequences: int) -> None:
        """A cache of so many sequences, both states or neither; the kernels look at the recurrent state's shape."""
        if not isinstance(cache, KDACache):
            raise TypeError(f"cache is a {type(cache).__name__}; it must be a KDACache or None")
        window, state = cache.conv_state, cache.recurrent_state
        if window is None and state is None:
            return
        check_types(("cache.conv_state", "cache.recurrent_state"), (window, state), ("cache.conv_state", "cache.recurrent_state"))
        if state.shape[:1] != (sequences,):
            raise ValueError(f"cache holds the states of {state.shape[0] if state.dim() else 0} sequences; it must hold {sequences}")
        wanted = (sequences, 2 * self.key_dim + self.value_dim, self.conv_size - 1)
        if window.shape != wanted or not window.is_floating_point():
            raise ValueError(
                f"cache.conv_state is {list(window.shape)} {window.dtype}; it must be {list(wanted)} in a floating-point dtype"
            )

    def _fused_step_serves(self, qkv: Tensor, cache: KDACache | None) -> bool:
        """Whether these tokens go on from a state and are few enough for the one-kernel step, which has no gradient and no fp64."""
        return (
            cache is not None
            and cache.recurrent_state is not None
            and not cache.recurrent_state.requires_grad
            and 1 <= qkv.shape[1] <= FUSED_TOKENS
            and self.conv_size in FUSED_TAPS
            and _power_of_two(self.head_dim) * _power_of_two(self.head_v_dim) <= FUSED_STATE
            and qkv.dtype != torch.float64
            and not torch.is_grad_enabled()
        )

    def _fused_step(self, qkv: Tensor, gate: Tensor, beta: Tensor, output_gate: Tensor, cache: KDACache) -> Tensor:
        """Convolution, KDA and output norm in one kernel, the cache's states updated in place: [B, T, HV, V]."""
        if cache.rollback_window:
            cache._remember(_Segment(cache.conv_state, cache.recurrent_state, qkv, gate, beta))
            cache.conv_state, cache.recurrent_state = cache.conv_state.clone(), cache.recurrent_state.clone()
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], -1)
        weight, bias = self._convolution()
        return kda_fused_decode(
            q.unflatten(-1, (self.num_heads, -1)), k.unflatten(-1, (self.num_heads, -1)), v.unflatten(-1, (self.num_v_heads, -1)),
            gate, beta, output_gate, A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.lower_bound, conv_weight=weight[:, 0],
            conv_bias=bias, norm_weight=self.o_norm.weight, norm_eps=self.o_norm.eps, state_pool=cache.recurrent_state,
            conv_pool=cache.conv_state, state_indices=torch.arange(qkv.shape[0], dtype=torch.int32, device=qkv.device),
            allow_neg_eigval=self.allow_neg_eigval, state_v_first=False, backend=self._step_backend(),
        )  # fmt: skip

    def _step_backend(self) -> str | None:
        """The backend of the token-by-token forms: the Hopper backend has none of its own, so the best of the others."""
        return None if self.backend == "hopper" else self.backend

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | Packing | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KDACache | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: [B, T, hidden_size]; with `cu_seqlens` [1, T, hidden_size].
            attention_mask: [B, S] with S >= T, nonzero where the token counts; its last T columns belong to this call.
                Masked tokens, wherever they are, change neither another token nor the state, and give zeros. Or the
                `Packing` of those T columns.
            cu_seqlens: [N+1] bounds of packed sequences, each attending to itself alone.
            cache: read as the state before the first token and updated in place; None starts from zero and keeps nothing.

        Returns:
            [B, T, hidden_size], in the dtype of the projections.

        Raises:
            ValueError: both `attention_mask` and `cu_seqlens`, bounds that fall or leave T, a shape that does not fit, or a cache of
                another number of sequences or of other states.
            TypeError: an argument of another type.
        """
        check_types(("hidden_states", "cu_seqlens"), (hidden_states, cu_seqlens), ("hidden_states",))
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.hidden_size:
            raise ValueError(f"hidden_states must be [B, T, {self.hidden_size}], got {list(hidden_states.shape)}")
        B, T, _ = hidden_states.shape
        packing, sequences = None, B
        if attention_mask is not None:
            if cu_seqlens is not None:
                raise ValueError("attention_mask and cu_seqlens exclude each other: a packed batch has no padding")
            if not isinstance(attention_mask, Tensor | Packing):
                raise TypeError(f"attention_mask is a {type(attention_mask).__name__}; it must be a torch.Tensor, a Packing or None")
            packing = attention_mask
            if isinstance(attention_mask, Tensor):
                if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
                    raise ValueError(f"attention_mask must be [B={B}, at least T={T}], got {list(attention_mask.shape)}")
                if attention_mask.device != hidden_states.device:
                    raise ValueError(
                        f"attention_mask is on {attention_mask.device}; it must be on {hidden_states.device}, as hidden_states"
                    )
                packing = Packing.of(attention_mask[:, attention_mask.shape[1] - T :])
            if packing.mask.shape != (B, T):
                raise ValueError(f"attention_mask is the Packing of {list(packing.mask.shape)} tokens; it must be that of {[B, T]}")
            hidden_states, cu_seqlens = packing.pack(hidden_states), packing.cu_seqlens
        elif cu_seqlens is not None:
            check_bounds(cu_seqlens, None, T, wait=True)  # before the convolution, which indexes by it
            sequences = cu_seqlens.shape[0] - 1
            if B != 1:
                raise ValueError(f"hidden_states must have B=1 with cu_seqlens, got B={B}")
            if cu_seqlens.device != hidden_states.device:
                cu_seqlens = moved_bounds(cu_seqlens, hidden_states.device)
        if cache is not None:
            self._check_cache(cache, sequences)

        qkv, gate, beta = self.project(hidden_states)
        output_gate = self.g_b_proj(self.g_a_proj(hidden_states)).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        if cu_seqlens is None and self._fused_step_serves(qkv, cache):
            y = self._fused_step(qkv, gate, beta, output_gate, cache)
        else:
            old = (None, None) if cache is None else (cache.conv_state, cache.recurrent_state)
            o, *new = self._attend(qkv, gate, beta, *old, cu_seqlens, cache is not None)
            if cache is not None:
                cache.conv_state, cache.recurrent_state = new
                entry = [torch.zeros_like(after) if before is None else before for before, after in zip(old, new)]
                cache._remember(None if cu_seqlens is not None else _Segment(*entry, qkv, gate, beta))
            y = self.o_norm(o, output_gate)
        y = self.o_proj(y.flatten(-2))
        return y if packing is None else packing.unpack(y)

    @torch.no_grad()
    def rollback(self, cache: KDACache, tokens: int) -> None:
        """Take the last `tokens` tokens of every sequence back out of `cache`, as if they had never been run.

        Whole calls are undone from the states they started with; a call undone in part is replayed up to the cut.

        Raises:
            ValueError: negative `tokens`, or more than the cache remembers (`KDACache.rollback_window`; calls with a
                mask or `cu_seqlens` are not remembered).
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise TypeError(f"tokens is {tokens!r}; it must be an int")
        known = sum(s.tokens for s in cache._segments)
        if not 0 <= tokens <= known:
            raise ValueError(f"tokens={tokens} must be in [0, {known}], what the cache remembers (rollback_window={cache.rollback_window})")
        while tokens:
            last = cache._segments.pop()
            cache.conv_state, cache.recurrent_state = last.conv_state, last.recurrent_state
            keep = max(last.tokens - tokens, 0)
            tokens -= last.tokens - keep
            if keep:
                qkv, gate, beta = last.qkv[:, :keep], last.gate[:, :keep], last.beta[:, :keep]
                _, cache.conv_state, cache.recurrent_state = self._attend(
                    qkv, gate, beta, last.conv_state, last.recurrent_state, None, True
                )
                cache._segments.append(_Segment(last.conv_state, last.recurrent_state, qkv, gate, beta))

"""What one KDA call asks for: `Problem` (sizes, dtypes, options; frozen and hashable) and `Inputs` (its tensors).

The checks of chunk_kda's and fused_recurrent_kda's arguments live here. A call is described by a `Problem` exactly once; backends read
nothing else to decide whether they serve it (`why_not`) and how they launch it. Names follow docs/math.md: B batch, T tokens, H q/k
heads, HV value heads, K key dim, V value dim, N sequences, C chunk size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from openkda.plan import Plan

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REFERENCE_DTYPES = (*FLOAT_DTYPES, torch.float64)  # fp64 is served by the torch backend alone, for gradient checks
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256
FLOAT_MAX = torch.finfo(torch.float32).max
CHUNK_SIZES = (32, 64)
GATES = ("none", "softplus", "bounded")
DENSE = torch.strided  # the layout of every tensor that is served


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of one call. Hashable; two calls with equal problems launch the same kernels."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences; equals B when not varlen
    varlen: bool
    dtype: torch.dtype  # of q, k, v and o
    gate_dtype: torch.dtype  # of g as given
    beta_dtype: torch.dtype
    state_dtype: torch.dtype  # of initial_state and final_state
    scale: float
    gate: str  # "none": g is the log decay; "softplus", "bounded": g holds gate logits
    lower_bound: float | None  # natural log; bounds g from below when gate == "bounded" or safe_gate
    safe_gate: bool  # g is promised to lie in [lower_bound, 0)
    has_A_log: bool
    has_dt_bias: bool
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool  # beta = 2 * sigmoid(logit)
    has_initial_state: bool
    output_final_state: bool
    return_intermediate_states: bool
    state_v_first: bool
    chunk_size: int
    needs_grad: bool
    transform: str  # how torch sees the tensors, as `transform_of` says
    device_type: str
    capability: tuple[int, int] | None  # CUDA compute capability; None on other devices

    @property
    def group(self) -> int:
        """Value heads per q/k head."""
        return self.HV // self.H

    @property
    def bounded(self) -> bool:
        """True when every log decay is known to lie in [lower_bound, 0)."""
        return self.gate == "bounded" or self.safe_gate

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of initial_state and final_state."""
        return (self.N, self.HV, self.V, self.K) if self.state_v_first else (self.N, self.HV, self.K, self.V)

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(slots=True)
class Inputs:
    """The tensors of one call, already checked against its `Problem`. Never written to."""

    q: torch.Tensor  # [B, T, H, K]
    k: torch.Tensor  # [B, T, H, K]
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor  # [B, T, HV, K] log decay, or gate logits
    beta: torch.Tensor  # [B, T, HV]
    A_log: torch.Tensor | None  # [HV] fp32
    dt_bias: torch.Tensor | None  # [HV, K] fp32
    initial_state: torch.Tensor | None  # Problem.state_shape
    cu_seqlens: torch.Tensor | None  # [N + 1] int32 or int64, on the device
    lengths: tuple[int, ...] | None = None  # sequence lengths where the host knows them (varlen only)

    def plan(self, problem: Problem, chunk_size: int) -> Plan:
        """The chunk tables of this call (openkda/plan.py)."""
        return Plan.build(self.cu_seqlens, problem.B, problem.T, chunk_size, self.q.device)


def fail(name: str, got: object, want: str) -> ValueError:
    """The one form of a refusal: the argument, what it is, what it must be."""
    return ValueError(f"{name} is {got}; it must be {want}")


def not_dense(name: str, t: torch.Tensor) -> ValueError:
    """The refusal of a sparse, nested or oneDNN tensor."""
    return fail(f"{name}'s layout", "nested" if t.is_nested else t.layout, "torch.strided, that of a dense tensor")


class Meta(NamedTuple):
    """What the checks read of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Count of dimensions."""
        return len(self.shape)


def meta(name: str, t: object, optional: bool = False) -> tuple | None:
    """The fields of a Meta as a plain tuple, which is quicker to make and to hash: a repeated call costs one dictionary lookup."""
    if isinstance(t, torch.Tensor):
        if t.layout is DENSE:
            try:
                return t.shape, t.dtype, t.device
            except RuntimeError:  # nested: as many shapes as tensors
                pass
        raise not_dense(name, t)
    if t is None and optional:
        return None
    raise TypeError(f"{name} is a {type(t).__name__}; it must be a torch.Tensor{' or None' if optional else ''}")


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def through_operator(q: object) -> bool:
    """Whether a call is an operator's to make, since its tensors may have no values: in a graph that is being compiled, for fake and
    other special kinds of tensor, on the meta device."""
    return torch.compiler.is_compiling() or type(q) not in _PLAIN or q.is_meta


def transform_of(tensors: Iterable[object]) -> str:
    """How torch sees tensors: "none", as they are; "derivative", through torch.func.grad, vjp, jvp or with forward-mode tangents, of which
    a kernel would know nothing; "vmap", through torch.vmap."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return "none"
    found = "none"
    for t in tensors:
        while isinstance(t, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t):
            if torch._C._functorch.is_batchedtensor(t):
                return "vmap"
            found, t = "derivative", torch._C._functorch.get_unwrapped(t)
        if isinstance(t, torch.Tensor) and forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
            found = "derivative"
    return found


def _check_tensor(name: str, t: Meta, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tuple(t.shape) != shape:
        raise fail(f"{name}'s shape", list(t.shape), str(list(shape)))
    if t.dtype not in dtypes:
        raise fail(f"{name}'s dtype", t.dtype, "one of " + ", ".join(map(str, dtypes)))
    if t.device != device:
        raise fail(f"{name}'s device", t.device, f"{device}, where q is")


def _check_sizes(q: Meta, k: Meta, v: Meta, g: Meta, beta: Meta) -> None:
    for name, t in (("q", q), ("v", v)):
        if t.ndim != 4:
            raise fail(f"{name}'s shape", list(t.shape), f"[B, T, {'HV, V' if name == 'v' else 'H, K'}]")
        if not 1 <= t.shape[-1] <= MAX_HEAD_DIM:
            raise fail(f"{name}'s last dimension", t.shape[-1], f"between 1 and {MAX_HEAD_DIM}")
        if t.shape[2] < 1:
            raise fail(f"{name}'s head count", t.shape[2], "at least 1")
    B, T, H, K = q.shape
    HV = v.shape[2]
    if HV % H:
        raise fail("v's head count", HV, f"a multiple of q's head count {H}")
    if q.dtype not in REFERENCE_DTYPES:
        raise fail("q's dtype", q.dtype, "one of " + ", ".join(map(str, FLOAT_DTYPES)))
    gate_dtypes = REFERENCE_DTYPES if q.dtype == torch.float64 else FLOAT_DTYPES
    _check_tensor("k", k, (B, T, H, K), (q.dtype,), q.device)
    _check_tensor("v", v, (B, T, HV, v.shape[-1]), (q.dtype,), q.device)
    _check_tensor("g", g, (B, T, HV, K), gate_dtypes, q.device)
    _check_tensor("beta", beta, (B, T, HV), gate_dtypes, q.device)


def check_number(name: str, x: object, optional: bool = True) -> None:
    """TypeError for what is no number (a tensor would be read once on the host and then taken for a constant), nor None where optional."""
    if isinstance(x, bool) or not (isinstance(x, (int, float)) or (x is None and optional)):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a number{' or None' if optional else ''}")


def check_scale(scale: object) -> None:
    """None or a number that is finite in fp32."""
    check_number("scale", scale)
    if scale is not None and not abs(scale) <= FLOAT_MAX:
        raise fail("scale", scale, f"finite in fp32, at most {FLOAT_MAX:.3g} in size, or None for K^-0.5")


def check_lower_bound(lower_bound: object) -> None:
    """None or a number in [-5, 0)."""
    check_number("lower_bound", lower_bound)
    if lower_bound is None:
        return
    if not -5.0 <= lower_bound < 0.0:
        raise fail("lower_bound", lower_bound, "in [-5, 0)")


def check_gate_parameters(HV: int, K: int, device: torch.device, *, A_log: tuple | None, dt_bias: tuple | None) -> None:
    """A_log [HV] or [1, 1, HV, 1], dt_bias [HV * K] or [HV, K], floating point, on `device`; or None; each as `meta` gives it."""
    for name, t, shapes in (("A_log", A_log, ((HV,), (1, 1, HV, 1))), ("dt_bias", dt_bias, ((HV * K,), (HV, K)))):
        if t is not None:
            t = Meta(*t)
            if tuple(t.shape) not in shapes:
                raise fail(f"{name}'s shape", list(t.shape), " or ".join(str(list(s)) for s in shapes))
            _check_tensor(name, t, tuple(t.shape), REFERENCE_DTYPES, device)


def _check_gate(gate: str, lower_bound: float | None, safe_gate: bool, has_A_log: bool, has_dt_bias: bool) -> None:
    if safe_gate and lower_bound is None:
        raise fail("lower_bound", None, "given in [-5, 0) with safe_gate=True")
    if gate == "softplus" and not has_A_log:
        raise fail("A_log", None, "a tensor [HV] when use_gate_in_kernel=True without lower_bound")
    if gate == "none" and (has_A_log or has_dt_bias):
        raise fail("A_log" if has_A_log else "dt_bias", "given", "None unless use_gate_in_kernel=True (g is then the log decay)")


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1024)
def _build(
    q: tuple, k: tuple, v: tuple, g: tuple, beta: tuple, A_log: tuple | None, dt_bias: tuple | None, state: tuple | None, cu: tuple | None,
    scale: float | None, gate: str, lower_bound: float | None, safe_gate: bool, l2norm: bool, sigmoid: bool, neg: bool, final: bool,
    states: bool, v_first: bool, chunk_size: int, needs_grad: bool, transform: str,
) -> Problem:  # fmt: skip
    """Checks and `Problem` from tensor metadata alone."""
    q, k, v, g, beta, A_log, dt_bias, state, cu = (t and Meta(*t) for t in (q, k, v, g, beta, A_log, dt_bias, state, cu))
    _check_sizes(q, k, v, g, beta)
    _check_gate(gate, lower_bound, safe_gate, A_log is not None, dt_bias is not None)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    check_gate_parameters(HV, K, q.device, A_log=A_log, dt_bias=dt_bias)
    N = B
    if cu is not None:
        _check_bounds_form(cu)
        if B != 1:
            raise fail("q's batch size", B, "1 with cu_seqlens, the sequences packed along T")
        N = cu.shape[0] - 1
    if neg and not sigmoid:
        raise fail("allow_neg_eigval", True, "False unless use_beta_sigmoid_in_kernel=True; otherwise scale beta yourself")
    if chunk_size not in CHUNK_SIZES:
        raise fail("chunk_size", chunk_size, "one of " + ", ".join(map(str, CHUNK_SIZES)))
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if state is not None:
        want = (N, HV, V, K) if v_first else (N, HV, K, V)
        if tuple(state.shape) != want:
            raise fail("initial_state's shape", list(state.shape), f"{list(want)} ([N, HV, {'V, K' if v_first else 'K, V'}])")
        _check_tensor("initial_state", state, want, tuple(dict.fromkeys((torch.float32, torch.bfloat16, state_dtype))), q.device)
        state_dtype = state.dtype
    return Problem(
        B=B, T=T, H=H, HV=HV, K=K, V=V, N=N, varlen=cu is not None, dtype=q.dtype, gate_dtype=g.dtype, beta_dtype=beta.dtype,
        state_dtype=state_dtype, scale=float(K**-0.5 if scale is None else scale), gate=gate,
        lower_bound=None if lower_bound is None else float(lower_bound), safe_gate=safe_gate, has_A_log=A_log is not None,
        has_dt_bias=dt_bias is not None, qk_l2norm=l2norm, beta_sigmoid=sigmoid, neg_eigval=neg, has_initial_state=state is not None,
        output_final_state=final, return_intermediate_states=states, state_v_first=v_first, chunk_size=chunk_size, needs_grad=needs_grad,
        transform=transform, device_type=q.device.type, capability=_capability(q.device),
    )  # fmt: skip


def check_scalars(scale: object, lower_bound: object, chunk_size: object) -> None:
    """The types of a call's scalars, and the ranges of scale and lower_bound."""
    check_scale(scale)
    check_lower_bound(lower_bound)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size is {chunk_size!r}; it must be an int")


def describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None,
    scale: float | None, use_gate_in_kernel: bool, lower_bound: float | None, safe_gate: bool, use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, output_final_state: bool, return_intermediate_states: bool,
    state_v_first: bool, chunk_size: int, check_lengths: bool = True,
) -> tuple[Problem, Inputs]:  # fmt: skip
    """Check every argument of a public function and return its `Problem` and `Inputs`.

    Raises ValueError or TypeError naming the argument, its value and what is allowed. `check_lengths=False` skips reading cu_seqlens
    on the host (CUDA graphs): the kernels clamp what they read, so a bad table gives wrong values, never a wild address."""
    check_scalars(scale, lower_bound, chunk_size)
    if not use_gate_in_kernel:
        gate = "none"
    else:
        gate = "softplus" if lower_bound is None else "bounded"
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    metas = (
        meta("q", q), meta("k", k), meta("v", v), meta("g", g), meta("beta", beta), meta("A_log", A_log, True),
        meta("dt_bias", dt_bias, True), meta("initial_state", initial_state, True), meta("cu_seqlens", cu_seqlens, True),
    )  # fmt: skip
    needs_grad = torch.is_grad_enabled() and True in [t.requires_grad for t in tensors if t is not None]
    problem = _build(
        *metas, scale, gate, lower_bound, bool(safe_gate), bool(use_qk_l2norm_in_kernel), bool(use_beta_sigmoid_in_kernel),
        bool(allow_neg_eigval), bool(output_final_state), bool(return_intermediate_states), bool(state_v_first), chunk_size, needs_grad,
        transform_of(tensors),
    )  # fmt: skip
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        raise fail("cu_seqlens_cpu", "given", "None without cu_seqlens")
    lengths = None
    if problem.varlen and (check_lengths or cu_seqlens.device.type == "cpu"):  # on the CPU the check costs nothing
        lengths = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, problem.T)
    if cu_seqlens is not None:  # contiguous: kernels step from one bound to the next
        cu_seqlens = (cu_seqlens if cu_seqlens.device == q.device else moved_bounds(cu_seqlens, q.device)).contiguous()
    if A_log is not None and A_log.ndim != 1:
        A_log = A_log.reshape(problem.HV)
    if dt_bias is not None and dt_bias.ndim != 2:
        dt_bias = dt_bias.reshape(problem.HV, problem.K)
    return problem, Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, lengths)


def moved_bounds(cu: torch.Tensor, device: torch.device) -> torch.Tensor:
    """cu_seqlens on the device of the call's tensors."""
    if cu.is_meta and device.type != "meta":
        raise fail("cu_seqlens's device", cu.device, f"{device}, where the tensors are, or the CPU")
    return cu.to(device)


def _check_bounds_form(cu: Meta | torch.Tensor) -> None:
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise fail("cu_seqlens's shape", list(cu.shape), "[N + 1]")
    if cu.dtype not in INDEX_DTYPES:
        raise fail("cu_seqlens's dtype", cu.dtype, "torch.int32 or torch.int64")


def check_bounds(cu: torch.Tensor, cu_cpu: torch.Tensor | None, T: int, *, wait: bool) -> None:
    """Type, shape and dtype of cu_seqlens, and its values: in any case with `wait`, else where the host has them without waiting."""
    meta("cu_seqlens", cu)
    _check_bounds_form(cu)
    if not through_operator(cu) and (wait or cu_cpu is not None or cu.device.type == "cpu"):
        check_cu_seqlens(cu, cu_cpu, T)


_checked: dict[int, tuple[weakref.ref, int, tuple[int, ...]]] = {}


def check_cu_seqlens(cu: torch.Tensor, cu_cpu: torch.Tensor | None, T: int) -> tuple[int, ...]:
    """The sequence lengths, after checking that cu_seqlens starts at 0, never falls and ends at or before T.

    Reading a device tensor waits for the device, so pass cu_seqlens_cpu where that matters; without it each tensor is read once and
    remembered until it is written to or freed (a model's layers share one cu_seqlens). A tensor on the CPU is read every time: it may
    share its memory with an array whose writes torch does not see. Where both are given and both are there to read, they must agree."""
    source = cu if cu_cpu is None else cu_cpu
    if cu_cpu is not None:
        meta("cu_seqlens_cpu", cu_cpu, optional=True)
        if cu_cpu.device.type != "cpu":
            raise fail("cu_seqlens_cpu's device", cu_cpu.device, "cpu")
        if tuple(cu_cpu.shape) != tuple(cu.shape):
            raise fail("cu_seqlens_cpu's shape", list(cu_cpu.shape), f"that of cu_seqlens, {list(cu.shape)}")
        if cu_cpu.dtype not in INDEX_DTYPES:
            raise fail("cu_seqlens_cpu's dtype", cu_cpu.dtype, "torch.int32 or torch.int64")
    remembered = source.device.type != "cpu" and not source.is_inference()
    version = source._version if remembered else 0
    known = _checked.get(id(source)) if remembered else None
    if known is not None and known[0]() is source and known[1] == version:
        lengths = known[2]
    else:
        if source.is_meta:
            raise fail("cu_seqlens's device", source.device, "one with values, where the tensors are, or the CPU")
        values = source.tolist()
        if values[0] != 0:
            raise fail("cu_seqlens's first entry", values[0], "0")
        lengths = tuple(b - a for a, b in pairwise(values))
        for n, length in enumerate(lengths):
            if length < 0:
                raise fail(f"cu_seqlens[{n + 1}]", values[n + 1], f"at least cu_seqlens[{n}] = {values[n]}")
        key = id(source)
        if remembered:
            _checked[key] = (weakref.ref(source, lambda _: _checked.pop(key, None)), version, lengths)
    if sum(lengths) > T:
        raise fail("cu_seqlens's last entry", sum(lengths), f"at most T = {T}")
    if cu_cpu is not None and cu.device.type == "cpu":
        for n, (copy, original) in enumerate(zip(cu_cpu.tolist(), cu.tolist())):
            if copy != original:
                raise fail(f"cu_seqlens_cpu[{n}]", copy, f"cu_seqlens[{n}] = {original}")
    return lengths

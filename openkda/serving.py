"""Serving: decoding against a paged pool of states, in place, by slot index. (serving_prefill.py: prompts; serving_step.py: a whole step.)

The raw contract throughout: `gate` and `beta` are logits (activation and sigmoid happen inside, in fp32), q and k are L2-normalised inside
unless asked not to. A pool belongs to the engine: slots may lie at any distance, other data may lie between them, and no slot but those
named is read or written. openkda/serving_problem.py has the rules of slots, pads, speculation and verification.

The kernels' calls never wait for the device; the torch backend does, and a prefill with checkpoints but no cu_seqlens_cpu. Eager calls go
straight to the kernels; under torch.compile, and for fake tensors, the same functions run as custom operators (openkda::kda_decode here).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache

import torch

from openkda import serving_torch
from openkda.problem import check_bounds, fail, meta, through_operator
from openkda.serving_problem import Options, check_decode, check_no_gradient, check_scalars, check_types, layout


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    out: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    pad_slot: int = -1,
    verify: bool = False,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """One or a few tokens of every sequence, the recurrent states read from and written to a pool.

    Args:
        q, k: [N, S, H, K] bf16, fp16 or fp32, one dtype with v; S >= 1 tokens per sequence; K from 1 to 256.
        v: [N, S, HV, V]; HV a multiple of H; V from 1 to 256.
        gate: [N, S, HV, K] logits. beta: [N, S, HV] logits. bf16, fp16 or fp32 each.
            These five may be slices of one packed projection: token rows at one distance, a head's vector contiguous.
        A_log: [HV], None allowed with lower_bound. dt_bias: [HV * K] or [HV, K] or None. fp32, bf16 or fp16.
        lower_bound: in [-5, 0): decay lower_bound * sigmoid(exp(A_log) * (gate + dt_bias)); None: -exp(A_log) * softplus(gate + dt_bias).
        state_pool: [slots, HV, V, K] ([slots, HV, K, V] with state_v_first=False), fp32 or bf16, any stride(0). Updated in place.
        state_indices: [N] or [N, W], int32 or int64, any strides. A pad (index < 0; with pad_slot=0 index <= 0) and an index >= slots
            read and write nothing, and that sequence's output is 0. Sequences that name the same slot in one call race: their outputs
            and that slot are undefined, everything else is unaffected.
        out: [N, S, HV, V], written and returned when given; else allocated in v's dtype.
        num_accepted: [N] int32 or int64 with state_indices [N, W]: the state is read from column num_accepted - 1; a value outside
            1 .. W skips the sequence like a pad. With W >= 2 the state after token t is written to column t.
        cu_seqlens: [N + 1]: the sequences have different lengths and are packed, tensors [1, T, ..]; rows past the last one give 0. Its
            values are not looked at on the host: bounds outside the T rows count as the nearest row.
        verify: leave the slot that is read as it is. The state after token t goes to column t + 1, or nowhere with one column.
        scale: factor on q, default K ** -0.5.
        backend: None (Triton on a GPU, torch on a CPU), "portable" or "torch".

    Returns:
        o [N, S, HV, V].

    Raises:
        ValueError, TypeError: one sentence naming the argument, its value and what is allowed. Also when a gradient would be needed.
    """
    if out is None:
        out = _empty_like(v)
    options = (lower_bound, scale, pad_slot, verify, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, True, True, False, backend)
    tensors = (q, k, v, gate, beta, out, A_log, dt_bias, state_pool, state_indices, num_accepted, cu_seqlens)
    _run_decode(tensors, options)
    return out


def recurrent_in_pool(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, scale: float | None, state_pool: torch.Tensor, state_indices: torch.Tensor | None,
    num_accepted: torch.Tensor | None, cu_seqlens: torch.Tensor | None, out: torch.Tensor | None, use_gate_in_kernel: bool,
    use_qk_l2norm_in_kernel: bool, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, lower_bound: float | None,
    state_v_first: bool, backend: str | None, cu_seqlens_cpu: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """fused_recurrent_kda with its states in a pool: kda_decode with every input stage optional. Without state_indices slot n is n's.

    cu_seqlens is checked where the host has it: as cu_seqlens_cpu, or on the CPU itself."""
    if state_pool is None:
        raise fail("initial_state", None, "the state pool when states are updated in place")
    names = ("q", "k", "v", "g", "beta", "initial_state", "state_indices", "num_accepted", "cu_seqlens", "out")
    check_types(names, (q, k, v, g, beta, state_pool, state_indices, num_accepted, cu_seqlens, out), names[:6])
    if q.dim() != 4:
        raise fail("q's shape", list(q.shape), "[B, T, H, K]")
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, cu_seqlens_cpu, q.shape[1], wait=False)
    elif cu_seqlens_cpu is not None:
        raise fail("cu_seqlens_cpu", "given", "None without cu_seqlens")
    if state_indices is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state_pool.dim() == 0 or state_pool.shape[0] != N:
            raise fail("initial_state's shape", list(state_pool.shape), f"[{N}, ..], one state per sequence, without state_indices")
        state_indices = torch.arange(N, device=q.device)
    if out is None:
        out = torch.empty_like(v)
    tensors = (q, k, v, g, beta, out, A_log, dt_bias, state_pool, state_indices, num_accepted, cu_seqlens)
    flags = (use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    _run_decode(tensors, (lower_bound, scale, -1, False, *flags, True, backend))
    return out


def _run_decode(tensors: tuple[torch.Tensor | None, ...], options: tuple) -> None:
    """Straight to the kernel, or through the operator where something traces the call."""
    if through_operator(tensors[0]):
        check_types(TENSORS, tensors, TENSORS[:6])
        check_scalars(*options[:3], options[-1])
        common_device(TENSORS, tensors)
        torch.ops.openkda.kda_decode(*tensors, *options[:3], *map(bool, options[3:-1]), options[-1])
    else:
        _decode(tensors, options)


def _decode(tensors: tuple[torch.Tensor | None, ...], options: tuple) -> None:
    launch = find_launch(_launches, _decode_launch, TENSORS, tensors, options)
    name = "fused_recurrent_kda with states in place" if options[-2] else "kda_decode"
    check_no_gradient(name, (*tensors[:5], tensors[8]), ", or chunk_kda for training")  # q, k, v, gate, beta, state_pool
    launch(*tensors)


TENSORS = (
    "q", "k", "v", "gate", "beta", "out", "A_log", "dt_bias", "state_pool", "state_indices", "num_accepted", "cu_seqlens",
)  # fmt: skip
_launches: dict[tuple, Callable[..., None]] = {}  # what runs a kind of call, its checks done; about one per batch size
MAX_LAUNCHES = 4096  # kept at a time


def _signature(t: torch.Tensor | None) -> tuple | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device())


def call_key(names: Sequence[str], tensors: Sequence[torch.Tensor | None], options: tuple) -> tuple:
    """Everything that the checks and the launch read of a call, but addresses. A sentence for what is no dense tensor."""
    try:
        return (*map(_signature, tensors), options)
    except (AttributeError, RuntimeError):  # no tensor, or one without strides
        check_types(names, tensors)
        common_device(names, tensors)
        raise


def find_launch(
    launches: dict[tuple, Callable[..., None]], build: Callable[..., Callable[..., None]], names: Sequence[str],
    tensors: tuple[torch.Tensor | None, ...], options: tuple,
) -> Callable[..., None]:  # fmt: skip
    """What runs this kind of call: remembered, or built once its checks have passed."""
    key = call_key(names, tensors, options)
    try:
        return launches[key]
    except KeyError:
        pass
    except TypeError:  # an option that cannot be hashed: the checks refuse it, or it is a flag, of which the truth counts
        return build(tensors, *options)
    launch = build(tensors, *options)
    if len(launches) >= MAX_LAUNCHES:
        launches.clear()
    launches[key] = launch
    return launch


def _empty_like(v: torch.Tensor) -> torch.Tensor:
    if not isinstance(v, torch.Tensor):
        raise TypeError(f"v is a {type(v).__name__}; it must be a torch.Tensor")
    return torch.empty_like(v)


def common_device(names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> torch.device:
    """The device all tensors share, the first of which is q; ValueError when they do not share one or are not dense."""
    device = tensors[0].device
    for name, t in zip(names, tensors):
        if t is not None and meta(name, t)[2] != device:
            raise fail(f"{name}'s device", t.device, f"{device}, where q is")
    return device


def on_torch(names: Sequence[str], run: Callable[..., None], problem: object) -> Callable[..., None]:
    """`run(problem, *tensors)` behind a look at the devices: of a tensor on the meta device a call's key says what it says of one on the
    CPU."""

    def launch(*tensors: torch.Tensor | None) -> None:
        common_device(names, tensors)
        run(problem, *tensors)

    return launch


def _decode_launch(tensors: tuple[torch.Tensor | None, ...], *options: object) -> Callable[..., None]:
    """Checks of one kind of call, and what runs it: called with the tensors of `_decode`."""
    *options, backend = options
    check_scalars(*options[:3], backend)
    check_types(("q",), tensors, ("q",))
    chosen = Options(*options[:3], *map(bool, options[3:]))
    names = tuple({"gate": chosen.gate_name, "state_pool": chosen.pool_name}.get(name, name) for name in TENSORS)
    device = common_device(names, tensors)
    problem = check_decode(*map(layout, tensors), chosen)
    if choose_backend(device, backend) == "torch":
        return on_torch(names, serving_torch.decode, problem)
    from openkda.portable.decode import decode_launch  # Triton may be absent where the torch path serves

    return decode_launch(problem, device)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose_backend(device: torch.device, backend: str | None) -> str:
    """The backend of a decode call: Triton on a GPU, torch on a CPU, or the one asked for."""
    if backend not in (None, "portable", "torch"):
        raise fail("backend", repr(backend), "None, 'portable' or 'torch'")
    if backend == "torch" or (backend is None and device.type != "cuda"):
        return "torch"
    if not _has_triton():
        reason = "it needs Triton, which is not installed"
    else:
        from openkda.portable.decode import why_not_device

        reason = why_not_device(device.type)
    if reason is None:
        return "portable"
    if backend is None:
        return "torch"
    raise ValueError(f"backend is {backend!r}, which cannot serve this call: {reason}")


library = torch.library.Library("openkda", "DEF")


def define(schema: str, run: Callable[..., None]) -> None:
    """An operator that writes what its schema marks and returns nothing, the same on a CPU and a GPU."""
    library.define(schema)
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"openkda::{name}", lambda *args: None, lib=library)


define(
    "kda_decode(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) out, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(b!) state_pool, Tensor state_indices, Tensor? num_accepted, Tensor? cu_seqlens, float? lower_bound, float? scale, "
    "int pad_slot, bool verify, bool qk_l2norm, bool neg_eigval, bool state_v_first, bool gate_in_kernel, bool beta_sigmoid, "
    "bool recurrent, str? backend) -> ()",
    lambda *args: _decode(args[:12], args[12:]),
)

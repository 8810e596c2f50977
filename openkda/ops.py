"""The public functions: arguments, checks, choice of backend. Everything they accept and refuse is described here and in problem.py."""

from __future__ import annotations

from contextlib import nullcontext
from types import NoneType

import torch

from openkda import backends
from openkda.autograd import TENSORS, ChunkKDA
from openkda.custom_ops import check_traced, chunk_kda_op, recurrent, recurrent_kda_op
from openkda.problem import FLOAT_DTYPES, check_gate_parameters, check_lower_bound, describe, fail, meta, through_operator
from openkda.reference import activate_gate
from openkda.serving import recurrent_in_pool

_AS_IT_IS = nullcontext()


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Kimi Delta Attention over whole sequences, by chunks (Kimi Linear, arXiv 2510.26692; docs/math.md).

    Args:
        q, k: [B, T, H, K] bf16, fp16 or fp32, one dtype with v; K from 1 to 256.
        v: [B, T, HV, V]; HV a multiple of H (value head h reads q/k head h // (HV / H)); V from 1 to 256.
        g: [B, T, HV, K] bf16, fp16 or fp32. Natural-log decay, at most 0 (a positive value is outside the contract and is not looked
            for: its growth can overflow) and above -1e36, or gate logits with use_gate_in_kernel.
        beta: [B, T, HV] bf16, fp16 or fp32; write strength, or its logits with use_beta_sigmoid_in_kernel.
        scale: factor on q, default K**-0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] when state_v_first), fp32 or bf16; default zeros. N = B, or the ragged sequence count.
        output_final_state: also return the state after the last token of every sequence.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum(x**2) + 1e-6) first.
        use_gate_in_kernel: g holds logits: decay -exp(A_log) * softplus(g + dt_bias), or with lower_bound
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), for which A_log may be None (factor 1).
        use_beta_sigmoid_in_kernel: beta holds logits. allow_neg_eigval: twice the sigmoid.
        safe_gate: promises that g lies in [lower_bound, 0); with the gate computed outside the promise is the caller's.
        lower_bound: in [-5, 0).
        disable_recompute: keep intermediates for the backward where a backend can (more memory, less time); o may differ by rounding then.
            Compiled graphs recompute, and so does the hopper backend for ragged batches, in fp16 and for few heads.
        return_intermediate_states: also return the states at the entry of every chunk. Such a call is without gradients, o's included.
        state_v_first: states are [.., V, K]. transpose_state_layout: older name of the same option.
        cu_seqlens: [N + 1] int32 or int64, B = 1: the sequences packed along T. Must start at 0 and never fall; may end before T, where o
            is 0. Reading it waits for the device once per tensor, and in every call for a tensor made in inference mode, whose changes
            cannot be seen; give cu_seqlens_cpu, the same values on the CPU, to avoid that. A tensor on a GPU whose values change without
            torch's knowledge (a kernel of your own, the replay of a graph) needs cu_seqlens_cpu or use_graph too.
        use_graph: cu_seqlens may change between replays of a captured graph, so on a GPU it is not read on the host. Make a call of the
            same kind before the capture: it compiles what is missing and fills tables that would else lie in the graph's own memory.
        max_num_seqs: with use_graph, the sequence count that cu_seqlens is padded to by repeating its last entry.
        A_log: [HV] (or [1, 1, HV, 1]). dt_bias: [HV * K] or [HV, K], default 0.
        chunk_size: 32 or 64; the spacing of intermediate states.
        cp_context: None; context parallelism over devices has its own functions.
        backend: None (the best that serves the call) or "hopper", "portable", "torch".

    Returns:
        o [B, T, HV, V] in v's dtype; final_state fp32 (or initial_state's dtype), None unless asked for; and with
        return_intermediate_states h [B, NT, HV, K, V] in q's dtype (V-first too), where NT counts all chunks of a ragged batch.

    Raises:
        ValueError, TypeError: one sentence naming the argument, its value and what is allowed.

    Gradients flow to q, k, v, g, beta, A_log, dt_bias and initial_state, also from final_state. The torch backend has derivatives of any
    order, forward-mode ones and those of torch.func too, and serves calls inside such transforms; the kernels' gradients are first ones,
    and differentiating them again is an error. There is no rule for torch.vmap.
    """
    if cp_context is not None:
        raise fail("cp_context", f"a {type(cp_context).__name__}", "None: this release has no context parallelism over devices")
    if transpose_state_layout is not None:
        state_v_first = transpose_state_layout
    if max_num_seqs is not None:
        check_max_num_seqs(max_num_seqs, use_graph, cu_seqlens)
    if through_operator(q):
        tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
        check_traced(tensors, scale, lower_bound, chunk_size, backend)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not return_intermediate_states):
            o, final_state, h = chunk_kda_op(
                *tensors, scale, bool(use_gate_in_kernel), lower_bound, bool(safe_gate), bool(use_qk_l2norm_in_kernel),
                bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval), bool(output_final_state), bool(return_intermediate_states),
                bool(state_v_first), chunk_size, not use_graph, backend,
            )  # fmt: skip
        final_state = final_state if output_final_state else None
        return (o, final_state, h) if return_intermediate_states else (o, final_state)
    problem, inputs = describe(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        scale=scale, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, safe_gate=safe_gate,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, output_final_state=output_final_state, return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first, chunk_size=chunk_size, check_lengths=not use_graph,
    )  # fmt: skip
    backends.check_name(backend)
    if problem.transform == "vmap":
        raise ValueError("chunk_kda has no rule for torch.vmap; fold the mapped dimension into B, or into the sequences of cu_seqlens")
    name = backends.choose(problem, backend)
    if return_intermediate_states or not problem.needs_grad or name == "torch":
        grad = problem.needs_grad and not return_intermediate_states
        with _AS_IT_IS if grad == torch.is_grad_enabled() else torch.set_grad_enabled(grad):
            o, final_state, h = backends.module(name).forward(problem, inputs)
        return (o, final_state, h) if return_intermediate_states else (o, final_state)
    return ChunkKDA.apply(problem, name, disable_recompute, inputs, *(getattr(inputs, n) for n in TENSORS))


def check_max_num_seqs(max_num_seqs: object, use_graph: bool, cu_seqlens: torch.Tensor | None) -> None:
    """The sequence count that cu_seqlens [N + 1] is padded to: an int equal to its N, with use_graph alone."""
    if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int):
        raise TypeError(f"max_num_seqs is {max_num_seqs!r}; it must be an int or None")
    if not use_graph:
        raise fail("max_num_seqs", max_num_seqs, "None without use_graph=True")
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.ndim == 1 and cu_seqlens.shape[0] - 1 != max_num_seqs:
        raise fail("max_num_seqs", max_num_seqs, f"the sequence count of cu_seqlens, {cu_seqlens.shape[0] - 1}, padded by its last entry")


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    cu_seqlens_cpu: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    inplace_final_state: bool | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same function as chunk_kda, token by token: for decoding and short prompts. All arithmetic in fp32.

    Arguments, results and errors as chunk_kda, the backend "portable" (Triton; inputs on a GPU) or "torch" (any device, differentiable).

    Serving, without gradients:
        inplace_final_state: initial_state is updated in place and returned as final_state; default: True with state_indices.
        state_indices: [N] or [N, W]: initial_state is a pool [slots, HV, K, V] of any stride(0), a sequence's state the slot named here.
        num_accepted: [N], with state_indices [N, W]. Rules of slots, pads and speculation as in kda_decode.
        out: [B, T, HV, V] that takes o; any float dtype with states in place, else v's.
    """
    if inplace_final_state is False and state_indices is not None:
        raise fail("inplace_final_state", False, "True with state_indices: the states live in the pool")
    if num_accepted is not None and state_indices is None:
        raise fail("num_accepted", "given", "None without state_indices")
    if inplace_final_state or state_indices is not None:
        o = recurrent_in_pool(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, scale=scale, state_pool=initial_state, state_indices=state_indices,
            num_accepted=num_accepted, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, out=out, use_gate_in_kernel=use_gate_in_kernel,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first, backend=backend,
        )  # fmt: skip
        return o, initial_state
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    flags = (use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state, state_v_first)
    if through_operator(q):
        check_traced(tensors, scale, lower_bound, 64, backend)
        o, final_state = recurrent_kda_op(*tensors, scale, bool(use_gate_in_kernel), lower_bound, *map(bool, flags), backend)
        final_state = final_state if output_final_state else None
    else:
        o, final_state = recurrent(*tensors, scale, use_gate_in_kernel, lower_bound, *flags, backend)
    if out is None:
        return o, final_state
    meta("out", out, optional=True)
    if out.shape != o.shape or out.dtype != o.dtype or out.device != o.device:
        raise fail("out", f"{list(out.shape)} {out.dtype} on {out.device}", f"{list(o.shape)} {o.dtype} on {o.device}, as o")
    if out.is_leaf and out.requires_grad and torch.is_grad_enabled():
        raise fail("out", "a leaf that requires grad", "a tensor that does not, for it is written")
    return out.copy_(o), final_state


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | int | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    head_dim: int | None = None,
    g_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Natural-log decay from gate logits: -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    g [.., HV, K] bf16, fp16 or fp32; A_log [HV] or [1, 1, HV, 1] (None allowed with lower_bound); dt_bias [HV * K] or [HV, K], default 0;
    lower_bound in [-5, 0). Returns g's shape in output_dtype; computes in fp32 (fp64 for fp64); differentiable.

    The older call fused_kda_gate(g, A_log, head_dim, g_bias=bias) takes g [.., HV * head_dim] and returns [.., HV, head_dim]."""
    if isinstance(dt_bias, int) and head_dim is None:
        head_dim, dt_bias = dt_bias, None
    if g_bias is not None:
        if dt_bias is not None:
            raise fail("g_bias", "given beside dt_bias", "None: both are the bias added to g")
        dt_bias = g_bias
    meta("g", g)
    if g.dtype not in (*FLOAT_DTYPES, torch.float64):
        raise fail("g's dtype", g.dtype, "one of " + ", ".join(map(str, FLOAT_DTYPES)))
    if not isinstance(output_dtype, torch.dtype) or not output_dtype.is_floating_point:
        raise TypeError(f"output_dtype is {output_dtype!r}; it must be a floating-point torch.dtype")
    if isinstance(head_dim, bool) or not isinstance(head_dim, (int, NoneType)):
        raise TypeError(f"head_dim is {head_dim!r}; it must be an int or None")
    if g.ndim < (2 if head_dim is None else 1):
        raise fail("g's shape", list(g.shape), "[.., HV, K], or [.., HV * head_dim] with head_dim")
    if head_dim is not None:
        if head_dim < 1 or g.shape[-1] % head_dim:
            raise fail("head_dim", head_dim, f"a divisor of g's last dimension {g.shape[-1]}")
        g = g.unflatten(-1, (-1, head_dim))
    HV, K = g.shape[-2:]
    check_lower_bound(lower_bound)
    if A_log is None and lower_bound is None:
        raise fail("A_log", None, "a tensor [HV] without lower_bound")
    check_gate_parameters(HV, K, g.device, A_log=meta("A_log", A_log, True), dt_bias=meta("dt_bias", dt_bias, True))
    x = g if g.dtype == torch.float64 else g.float()
    A_log = None if A_log is None else A_log.reshape(HV)
    dt_bias = None if dt_bias is None else dt_bias.reshape(HV, K)
    return activate_gate(x, A_log, dt_bias, lower_bound).to(output_dtype)

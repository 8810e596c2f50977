"""chunk_kda and fused_recurrent_kda as torch.library operators, for torch.compile: opaque nodes, each with a fake that knows its shapes.

They share one backward, for they are one function. `ops.py` comes here while a graph is being compiled and for fake tensors; else it calls
autograd.ChunkKDA, whose host cost is lower, or `recurrent`. All end in the same backends and, but for the recurrence in eager torch, in
`autograd.gradients`. Compiled calls recompute: disable_recompute has no effect on them.

An operator returns tensors only: an output or gradient that does not exist is an empty tensor of shape [0]. The schemas are read from the
signatures, so every argument is spelled out in both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from openkda import backends
from openkda.autograd import TENSORS, gradients
from openkda.problem import Inputs, Problem, check_scalars, describe, fail, meta


def owned(x: Tensor | None, given: tuple[Tensor | None, ...], like: Tensor) -> Tensor:
    """x as an operator may return it: contiguous, never None, never memory of an argument."""
    if x is None:
        return like.new_empty(0)
    storage = x.untyped_storage().data_ptr()
    shared = any(y is not None and y.untyped_storage().data_ptr() == storage for y in given)
    return x.clone(memory_format=torch.contiguous_format) if shared else x.contiguous()


def with_autograd(function: Callable[[], list[Tensor | None]], device: torch.device) -> list[Tensor | None]:
    """function() in a thread of its own: inside an operator autograd is off for the calling thread, and the torch backend needs it."""
    found: list[Tensor | None] = []
    raised: list[BaseException] = []
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                found.extend(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found


def check_traced(tensors: tuple[object, ...], scale: object, lower_bound: object, chunk_size: object, backend: object) -> None:
    """The types and devices of a traced call's arguments, which an operator would refuse in words of its own or not at all. tensors:
    TENSORS and both cu_seqlens; only the first five are required."""
    for n, (name, t) in enumerate(zip((*TENSORS, "cu_seqlens", "cu_seqlens_cpu"), tensors)):
        meta(name, t, optional=n >= 5)
        if t is not None and t.device != tensors[0].device and name in TENSORS:
            raise fail(f"{name}'s device", t.device, f"{tensors[0].device}, where q is")
    check_scalars(scale, lower_bound, chunk_size)
    backends.check_name(backend)


def described(
    tensors: tuple[Tensor | None, ...], cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, scale: float | None,
    use_gate_in_kernel: bool, lower_bound: float | None, safe_gate: bool, use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, output_final_state: bool, return_intermediate_states: bool,
    state_v_first: bool, chunk_size: int,
    check_lengths: bool, backend: str | None,
) -> tuple[Problem, Inputs, str]:  # fmt: skip
    """Problem, inputs and backend of an operator's arguments."""
    q, k, v, g, beta, A_log, dt_bias, initial_state = tensors
    problem, inputs = describe(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        scale=scale, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, safe_gate=safe_gate,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, output_final_state=output_final_state, return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first, chunk_size=chunk_size, check_lengths=check_lengths,
    )  # fmt: skip
    return problem, inputs, backends.choose(problem, backend)


@torch.library.custom_op("openkda::chunk_kda", mutates_args=())
def chunk_kda_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, scale: float | None,
    use_gate_in_kernel: bool, lower_bound: float | None, safe_gate: bool, use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, output_final_state: bool, return_intermediate_states: bool,
    state_v_first: bool, chunk_size: int,
    check_lengths: bool, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, final_state and chunk-entry states. Arguments as chunk_kda's; check_lengths as describe's."""
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    problem, inputs, name = described(
        given, cu_seqlens, cu_seqlens_cpu, scale, use_gate_in_kernel, lower_bound, safe_gate, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state, return_intermediate_states, state_v_first, chunk_size,
        check_lengths, backend,
    )  # fmt: skip
    o, final_state, h = backends.module(name).forward(problem, inputs)
    return owned(o, given, v), owned(final_state, given, v), owned(h, given, v)


@chunk_kda_op.register_fake
def chunk_kda_shapes(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, scale, use_gate_in_kernel, lower_bound, safe_gate,
    use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state, return_intermediate_states, state_v_first,
    chunk_size, check_lengths, backend,
):  # fmt: skip
    """Empty outputs of the right shapes and dtypes."""
    B, T, HV, V = v.shape
    h = v.new_empty(0)
    if return_intermediate_states:
        chunks = (T + chunk_size - 1) // chunk_size if cu_seqlens is None else torch.library.get_ctx().new_dynamic_size()
        h = v.new_empty(B, chunks, HV, *((V, q.shape[-1]) if state_v_first else (q.shape[-1], V)))
    return v.new_empty(v.shape), final_state_shape(q, v, initial_state, cu_seqlens, output_final_state, state_v_first), h


def final_state_shape(
    q: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, output_final_state: bool, state_v_first: bool
) -> Tensor:
    """An empty final_state, [0] where there is none."""
    if not output_final_state:
        return v.new_empty(0)
    B, _, HV, V = v.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    default = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = (V, q.shape[-1]) if state_v_first else (q.shape[-1], V)
    return v.new_empty(N, HV, *state, dtype=default if initial_state is None else initial_state.dtype)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, scale: float | None,
    use_gate_in_kernel: bool, lower_bound: float | None, use_qk_l2norm_in_kernel: bool, use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool, output_final_state: bool, state_v_first: bool, backend: str | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """fused_recurrent_kda without states in place: o [B, T, HV, V] and final_state or None."""
    problem, inputs = describe(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        scale=scale, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, safe_gate=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, output_final_state=output_final_state, return_intermediate_states=False,
        state_v_first=state_v_first, chunk_size=64,
    )  # fmt: skip
    return backends.recurrent(backends.choose_recurrent(problem, backend))(problem, inputs)


@torch.library.custom_op("openkda::fused_recurrent_kda", mutates_args=())
def recurrent_kda_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, scale: float | None,
    use_gate_in_kernel: bool, lower_bound: float | None, use_qk_l2norm_in_kernel: bool, use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool, output_final_state: bool, state_v_first: bool, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`recurrent` as an operator."""
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    o, final_state = recurrent(
        *given, cu_seqlens, cu_seqlens_cpu, scale, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, output_final_state, state_v_first, backend,
    )  # fmt: skip
    return owned(o, given, v), owned(final_state, given, v)


@recurrent_kda_op.register_fake
def recurrent_kda_shapes(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, scale, use_gate_in_kernel, lower_bound,
    use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state, state_v_first, backend,
):  # fmt: skip
    """Empty outputs of the right shapes and dtypes."""
    return v.new_empty(v.shape), final_state_shape(q, v, initial_state, cu_seqlens, output_final_state, state_v_first)


@torch.library.custom_op("openkda::chunk_kda_backward", mutates_args=())
def chunk_kda_backward_op(
    o: Tensor, do: Tensor | None, dfinal_state: Tensor | None, needs: list[bool],
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, scale: float | None,
    use_gate_in_kernel: bool, lower_bound: float | None, safe_gate: bool, use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, output_final_state: bool, return_intermediate_states: bool,
    state_v_first: bool, chunk_size: int,
    check_lengths: bool, backend: str | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta, A_log, dt_bias, initial_state where `needs` holds; the rest as chunk_kda_op's arguments."""
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    problem, inputs, name = described(
        given, cu_seqlens, cu_seqlens_cpu, scale, use_gate_in_kernel, lower_bound, safe_gate, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state, return_intermediate_states, state_v_first, chunk_size,
        check_lengths, backend,
    )  # fmt: skip
    found = with_autograd(lambda: gradients(problem, name, inputs, tuple(needs), o, do, dfinal_state), q.device)
    shaped = [None if x is None else x.reshape(y.shape) for x, y in zip(found, given)]
    return [owned(x, (*given, o, do, dfinal_state), v) for x in shaped]


@chunk_kda_backward_op.register_fake
def chunk_kda_backward_shapes(
    o, do, dfinal_state, needs, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, scale, use_gate_in_kernel,
    lower_bound, safe_gate, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state,
    return_intermediate_states, state_v_first, chunk_size, check_lengths, backend,
):  # fmt: skip
    """Empty gradients of the right shapes and dtypes."""
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return [x.new_empty(x.shape) if need else v.new_empty(0) for x, need in zip(given, needs)]


def _keep_inputs(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    tensors, ctx.flags = inputs[: len(TENSORS) + 2], inputs[len(TENSORS) + 2 :]
    ctx.final_state = output[1].ndim == 4
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*tensors, output[0])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, flags: tuple, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, o = ctx.saved_tensors
    needs = ctx.needs_input_grad[: len(TENSORS)]
    if do is None and dfinal_state is None:
        return (None,) * len(ctx.needs_input_grad)
    found = chunk_kda_backward_op(o, do, dfinal_state if ctx.final_state else None, list(needs), *tensors, *flags)
    rest = len(ctx.needs_input_grad) - len(TENSORS)
    return (*(x if need else None for x, need in zip(found, needs)), *(None,) * rest)


def _differentiate_chunks(ctx, do: Tensor | None, dfinal_state: Tensor | None, dh: None) -> tuple[Tensor | None, ...]:
    return _differentiate(ctx, ctx.flags, do, dfinal_state)


def _differentiate_recurrence(ctx, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
    scale, use_gate, lower_bound, l2norm, sigmoid, neg_eigval, final_state, v_first, backend = ctx.flags
    flags = (scale, use_gate, lower_bound, False, l2norm, sigmoid, neg_eigval, final_state, False, v_first, 64, True, backend)
    return _differentiate(ctx, flags, do, dfinal_state)


def _refuse(ctx, dgrads: list[Tensor]) -> None:
    raise ValueError('the gradients of chunk_kda as an operator have no gradients of their own; backend="torch" in an eager call has them')


chunk_kda_backward_op.register_autograd(_refuse)
chunk_kda_op.register_autograd(_differentiate_chunks, setup_context=_keep_inputs)
recurrent_kda_op.register_autograd(_differentiate_recurrence, setup_context=_keep_inputs)

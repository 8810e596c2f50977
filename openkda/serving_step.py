"""A decode step of the layer from its projections to the gated, normalised output: short convolution, kda_decode, RMSNorm in one kernel.

The custom operator is openkda::kda_fused_decode. Slots of the convolution windows follow those of the states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from openkda import serving_torch
from openkda.problem import FLOAT_MAX, check_number, fail, through_operator
from openkda.serving import choose_backend, common_device, define, find_launch, on_torch
from openkda.serving_problem import Options, check_decode, check_no_gradient, check_scalars, check_step, check_types, layout


def kda_fused_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    output_gate: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor,
    norm_eps: float = 1e-5,
    state_pool: torch.Tensor,
    conv_pool: torch.Tensor,
    state_indices: torch.Tensor,
    out: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    pad_slot: int = -1,
    verify: bool = False,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """One to eight tokens of every sequence through convolution, recurrence and output norm.

    Computes y = silu(depthwise causal convolution of q, k, v), o = kda_decode(y_q, y_k, y_v, gate, beta), and
    o * rsqrt(mean(o**2) + norm_eps) * norm_weight * sigmoid(output_gate). All of it in fp32, rounded once at the end.

    Args:
        q, k [N, S, H, K], v [N, S, HV, V]: projections before the convolution; gate [N, S, HV, K], beta [N, S, HV] logits.
        output_gate: [N, S, HV, V] logits.
        conv_weight: [2*H*K + HV*V, W], W from 2 to 8 taps, for the q heads, then k, then v; the last tap meets the newest token.
        conv_bias: [2*H*K + HV*V] or None. norm_weight: [V].
        conv_pool: [slots, 2*H*K + HV*V, W - 1] in any strides (so [slots, W - 1, C].mT too), the last W - 1 tokens' q, k, v before the
            convolution, oldest first. bf16, fp16 or fp32. Updated in place like state_pool: same slots, same columns, same pads.
        The others: as kda_decode.

    Returns:
        [N, S, HV, V] in v's dtype, or `out`.

    Raises:
        ValueError, TypeError: one sentence naming the argument, its value and what is allowed.
    """
    if out is None:
        check_types(("v",), (v,), ("v",))
        out = torch.empty_like(v)
    tensors = (
        q, k, v, gate, beta, out, A_log, dt_bias, state_pool, state_indices, num_accepted, output_gate, norm_weight, conv_weight, conv_bias,
        conv_pool,
    )  # fmt: skip
    options = (norm_eps, lower_bound, scale, pad_slot, verify, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, backend)
    if through_operator(q):
        check_types(_TENSORS, tensors, _REQUIRED)
        check_scalars(*options[1:4], backend)
        check_number("norm_eps", norm_eps, optional=False)
        common_device(_TENSORS, tensors)
        torch.ops.openkda.kda_fused_decode(*tensors, *options[:4], *map(bool, options[4:-1]), backend)
    else:
        _fused_decode(tensors, options)
    return out


def _fused_decode(tensors: tuple[torch.Tensor | None, ...], options: tuple) -> None:
    launch = find_launch(_launches, _fused_launch, _TENSORS, tensors, options)
    check_no_gradient("kda_fused_decode", (*tensors[:5], tensors[8], tensors[11]))  # tokens, state_pool, output_gate
    launch(*tensors)


_TENSORS = (
    "q", "k", "v", "gate", "beta", "out", "A_log", "dt_bias", "state_pool", "state_indices", "num_accepted", "output_gate", "norm_weight",
    "conv_weight", "conv_bias", "conv_pool",
)  # fmt: skip
_REQUIRED = set(_TENSORS) - {"A_log", "dt_bias", "num_accepted", "conv_bias"}
_launches: dict[tuple, Callable[..., None]] = {}


def _fused_launch(tensors: tuple[torch.Tensor | None, ...], norm_eps: float, *options: object) -> Callable[..., None]:
    """Checks of one kind of call, and what runs it: called with the tensors of `_fused_decode`."""
    *options, backend = options
    check_scalars(*options[:3], backend)
    check_number("norm_eps", norm_eps, optional=False)
    if not 0.0 <= norm_eps <= FLOAT_MAX:
        raise fail("norm_eps", norm_eps, "finite and at least 0 in fp32")
    check_types(("q",), tensors, ("q",))
    device = common_device(_TENSORS, tensors)
    layouts = [layout(t) for t in tensors]
    base = check_decode(*layouts[:11], None, Options(*options[:3], *map(bool, options[3:]), gate_in_kernel=True, beta_sigmoid=True))
    problem = check_step(base, *layouts[11:], norm_eps)
    if choose_backend(device, backend) == "torch":
        return on_torch(_TENSORS, serving_torch.fused_step, problem)
    from openkda.portable.fused_step import fused_launch  # Triton may be absent where the torch path serves

    return fused_launch(problem, device)


define(
    "kda_fused_decode(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) out, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(b!) state_pool, Tensor state_indices, Tensor? num_accepted, Tensor output_gate, Tensor norm_weight, Tensor conv_weight, "
    "Tensor? conv_bias, Tensor(c!) conv_pool, float norm_eps, float? lower_bound, float? scale, int pad_slot, bool verify, bool qk_l2norm, "
    "bool neg_eigval, bool state_v_first, str? backend) -> ()",
    lambda *args: _fused_decode(args[:16], args[16:]),
)

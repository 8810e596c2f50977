"""The decay of a token: from the gate as given to log2 of the decay factor, fp32, for each gate form (docs/math.md).

    bounded    g = lower_bound * sigmoid(exp(A_log) (gate + dt_bias))      by exp2 and reciprocal
    softplus   g = -exp(A_log) softplus(gate + dt_bias)                    relative error below 1e-5 however slow: a polynomial in e^-|x|
    none       the gate is g itself

Each form is one multiply-add followed by the activation; the constants are per head and channel."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon
from openkda.hopper.tiles import LOG2E, WIDTH, channel_layout, ex2, rcp, softplus2, to_f32


@gluon.jit
def head_decay(src, head):
    """exp(A_log[head]), 1 where A_log is absent"""
    if src.A_log_ptr is None:
        return head.to(gl.float32) * 0.0 + 1.0
    else:
        return gl.exp(gl.load(src.A_log_ptr + head).to(gl.float32))


@gluon.jit
def gate_line(src, head, channel, T: gl.constexpr):
    """(slope, offset, factor): the activation reads gate * slope + offset and is scaled by factor"""
    K: gl.constexpr = T.K
    bias = channel.to(gl.float32) * 0.0
    if src.dt_bias_ptr is not None:
        # volatile, for else the compiler puts this load behind all that is worked out from the other one
        bias = gl.load(src.dt_bias_ptr + head * K + channel, volatile=T.spread).to(gl.float32)
    rate = head_decay(src, head)
    if T.gate == "bounded":
        slope = -LOG2E * rate
        factor = src.lower_bound * LOG2E
    elif T.gate == "softplus":
        slope = rate * 0.0 + LOG2E
        factor = -rate
    else:
        slope = rate * 0.0 + LOG2E
        factor = rate
    return slope, bias * slope, factor


@gluon.jit
def slice_line(src, work, first: gl.constexpr, T: gl.constexpr):
    """gate_line of channels first to first + WIDTH"""
    L: gl.constexpr = channel_layout(WIDTH, 16, gl.num_warps())
    channel = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return gate_line(src, work.head, channel, T)


@gluon.jit
def decay_constants(src, work, T: gl.constexpr):
    """gate_line of the first and of the last WIDTH channels"""
    return slice_line(src, work, 0, T), slice_line(src, work, T.K - WIDTH, T)


@gluon.jit
def activate(x, T: gl.constexpr):
    """What, times the factor, is log2 of the decay factor, from x = gate * slope + offset"""
    if T.gate == "bounded":
        return rcp(ex2(x) + 1.0)
    elif T.gate == "softplus":
        return softplus2(x)
    else:
        return x


@gluon.jit
def log2_decay(gate, consts, T: gl.constexpr):
    """log2 of the decay factor of each token and channel"""
    slope, offset, factor = consts
    x = activate(to_f32(gate) * slope + offset, T)
    return x if T.gate == "none" else x * factor


@gluon.jit
def neutral_gate(T: gl.constexpr):
    """The gate value that means no decay, exactly"""
    return 0.0 if T.gate == "none" else float("-inf")

"""Device functions for the input stages of math.md: log decay from gate logits, beta from its logit. Everything in fp32.

The log decay must keep a relative error below 1e-5 however slow the gate is, so nothing here is approximated by tanh and nothing is
formed as 1 - (something near 1).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); keeps its relative error as x -> -inf, where it equals exp(x)."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(e), e = exp(-|x|) <= 1, with log1p(e) = 2 atanh(z), z = e / (2 + e) <= 1/3.

    The series in z^2 ends below 2e-7 of the sum; a hardware logarithm would lose the relative error of small e."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    z = e / (2.0 + e)
    z2 = z * z
    series = 1.0 + z2 * (1 / 3 + z2 * (1 / 5 + z2 * (1 / 7 + z2 * (1 / 9 + z2 * (1 / 11 + z2 * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def log_decay(gate, A, bias, lower_bound, GATE: tl.constexpr):
    """Natural-log decay g of gate values [...] (logits unless GATE == "none"); A = exp(A_log) and bias broadcast against them."""
    if GATE == "none":
        g = gate
    elif GATE == "softplus":
        g = -A * softplus(gate + bias)
    else:
        g = lower_bound * sigmoid(A * (gate + bias))
    return g


@triton.jit
def activate_beta(beta, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    """beta, or the sigmoid of its logit, twice that where negative eigenvalues are allowed."""
    if SIGMOID:
        beta = sigmoid(beta)
        if NEG_EIGVAL:
            beta = 2.0 * beta
    return beta

# SPDX-License-Identifier: Apache-2.0
"""The gates of the delta rule and the normalisation of its keys and queries."""

import torch
from torch import Tensor

# Above this, softplus(x) is x; the value vLLM's kernels use.
SOFTPLUS_THRESHOLD = 20.0


def gated_delta_net_gating(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, and the write strength.

    g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b).

    Args:
        a, b: [..., HV].
        A_log, dt_bias: [HV].

    Returns:
        (g, beta), each [..., HV], float32, or float64 where `a` is float64.
    """
    g, beta = gating_in_float64(a, b, A_log, dt_bias)
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    return g.to(dtype), beta.to(dtype)


def gating_in_float64(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated_delta_net_gating` before its results are rounded."""
    x = (a.double() + dt_bias.double()).contiguous()
    softplus = torch.nn.functional.softplus(x, beta=1.0, threshold=SOFTPLUS_THRESHOLD)
    return -A_log.double().exp() * softplus, b.double().contiguous().sigmoid()


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in x's dtype."""
    return l2_normalize_in_float64(x, eps).to(x.dtype)


def l2_normalize_in_float64(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`l2_normalize` before its result is rounded."""
    wide = x.double().contiguous()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)

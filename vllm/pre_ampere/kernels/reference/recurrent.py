# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule a token at a time, on states that live in slots: decode and verification.

For each value head, with decay exp(g), write strength beta and a state S of shape [V, K]:

    S <- exp(g) S
    S <- S + beta (v - S k) k^T
    out = scale S q

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). Slots and accepted
counts mean what they mean to `fused_sigmoid_gating_delta_rule_update` and
`fused_recurrent_gated_delta_rule_packed_decode` in vLLM 0.32
(third_party/flash_linear_attention/ops). One difference: the state is rounded to its dtype after
every token, also between two tokens that are verified together, so that a verified token and a
decoded one are the same to the last bit.
"""

import torch
from torch import Tensor

from vllm.pre_ampere.kernels.reference.gating import gating_in_float64, l2_normalize_in_float64
from vllm.pre_ampere.kernels.reference.ragged import split_points


def fused_sigmoid_gating_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    num_accepted_tokens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Gates, normalisation and delta rule for the tokens of one decode or verification step.

    Args:
        q, k: [num_tokens, H, K], not normalised yet.
        v: [num_tokens, HV, V].
        a, b: [num_tokens, HV], the inputs of the gates.
        A_log, dt_bias: [HV].
        state: [num_slots, HV, V, K], updated in place.
        slots: integers. [n] for one token a request, read and written. [n, k + 1] for verification:
            the state after a request's token j goes to slots[i, j].
        query_start_loc: [n + 1], integers.
        num_accepted_tokens: [n], at least 1: the state is read from slots[i, accepted - 1]. None
            means from slots[i, 0].
        scale: multiplies the queries; None means K ** -0.5.

    Returns:
        [num_tokens, HV, V] in v's dtype. A request whose read slot is 0 or below is skipped and its
        rows are zero; a state that would go to such a slot is not stored.

    Raises:
        ValueError: a request has more tokens than it has slots.
    """
    slots = slots.long() if slots.dim() == 2 else slots.long()[:, None]
    starts, lengths = split_points(query_start_loc)
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > slots.shape[1]:
        raise ValueError(
            f"a request of {longest} tokens needs {longest} state slots, but has {slots.shape[1]}"
        )
    key_dim, group = q.shape[-1], v.shape[1] // q.shape[1]
    q = l2_normalize_in_float64(q) * (key_dim**-0.5 if scale is None else scale)
    k = l2_normalize_in_float64(k)
    g, beta = gating_in_float64(a, b, A_log, dt_bias)
    decay = g.exp()

    requests = (lengths > 0).nonzero().squeeze(1)
    if num_accepted_tokens is None:
        source = slots[requests, 0]
    else:
        accepted = num_accepted_tokens.long()[requests, None]
        source = slots[requests].gather(1, accepted - 1).squeeze(1)
    requests, source = requests[source > 0], source[source > 0]

    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    current = state[source].double()
    for position in range(longest):
        lasting = lengths[requests] > position
        if not bool(lasting.all()):
            requests, current = requests[lasting], current[lasting]
        token = starts[requests] + position
        out[token], current = delta_rule_step(
            q[token].repeat_interleave(group, 1),
            k[token].repeat_interleave(group, 1),
            v[token].double(),
            decay[token],
            beta[token],
            current,
        )
        rounded = current.to(state.dtype)
        target = slots[requests, position]
        stored = target > 0
        state[target[stored]] = rounded[stored]
        current = rounded.double()
    return out.to(v.dtype)


def packed_recurrent_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    num_key_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    scale: float | None = None,
) -> Tensor:
    """One decoded token a request, straight from the output of the convolution.

    Args:
        mixed_qkv: [n, 2 H K + HV V]: queries, keys and values of all heads side by side.
        a, b: [n, HV].
        A_log, dt_bias: [HV].
        state: [num_slots, HV, V, K], updated in place.
        slots: [n], integers; 0 and below are skipped and give zeros.
        num_key_heads, head_dim_k, head_dim_v: H, K and V.
        scale: multiplies the queries; None means K ** -0.5.

    Returns:
        [n, HV, V] in mixed_qkv's dtype.
    """
    q, k, v = split_heads(mixed_qkv, num_key_heads, head_dim_k, head_dim_v)
    query_start_loc = torch.arange(len(slots) + 1, device=slots.device)
    return fused_sigmoid_gating_delta_rule_update(
        q, k, v, a, b, A_log, dt_bias, state, slots, query_start_loc, scale=scale
    )


def split_heads(
    mixed_qkv: Tensor, num_key_heads: int, head_dim_k: int, head_dim_v: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens, 2 H K + HV V] as q, k [tokens, H, K] and v [tokens, HV, V]."""
    key_width = num_key_heads * head_dim_k
    widths = [key_width, key_width, mixed_qkv.shape[1] - 2 * key_width]
    q, k, v = torch.split(mixed_qkv, widths, dim=1)
    return (
        q.reshape(len(q), num_key_heads, head_dim_k),
        k.reshape(len(k), num_key_heads, head_dim_k),
        v.reshape(len(v), v.shape[1] // head_dim_v, head_dim_v),
    )


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence for each row, in the dtype of its inputs.

    The products are multiply-and-sum over the last dimension and not matrix products, whose order
    of summation a library may choose by the number of rows.

    Args:
        q: [n, HV, K], scaled.
        k: [n, HV, K].
        v: [n, HV, V].
        decay, beta: [n, HV].
        state: [n, HV, V, K].

    Returns:
        (out [n, HV, V], the new state).
    """
    decayed = state * decay[..., None, None]
    read = (decayed * k[..., None, :]).sum(-1)
    written = (v - read) * beta[..., None]
    updated = decayed + written[..., None] * k[..., None, :]
    return (updated * q[..., None, :]).sum(-1), updated

# SPDX-License-Identifier: Apache-2.0
"""The reference operations behind the signatures by which the layer calls a kernel.

A kernel on a GPU is told what would cost it a round trip to the host to find out: the longest
request, the split of the batch into blocks. The references find that out themselves, and these
functions drop it. `upstream` has the same functions with the same signatures over Triton kernels.
"""

from torch import Tensor

from vllm.pre_ampere.kernels.reference import chunk, convolution, recurrent
from vllm.pre_ampere.kernels.reference.gating import l2_normalize

fused_sigmoid_gating_delta_rule_update = recurrent.fused_sigmoid_gating_delta_rule_update
post_convolution = chunk.post_convolution


def packed_delta_rule_update(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start_loc: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
) -> Tensor:
    """The recurrence of `reference.recurrent` from the convolution's rows, written to out.

    The arguments are those of `kernels.triton.packed_delta_rule.packed_delta_rule_update`.
    """
    _, value_heads, head_dim_v, head_dim_k = state.shape
    key_heads = (mixed_qkv.shape[1] - value_heads * head_dim_v) // (2 * head_dim_k)
    heads = (key_heads, head_dim_k, head_dim_v)
    gates = (a, b, A_log, dt_bias)
    if query_start_loc is None:
        return out.copy_(recurrent.packed_recurrent_decode(mixed_qkv, *gates, state, slots, *heads))
    q, k, v = recurrent.split_heads(mixed_qkv, *heads)
    return out.copy_(
        fused_sigmoid_gating_delta_rule_update(
            q, k, v, *gates, state, slots, query_start_loc, num_accepted_tokens
        )
    )


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    metadata: object | None = None,
) -> Tensor:
    """`reference.convolution.causal_conv1d_prefill`; metadata is upstream's split into blocks."""
    return convolution.causal_conv1d_prefill(
        x, weight, bias, activation, conv_states, query_start_loc, slots, has_initial_state
    )


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """`reference.convolution.causal_conv1d_update`; max_query_len bounds the longest request."""
    return convolution.causal_conv1d_update(
        x, weight, bias, activation, conv_states, slots, query_start_loc, num_accepted_tokens
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    query_start_loc: Tensor,
    scale: float | None = None,
    normalize_qk: bool = False,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.chunk.chunk_gated_delta_rule`, with the normalisation of q and k if asked for.

    chunk_indices and chunk_offsets are upstream's split into chunks.
    """
    if normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    return chunk.chunk_gated_delta_rule(q, k, v, g, beta, initial_state, query_start_loc, scale)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Triton kernels behind the signatures of the reference operations.

vLLM 0.32: third_party/flash_linear_attention/ops and model_executor/layers/mamba/ops. They import
vLLM when called, because those modules need Triton. Rows of requests that are skipped are whatever the
memory held.
"""

import torch
from torch import Tensor


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
    """`causal_conv1d_fn`; without metadata it copies query_start_loc to the host first."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d

    out: Tensor = causal_conv1d.causal_conv1d_fn(
        x.transpose(0, 1),
        weight,
        bias,
        conv_states,
        query_start_loc,
        cache_indices=slots,
        has_initial_state=has_initial_state,
        activation=activation,
        metadata=metadata,
    )
    return out.transpose(0, 1)


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
    """`causal_conv1d_update`.

    Raises:
        ValueError: query_start_loc without max_query_len, which would have to be fetched from the
            card.
    """
    from vllm.model_executor.layers.mamba.ops import causal_conv1d

    if query_start_loc is not None and max_query_len is None:
        raise ValueError("query_start_loc needs max_query_len, the most tokens of a request")
    out: Tensor = causal_conv1d.causal_conv1d_update(
        x,
        conv_states,
        weight,
        bias,
        activation,
        conv_state_indices=slots,
        num_accepted_tokens=num_accepted_tokens,
        query_start_loc=query_start_loc,
        max_query_len=-1 if max_query_len is None else max_query_len,
        out=torch.empty_like(x),
    )
    return out


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
    """`fused_sigmoid_gating_delta_rule_update`, in place on the state slots."""
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating

    out: Tensor
    out, _ = fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update(
        A_log=A_log,
        a=a,
        b=b,
        dt_bias=dt_bias,
        q=q.unsqueeze(0),
        k=k.unsqueeze(0),
        v=v.unsqueeze(0),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=state,
        inplace_final_state=True,
        cu_seqlens=query_start_loc,
        ssm_state_indices=slots,
        num_accepted_tokens=num_accepted_tokens,
        use_qk_l2norm_in_kernel=True,
    )
    return out.squeeze(0)


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
    """`fused_sigmoid_gating_delta_rule_update`, for decode as for verification.

    Upstream's kernel wants q, k and v contiguous and returns rows of its own: two or three copies
    before it and one after. It, too, gives a single token what a token among others gets, where
    the state is float32; otherwise it does not round the state between two verified tokens.
    """
    _, value_heads, head_dim_v, head_dim_k = state.shape
    value_width = value_heads * head_dim_v
    key_width = (mixed_qkv.shape[1] - value_width) // 2
    q, k, v = mixed_qkv.split([key_width, key_width, value_width], dim=-1)
    if query_start_loc is None:
        query_start_loc = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    return out.copy_(
        fused_sigmoid_gating_delta_rule_update(
            q.unflatten(-1, (-1, head_dim_k)),
            k.unflatten(-1, (-1, head_dim_k)),
            v.unflatten(-1, (-1, head_dim_v)),
            a,
            b,
            A_log,
            dt_bias,
            state,
            slots,
            query_start_loc,
            num_accepted_tokens,
        )
    )


def post_convolution(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    head_dim_k: int,
    head_dim_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`fused_post_conv_prep`."""
    from vllm.third_party.flash_linear_attention.ops import fused_gdn_prefill_post_conv

    q, k, v, g, beta = fused_gdn_prefill_post_conv.fused_post_conv_prep(
        conv_output=conv_output,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        num_k_heads=num_key_heads,
        head_k_dim=head_dim_k,
        head_v_dim=head_dim_v,
        apply_l2norm=True,
        output_g_exp=False,
    )
    return q, k, v, g, beta


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
    """`chunk_gated_delta_rule`; the final state is float32 whatever the initial one is."""
    from vllm.third_party.flash_linear_attention.ops import chunk

    out, final_state = chunk.chunk_gated_delta_rule(
        q=q.unsqueeze(0),
        k=k.unsqueeze(0),
        v=v.unsqueeze(0),
        g=g.unsqueeze(0),
        beta=beta.unsqueeze(0),
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=query_start_loc,
        chunk_indices=chunk_indices,
        chunk_offsets=chunk_offsets,
        use_qk_l2norm_in_kernel=normalize_qk,
    )
    return out.squeeze(0), final_state

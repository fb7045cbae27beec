# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over whole prompts, in chunks, and the token-by-token form it equals.

Within a chunk of C tokens that starts from the state S, with G_t the sum of g up to token t, the
rank-one updates beta_t (...) k_t^T can be collected: row t of U is what token t writes, and

    (I + A) U = diag(beta) (V - diag(exp G) K S^T),   A_tj = beta_t exp(G_t - G_j) k_t.k_j  (j < t)

so one triangular solve gives every write of the chunk (the UT transform of the WY representation).
Sources: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv 2406.06484) and "Gated Delta Networks" (arXiv 2412.06464).
"""

import torch
from torch import Tensor

from vllm.pre_ampere.kernels.reference.gating import gated_delta_net_gating, l2_normalize
from vllm.pre_ampere.kernels.reference.ragged import split_points
from vllm.pre_ampere.kernels.reference.recurrent import delta_rule_step, split_heads


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    query_start_loc: Tensor,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The delta rule for requests of any length, a chunk at a time.

    The state is rounded to initial_state's dtype at the end of every chunk, so a prompt that is cut
    at a multiple of chunk_size gives the same result as the whole one.

    Args:
        q, k: [num_tokens, H, K], already normalised.
        v: [num_tokens, HV, V].
        g: [num_tokens, HV], the logarithm of the decay, finite.
        beta: [num_tokens, HV].
        initial_state: [n, HV, V, K], left as it is.
        query_start_loc: [n + 1], integers.
        scale: multiplies the queries; None means K ** -0.5.
        chunk_size: tokens in a chunk.

    Returns:
        (out [num_tokens, HV, V] in v's dtype, final_state [n, HV, V, K] in initial_state's dtype).
        Rows of out beyond query_start_loc's last entry are zero.
    """
    starts, lengths = split_points(query_start_loc)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros_like(v)
    final_state = initial_state.clone()
    for first in range(0, int(lengths.max()) if len(lengths) else 0, chunk_size):
        requests = (lengths > first).nonzero().squeeze(1)
        position = first + torch.arange(chunk_size, device=q.device)
        inside = position < lengths[requests, None]
        # A request's last chunk is filled up with zeros: they write nothing and do not decay.
        token = (starts[requests, None] + position).where(inside, 0)
        chunk, state = _one_chunk(
            final_state[requests].double(),
            *(_heads_first(x[token], inside, v.shape[1]) for x in (q, k, v, g, beta)),
        )
        out[token[inside]] = (chunk * scale).transpose(1, 2)[inside].to(v.dtype)
        final_state[requests] = state.to(final_state.dtype)
    return out, final_state


def _heads_first(x: Tensor, inside: Tensor, num_heads: int) -> Tensor:
    """[n, C, heads, ...] as float64 [n, num_heads, C, ...], zero where not inside [n, C]."""
    inside = inside.reshape(*inside.shape, *[1] * (x.dim() - 2))
    wide = x.double().masked_fill(~inside, 0.0).transpose(1, 2)
    return wide.repeat_interleave(num_heads // wide.shape[1], 1)


def _one_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of n requests, as the module describes it.

    Args:
        state: [n, HV, V, K]; q, k: [n, HV, C, K]; v: [n, HV, C, V]; g, beta: [n, HV, C].

    Returns:
        (out [n, HV, C, V], not scaled; the state after the chunk).
    """
    size = q.shape[2]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    log_decay = g.cumsum(-1)
    # Masked before the exponential: above the diagonal it could overflow.
    between = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~causal, -torch.inf)
    between = between.exp()
    from_start = log_decay.exp()[..., None]
    to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]

    against_keys = torch.cat([k, q], dim=2) @ k.mT
    against_state = torch.cat([k, q], dim=2) @ state.mT
    keys, queries = torch.split(against_keys, size, dim=2)
    state_keys, state_queries = torch.split(against_state, size, dim=2)
    # solve_triangular takes the diagonal as ones and does not read what stands above it.
    writes = torch.linalg.solve_triangular(
        keys * between * beta[..., None],
        (v - state_keys * from_start) * beta[..., None],
        upper=False,
        unitriangular=True,
    )
    out = state_queries * from_start + (queries * between) @ writes
    return out, state * from_start[:, :, -1:] + writes.mT @ (k * to_end)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    query_start_loc: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function of the same arguments as `chunk_gated_delta_rule`, a token at a time.

    This is the definition; it rounds the state once, at the end.
    """
    starts, lengths = split_points(query_start_loc)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = v.shape[1] // q.shape[1]
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    final_state = initial_state.to(torch.float64, copy=True)
    for position in range(int(lengths.max()) if len(lengths) else 0):
        requests = (lengths > position).nonzero().squeeze(1)
        token = starts[requests] + position
        out[token], final_state[requests] = delta_rule_step(
            q[token].double().repeat_interleave(group, 1) * scale,
            k[token].double().repeat_interleave(group, 1),
            v[token].double(),
            g[token].double().exp(),
            beta[token].double(),
            final_state[requests],
        )
    return out.to(v.dtype), final_state.to(initial_state.dtype)


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
    """From the output of the convolution to the inputs of `chunk_gated_delta_rule`.

    The same split, normalisation and gates as `fused_post_conv_prep` in vLLM 0.32.

    Args:
        conv_output: [num_tokens, 2 H K + HV V].
        a, b: [num_tokens, HV].
        A_log, dt_bias: [HV].
        num_key_heads, head_dim_k, head_dim_v: H, K and V.

    Returns:
        (q, k [num_tokens, H, K] normalised, v [num_tokens, HV, V], all in conv_output's dtype;
        g, beta [num_tokens, HV] as `gated_delta_net_gating` returns them).
    """
    q, k, v = split_heads(conv_output, num_key_heads, head_dim_k, head_dim_v)
    g, beta = gated_delta_net_gating(a, b, A_log, dt_bias)
    return l2_normalize(q), l2_normalize(k), v.contiguous(), g, beta

# SPDX-License-Identifier: Apache-2.0
"""Launches of the attention layer, as upstream's TRITON_ATTN makes them (vLLM 0.32,
v1/attention/backends/triton_attn.py), and of its rotary embedding."""

import torch
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from vllm.pre_ampere.preflight.launches.launch import (
    PROMPT_TOKENS,
    REQUESTS,
    SPECULATIVE_TOKENS,
    Launch,
)
from vllm.pre_ampere.preflight.model import ModelShapes

_BLOCKS = 4


def _cache(shapes: ModelShapes) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as [blocks, block size, heads, dim] views of one [blocks, heads, …] cache."""
    block = shapes.attention_block_size(SPECULATIVE_TOKENS)
    size = (_BLOCKS, shapes.kv_heads_per_rank, block, 2 * shapes.head_dim)
    cache = torch.empty(size, dtype=torch.float16).transpose(1, 2)
    keys, values = cache.split(shapes.head_dim, dim=-1)
    return keys, values


def _attend(shapes: ModelShapes, requests: int, query_len: int) -> None:
    heads, dim = shapes.query_heads_per_rank, shapes.head_dim
    threshold = triton_attn.MIN_LAUNCH_GRID_SIZE_2D // shapes.kv_heads_per_rank
    segments = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    keys, values = _cache(shapes)
    query = torch.empty(requests * query_len, heads, dim, dtype=torch.float16)
    scale = torch.ones(1).expand(requests, shapes.kv_heads_per_rank)
    unified_attention(
        q=query,
        k=keys,
        v=values,
        out=torch.empty_like(query),
        cu_seqlens_q=torch.arange(0, len(query) + 1, query_len, dtype=torch.int32),
        max_seqlen_q=query_len,
        seqused_k=torch.full((requests,), query_len, dtype=torch.int32),
        max_seqlen_k=query_len,
        softmax_scale=dim**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=torch.zeros(requests, _BLOCKS, dtype=torch.int32),
        softcap=0,
        q_descale=None,
        k_descale=scale,
        v_descale=scale,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=segments,
        softmax_segm_output=torch.empty(threshold, heads, segments, dim),
        softmax_segm_max=torch.empty(threshold, heads, segments),
        softmax_segm_expsum=torch.empty(threshold, heads, segments),
    )


def _attention_prefill(shapes: ModelShapes) -> None:
    _attend(shapes, 1, PROMPT_TOKENS)


def _attention_decode(shapes: ModelShapes) -> None:
    _attend(shapes, REQUESTS, 1)


def _attention_verify(shapes: ModelShapes) -> None:
    _attend(shapes, REQUESTS, SPECULATIVE_TOKENS + 1)


def _cache_write(shapes: ModelShapes) -> None:
    keys, values = _cache(shapes)
    new = torch.empty(REQUESTS, shapes.kv_heads_per_rank, shapes.head_dim, dtype=torch.float16)
    one = torch.ones(1)
    slots = torch.arange(REQUESTS)
    triton_reshape_and_cache_flash(new, new, keys, values, slots, "auto", one, one)


def _rotary_embedding(shapes: ModelShapes) -> None:
    """The three-axis embedding of Qwen3.5, whose models take images."""
    if not shapes.model_type.startswith("qwen3_5"):
        return
    from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope

    rotary_dim = int(shapes.head_dim * shapes.partial_rotary_factor)
    half = rotary_dim // 2
    height = half // 3
    angles = torch.empty(3, REQUESTS, half, dtype=torch.float16)
    triton_mrope(
        torch.empty(REQUESTS, shapes.query_heads_per_rank * shapes.head_dim, dtype=torch.float16),
        torch.empty(REQUESTS, shapes.kv_heads_per_rank * shapes.head_dim, dtype=torch.float16),
        angles,
        angles,
        [half - 2 * height, height, height],
        shapes.head_dim,
        rotary_dim,
        True,
        True,
    )


LAUNCHES: dict[str, Launch] = {
    "attention, rotary embedding": _rotary_embedding,
    "attention, cache write": _cache_write,
    "attention, prefill": _attention_prefill,
    "attention, decode": _attention_decode,
    "attention, verify": _attention_verify,
}

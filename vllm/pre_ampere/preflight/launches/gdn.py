# SPDX-License-Identifier: Apache-2.0
"""Launches of the GDN layer: the functions through which our layer calls kernels."""

from collections.abc import Callable
from functools import partial

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layer_norm_fwd

from vllm.pre_ampere.kernels import upstream
from vllm.pre_ampere.kernels.triton.packed_delta_rule import packed_delta_rule_update
from vllm.pre_ampere.preflight.launches.launch import (
    PROMPT_TOKENS,
    REQUESTS,
    SPECULATIVE_TOKENS,
    Launch,
)
from vllm.pre_ampere.preflight.model import ModelShapes

_STEP = SPECULATIVE_TOKENS + 1
_SLOTS = REQUESTS * _STEP + 1


def _half(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float16)


def _states(shapes: ModelShapes) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution [slots, dim, window] and recurrent [slots, value heads, V, K] states.

    A slot is a page that the two share, as upstream lays it out, so both are strided views.
    """
    window, recurrent = MambaStateShapeCalculator.gated_delta_net_state_shape(
        shapes.tensor_parallel_size,
        shapes.linear_num_key_heads,
        shapes.linear_num_value_heads,
        shapes.linear_key_head_dim,
        shapes.linear_value_head_dim,
        shapes.linear_conv_kernel_dim,
        SPECULATIVE_TOKENS,
    )
    block = shapes.attention_block_size(SPECULATIVE_TOKENS)
    page = block * 2 * 2 * shapes.kv_heads_per_rank * shapes.head_dim
    pages = torch.zeros(_SLOTS, page, dtype=torch.uint8)
    end = 2 * window[0] * window[1]
    convolution = pages[:, :end].view(torch.float16).unflatten(1, window)
    size = 4 * recurrent[0] * recurrent[1] * recurrent[2]
    state = pages[:, end : end + size].view(torch.float32).unflatten(1, recurrent)
    return convolution.transpose(-1, -2), state


def _gates(shapes: ModelShapes) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log, kept in float32 by the model, and dt_bias, a parameter of the model's dtype."""
    heads = shapes.value_heads_per_rank
    return torch.zeros(heads, dtype=torch.float32), _half(heads)


def _convolution_weight(shapes: ModelShapes) -> torch.Tensor:
    return _half(shapes.convolution_dim, shapes.linear_conv_kernel_dim)


def _convolution_prefill(shapes: ModelShapes) -> None:
    upstream.causal_conv1d_prefill(
        _half(PROMPT_TOKENS, shapes.convolution_dim),
        _convolution_weight(shapes),
        None,
        "silu",
        _states(shapes)[0],
        torch.tensor([0, PROMPT_TOKENS], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.bool),
    )


def _convolution_decode(shapes: ModelShapes) -> None:
    upstream.causal_conv1d_update(
        _half(REQUESTS, shapes.convolution_dim),
        _convolution_weight(shapes),
        None,
        "silu",
        _states(shapes)[0],
        torch.arange(1, REQUESTS + 1, dtype=torch.int32),
    )


def _convolution_verify(shapes: ModelShapes) -> None:
    slots = torch.arange(1, REQUESTS * _STEP + 1, dtype=torch.int32).view(REQUESTS, _STEP)
    upstream.causal_conv1d_update(
        _half(REQUESTS * _STEP, shapes.convolution_dim),
        _convolution_weight(shapes),
        None,
        "silu",
        _states(shapes)[0],
        slots[:, 0],
        torch.arange(0, REQUESTS * _STEP + 1, _STEP, dtype=torch.int32),
        torch.ones(REQUESTS, dtype=torch.int32),
        _STEP,
    )


def _update(shapes: ModelShapes, launcher: Callable[..., object], tokens: int) -> None:
    """One token of each request, or the tokens of a verification."""
    rows, heads = REQUESTS * tokens, shapes.value_heads_per_rank
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    verifies = tokens > 1
    launcher(
        _half(rows, shapes.convolution_dim),
        _half(rows, heads),
        _half(rows, heads),
        *_gates(shapes),
        _states(shapes)[1],
        slots.view(REQUESTS, tokens) if verifies else slots,
        torch.arange(0, rows + 1, tokens, dtype=torch.int32) if verifies else None,
        torch.ones(REQUESTS, dtype=torch.int32) if verifies else None,
        _half(rows, heads, shapes.linear_value_head_dim),
    )


def _chunked_prefill(shapes: ModelShapes) -> None:
    """The preparation after the convolution and the chunked delta rule."""
    heads = shapes.value_heads_per_rank
    q, k, v, g, beta = upstream.post_convolution(
        _half(PROMPT_TOKENS, shapes.convolution_dim),
        _half(PROMPT_TOKENS, heads),
        _half(PROMPT_TOKENS, heads),
        *_gates(shapes),
        shapes.key_heads_per_rank,
        shapes.linear_key_head_dim,
        shapes.linear_value_head_dim,
    )
    state = _states(shapes)[1][:1].contiguous()
    upstream.chunk_gated_delta_rule(
        q, k, v, g, beta, state, torch.tensor([0, PROMPT_TOKENS], dtype=torch.int32)
    )


def _gated_norm(shapes: ModelShapes) -> None:
    """Compiled by upstream when it starts, whether or not Inductor fuses the norm."""
    size = (REQUESTS * shapes.value_heads_per_rank, shapes.linear_value_head_dim)
    layer_norm_fwd(
        _half(*size),
        _half(size[1]),
        None,
        1e-6,
        z=_half(*size),
        group_size=size[1],
        norm_before_gate=True,
        is_rms_norm=True,
        activation="silu",
    )


LAUNCHES: dict[str, Launch] = {
    "GDN convolution, prefill": _convolution_prefill,
    "GDN convolution, decode": _convolution_decode,
    "GDN convolution, verify": _convolution_verify,
    "GDN update, decode": partial(_update, launcher=packed_delta_rule_update, tokens=1),
    "GDN update, verify": partial(_update, launcher=packed_delta_rule_update, tokens=_STEP),
    # With VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE=0.
    "GDN upstream's update, decode": partial(
        _update, launcher=upstream.packed_delta_rule_update, tokens=1
    ),
    "GDN upstream's update, verify": partial(
        _update, launcher=upstream.packed_delta_rule_update, tokens=_STEP
    ),
    "GDN chunked prefill": _chunked_prefill,
    "GDN gated norm": _gated_norm,
}

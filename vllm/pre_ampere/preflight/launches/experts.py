# SPDX-License-Identifier: Apache-2.0
"""Launches of a mixture of experts with fp16 weights, at upstream's default tiles (no tuned table
exists for these cards; vLLM 0.32, model_executor/layers/fused_moe/fused_moe.py)."""

import functools
from unittest import mock

import torch
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.triton_utils import tl

from vllm.pre_ampere import environment
from vllm.pre_ampere.preflight.launches.launch import Launch
from vllm.pre_ampere.preflight.model import ModelShapes


def _batch_invariant(shapes: ModelShapes) -> None:
    """The tile of `VLLM_BATCH_INVARIANT=1`, which is the same for every batch."""
    with mock.patch.object(fused_moe.envs, environment.BATCH_INVARIANT.name, True):
        _experts(shapes, 1)


def _experts(shapes: ModelShapes, tokens: int) -> None:
    intermediate = shapes.moe_intermediate_size // shapes.tensor_parallel_size
    top_k, experts, hidden = shapes.num_experts_per_tok, shapes.num_experts, shapes.hidden_size
    config = fused_moe.get_default_config(tokens, experts, intermediate, hidden, top_k, None)
    padded = tokens * top_k + experts * (config["BLOCK_SIZE_M"] - 1)
    for rows, columns, weighted in (
        (hidden, 2 * intermediate, False),
        (intermediate, hidden, True),
    ):
        fused_moe.invoke_fused_moe_triton_kernel(
            # Not touched, so no memory is taken for the weights.
            torch.empty(tokens * (top_k if weighted else 1), rows, dtype=torch.float16),
            torch.empty(experts, columns, rows, dtype=torch.float16),
            torch.empty(tokens, top_k, columns, dtype=torch.float16),
            None,
            None,
            torch.empty(tokens, top_k, dtype=torch.float32),
            torch.zeros(padded, dtype=torch.int32),
            torch.zeros(padded // config["BLOCK_SIZE_M"], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            mul_routed_weight=weighted,
            top_k=1 if weighted else top_k,
            config=config,
            compute_type=tl.float16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )


LAUNCHES: dict[str, Launch] = {
    f"experts, {tokens} tokens": functools.partial(_experts, tokens=tokens)
    for tokens in (1, 48, 256, 2048)
} | {"experts, batch-invariant": _batch_invariant}

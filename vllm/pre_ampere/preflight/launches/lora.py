# SPDX-License-Identifier: Apache-2.0
"""Launches of LoRA adapters of rank 16 in fp16, through the wrapper that upstream's LoRA layers call
(vLLM 0.32, lora/punica_wrapper/punica_gpu.py), with a server's defaults: one adapter at a time.

A projection shrinks its input to the rank and expands that into each of its slices, in other tiles
from 128 tokens on. Adapters of experts take one of two kernels: one for a few tokens, which need no
sorting by expert, and one whose rows a block grow with the batch.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.triton_ops import fused_moe_lora_op
from vllm.lora.ops.triton_ops import utils as pointer_tables
from vllm.lora.punica_wrapper import punica_gpu
from vllm.platforms import current_platform

from vllm.pre_ampere.preflight.launches.launch import PROMPT_TOKENS, REQUESTS, Launch, half
from vllm.pre_ampere.preflight.model import ModelShapes

_RANK = 16
_ADAPTERS = 1
# A projection's inputs a rank, and the sizes of its slices.
Projection = Callable[[ModelShapes], tuple[int, tuple[int, ...]]]


def _wrapper(shapes: ModelShapes, tokens: int) -> punica_gpu.PunicaWrapperGPU:
    """A wrapper that is told that every token of the step uses the one adapter."""
    wrapper = punica_gpu.PunicaWrapperGPU(
        tokens,
        tokens,
        "cpu",
        lora_config=LoRAConfig(max_lora_rank=_RANK, max_loras=_ADAPTERS),
    )
    mapping = LoRAMapping((1,) * tokens, (1,) * tokens, is_prefill=tokens > REQUESTS)
    wrapper.update_metadata(mapping, [1], _ADAPTERS, shapes.vocab_size)
    return wrapper


def _gdn_input(shapes: ModelShapes) -> tuple[int, tuple[int, ...]]:
    """q, k, v and z; one slice in Qwen3-Next, whose columns are interleaved by key head."""
    keys = shapes.key_heads_per_rank * shapes.linear_key_head_dim
    values = shapes.value_heads_per_rank * shapes.linear_value_head_dim
    slices = (keys, keys, values, values)
    return shapes.hidden_size, (sum(slices),) if shapes.model_type == "qwen3_next" else slices


def _gdn_output(shapes: ModelShapes) -> tuple[int, tuple[int, ...]]:
    return shapes.value_heads_per_rank * shapes.linear_value_head_dim, (shapes.hidden_size,)


def _attention_input(shapes: ModelShapes) -> tuple[int, tuple[int, ...]]:
    """q with its output gate, k and v."""
    keys = shapes.kv_heads_per_rank * shapes.head_dim
    return shapes.hidden_size, (2 * shapes.query_heads_per_rank * shapes.head_dim, keys, keys)


def _project(shapes: ModelShapes, projection: Projection, tokens: int) -> None:
    inputs, slices = projection(shapes)
    # Keyed by addresses, which a tensor of another launch may have had.
    pointer_tables._LORA_A_PTR_DICT.clear()
    pointer_tables._LORA_B_PTR_DICT.clear()
    _wrapper(shapes, tokens).add_lora_linear(
        half(tokens, sum(slices)),
        half(tokens, inputs),
        tuple(half(_ADAPTERS, 1, _RANK, inputs) for _ in slices),
        tuple(half(_ADAPTERS, 1, size, _RANK) for size in slices),
        1.0,
        slices,
    )


@contextmanager
def _without_compiled_operators() -> Iterator[None]:
    """Stand in for the two C++ operators that the launchers call.

    One sorts tokens by adapter and expert into tensors that its caller has made; the other asks the
    CUDA driver for the shared memory of a block.
    """
    limit = current_platform.answering_device().shared_memory_per_block
    with (
        mock.patch.object(punica_gpu.ops, "moe_lora_align_block_size", return_value=None),
        mock.patch.object(fused_moe_lora_op, "get_max_shared_memory_bytes", return_value=limit),
    ):
        yield


def _experts(shapes: ModelShapes, tokens: int) -> None:
    intermediate = shapes.moe_intermediate_size // shapes.tensor_parallel_size
    top_k, experts, hidden = shapes.num_experts_per_tok, shapes.num_experts, shapes.hidden_size
    # Qwen3.5's adapters hold gate and up in one tensor, Qwen3-Next's in two.
    slices = 1 if shapes.model_type.startswith("qwen3_5") else 2
    gate_up = half(experts, 2 * intermediate, hidden)
    down = half(experts, hidden, intermediate)
    enabled = torch.ones(_ADAPTERS + 1, dtype=torch.int32)
    weights = torch.empty(tokens, top_k, dtype=torch.float32)
    wrapper = _wrapper(shapes, tokens)
    with _without_compiled_operators():
        assignment = wrapper.add_lora_w13(
            half(tokens, top_k, 2 * intermediate),
            half(tokens, hidden),
            (half(_ADAPTERS, experts, _RANK, hidden),) * slices,
            (half(_ADAPTERS, experts, 2 * intermediate // slices, _RANK),) * slices,
            torch.zeros(tokens, top_k, dtype=torch.int32),
            weights,
            None,
            gate_up,
            down,
            tokens,
            top_k,
            _ADAPTERS,
            enabled,
            experts,
            top_k,
            slices,
            fully_sharded=False,
            use_tuned_config=False,
        )
        wrapper.add_lora_w2(
            half(tokens, top_k, hidden),
            half(tokens * top_k, intermediate),
            (half(_ADAPTERS, experts, _RANK, intermediate),),
            (half(_ADAPTERS, experts, hidden, _RANK),),
            weights,
            *assignment,
            tokens,
            gate_up,
            down,
            top_k,
            _ADAPTERS,
            enabled,
            top_k,
            fully_sharded=False,
            tp_rank=0,
            use_tuned_config=False,
        )


_PROJECTIONS: dict[str, Projection] = {
    "GDN input": _gdn_input,
    "GDN output": _gdn_output,
    "attention input": _attention_input,
}

LAUNCHES: dict[str, Launch] = {
    f"LoRA, {name}, {step}": functools.partial(_project, projection=projection, tokens=tokens)
    for name, projection in _PROJECTIONS.items()
    for step, tokens in (("decode", REQUESTS), ("prefill", PROMPT_TOKENS))
}

EXPERT_LAUNCHES: dict[str, Launch] = {
    f"LoRA, experts, {tokens} tokens": functools.partial(_experts, tokens=tokens)
    for tokens in (1, 16, 48, 256, 2048)
}

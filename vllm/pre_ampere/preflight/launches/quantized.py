# SPDX-License-Identifier: Apache-2.0
"""Launches of upstream's Triton kernels for weights of 4 and 8 bits (vLLM 0.32), which multiply in
fp16, or in int8 where the activations are. Most formats of docs/quantization.md never reach one:
Marlin, Exllama and CUTLASS are machine code.

What reaches them, by upstream's own rules:

- Linear, zero points. Volta: Quark INT4. Turing: compressed-tensors and Quark INT4 in groups of 256;
  in any groups, and AWQ too, with `--linear-backend triton`.
- Linear, symmetric: GPTQ (Turing), compressed-tensors INT4 (Turing) and Quark INT4 (both) with
  `--linear-backend triton`.
- AWQ, with `VLLM_USE_TRITON_AWQ=1`. Turing: AWQ and AutoRound in AWQ's packing, without zero points.
  Volta: AutoRound in AWQ's packing.
- Experts. Volta: experts of GPTQ and compressed-tensors, in a checkpoint whose other layers are not
  quantised, for those are refused. Turing: GPTQ and AWQ with `--quantization moe_wna16`, or where a
  rank's part of an expert cuts a group; with `--moe-backend triton`, compressed-tensors too.
- Embedding, both: compressed-tensors with a quantised embedding.

- INT8 activations, Turing: compressed-tensors INT8 (W8A8), experts always and linear layers with
  `--linear-backend triton`. Volta is refused both.

Groups are of 128, or of what a rank's part of an expert leaves of them. Products of int8 are launched
where they go to the tensor cores; below sm80 Triton's own lowering has none and does not compile them.
"""

import functools
import math
from types import SimpleNamespace

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16 import TritonW4A16LinearKernel
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.quantization.awq_triton import (
    awq_dequantize_triton,
    awq_gemm_triton,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding import (
    CompressedTensorsEmbeddingWNA16Int,
    QuantizationArgs,
)
from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import (
    triton_scaled_mm,
)
from vllm.model_executor.layers.quantization.utils.int8_utils import per_token_quant_int8
from vllm.scalar_type import scalar_types
from vllm.triton_utils import tl

from vllm.pre_ampere.preflight.launches.launch import PROMPT_TOKENS, REQUESTS, Launch, half
from vllm.pre_ampere.preflight.model import ModelShapes

_GROUP = 128
_PACKED = 8  # Weights of 4 bits in a word of 32.
_AWQ_SPLITS = _PACKED  # Upstream's linear method passes its pack factor.


def _words(*size: int) -> torch.Tensor:
    """Eight weights of 4 bits each."""
    return torch.empty(size, dtype=torch.int32)


def _int8(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8)


def _gdn_input(shapes: ModelShapes) -> tuple[int, int]:
    """Inputs and outputs of GDN's first projection: q, k, v and z."""
    values = shapes.value_heads_per_rank * shapes.linear_value_head_dim
    return shapes.hidden_size, shapes.convolution_dim + values


def _linear(shapes: ModelShapes, tokens: int, zero_points: bool) -> None:
    size = inputs, outputs = _gdn_input(shapes)
    config = MPLinearLayerConfig(
        full_weight_shape=size,
        partition_weight_shape=size,
        weight_type=scalar_types.uint4 if zero_points else scalar_types.uint4b8,
        act_type=torch.float16,
        group_size=_GROUP,
        zero_points=zero_points,
    )
    layer = SimpleNamespace(
        weight=_words(inputs, outputs // _PACKED),
        scale=half(inputs // _GROUP, outputs),
        zero_point=_words(inputs // _GROUP, outputs // _PACKED),
    )
    kernel = TritonW4A16LinearKernel(config, "weight", "scale", "zero_point")
    kernel.apply_weights(layer, half(tokens, inputs))


def _awq(shapes: ModelShapes, tokens: int) -> None:
    """Upstream unpacks the weights for a product of cuBLAS from 256 tokens on."""
    inputs, outputs = _gdn_input(shapes)
    weight = _words(inputs, outputs // _PACKED)
    zero_points = _words(inputs // _GROUP, outputs // _PACKED)
    scales = half(inputs // _GROUP, outputs)
    if tokens >= 256:
        awq_dequantize_triton(weight, scales, zero_points)
    else:
        awq_gemm_triton(half(tokens, inputs), weight, scales, zero_points, _AWQ_SPLITS)


def _embedding(shapes: ModelShapes) -> None:
    vocabulary, hidden = shapes.vocab_size // shapes.tensor_parallel_size, shapes.hidden_size
    layer = SimpleNamespace(
        weight_packed=_words(vocabulary, hidden // _PACKED),
        weight_scale=half(vocabulary, hidden // _GROUP),
        hidden_size=hidden,
    )
    method = CompressedTensorsEmbeddingWNA16Int(
        QuantizationArgs(num_bits=4, strategy="group", group_size=_GROUP)
    )
    method.embedding(layer, torch.zeros(REQUESTS, dtype=torch.int32))


def _experts(shapes: ModelShapes, tokens: int, bits: int, zero_points: bool) -> None:
    intermediate = shapes.moe_intermediate_size // shapes.tensor_parallel_size
    top_k, experts, hidden = shapes.num_experts_per_tok, shapes.num_experts, shapes.hidden_size
    group = math.gcd(_GROUP, intermediate)
    in_a_byte = 8 // bits

    def weights(outputs: int, inputs: int) -> torch.Tensor:
        return torch.empty(experts, outputs, inputs // in_a_byte, dtype=torch.uint8)

    gate_up, down = weights(2 * intermediate, hidden), weights(hidden, intermediate)
    config = fused_moe.try_get_optimal_moe_config(
        tuple(gate_up.shape),
        tuple(down.shape),
        top_k,
        f"int{bits}_w{bits}a16",
        tokens,
        [0, group],
    )
    block = config["BLOCK_SIZE_M"]
    padded = tokens * top_k + experts * (block - 1)
    for weight, inputs, weighted in ((gate_up, hidden, False), (down, intermediate, True)):
        outputs, groups = weight.size(1), inputs // group
        zeros = torch.empty(experts, outputs // in_a_byte, groups, dtype=torch.uint8)
        fused_moe.invoke_fused_moe_wna16_triton_kernel(
            half(tokens * (top_k if weighted else 1), inputs),
            weight,
            half(tokens, top_k, outputs),
            half(experts, outputs, groups),
            zeros if zero_points else None,
            torch.empty(tokens, top_k, dtype=torch.float32) if weighted else None,
            torch.zeros(padded, dtype=torch.int32),
            torch.zeros(math.ceil(padded / block), dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            mul_routed_weight=weighted,
            top_k=1 if weighted else top_k,
            config=config,
            compute_type=tl.float16,
            use_int8_w8a16=bits == 8,
            use_int4_w4a16=bits == 4,
            block_shape=[0, group],
        )


def _int8_linear(shapes: ModelShapes, tokens: int) -> None:
    inputs, outputs = _gdn_input(shapes)
    triton_scaled_mm(
        _int8(tokens, inputs),
        # The kernel's weight is the checkpoint's, transposed.
        _int8(outputs, inputs).t(),
        torch.empty(tokens, 1),
        torch.empty(outputs, 1),
        torch.float16,
    )


def _int8_experts(shapes: ModelShapes, tokens: int) -> None:
    intermediate = shapes.moe_intermediate_size // shapes.tensor_parallel_size
    top_k, experts, hidden = shapes.num_experts_per_tok, shapes.num_experts, shapes.hidden_size
    config = fused_moe.try_get_optimal_moe_config(
        (experts, 2 * intermediate, hidden), (experts, hidden, intermediate), top_k, None, tokens
    )
    padded = tokens * top_k + experts * (config["BLOCK_SIZE_M"] - 1)
    for inputs, outputs, weighted in (
        (hidden, 2 * intermediate, False),
        (intermediate, hidden, True),
    ):
        rows = tokens * (top_k if weighted else 1)
        quantised, scales = per_token_quant_int8(half(rows, inputs))
        fused_moe.invoke_fused_moe_triton_kernel(
            quantised,
            _int8(experts, outputs, inputs),
            half(tokens, top_k, outputs),
            scales,
            torch.empty(experts, outputs, 1),
            torch.empty(tokens, top_k),
            torch.zeros(padded, dtype=torch.int32),
            torch.zeros(math.ceil(padded / config["BLOCK_SIZE_M"]), dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            mul_routed_weight=weighted,
            top_k=1 if weighted else top_k,
            config=config,
            # As upstream has it for int8 activations, whatever the output is.
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=True,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=True,
        )


LAUNCHES: dict[str, Launch] = {
    "quantized, embedding": _embedding,
    **{
        f"quantized, linear, {kind}, {tokens} tokens": functools.partial(
            _linear, tokens=tokens, zero_points=zero_points
        )
        for kind, zero_points in (("symmetric", False), ("zero points", True))
        for tokens in (REQUESTS, 48, PROMPT_TOKENS)
    },
    **{
        f"quantized, AWQ, {tokens} tokens": functools.partial(_awq, tokens=tokens)
        for tokens in (REQUESTS, 256)
    },
}

EXPERT_LAUNCHES: dict[str, Launch] = {
    f"quantized, experts, {kind}, {tokens} tokens": functools.partial(
        _experts, tokens=tokens, bits=bits, zero_points=zero_points
    )
    for kind, bits, zero_points in (
        ("4 bits", 4, False),
        ("4 bits with zero points", 4, True),
        ("8 bits", 8, False),
    )
    # Each is another tile, of 4 or of 8 bits.
    for tokens in (1, REQUESTS, 16, 32, 2048)
}

INT8_LAUNCHES: dict[str, Launch] = {
    f"quantized, linear, INT8, {tokens} tokens": functools.partial(_int8_linear, tokens=tokens)
    # Each is another tile.
    for tokens in (REQUESTS, 48, 96, PROMPT_TOKENS)
}

INT8_EXPERT_LAUNCHES: dict[str, Launch] = {
    f"quantized, experts, INT8, {tokens} tokens": functools.partial(_int8_experts, tokens=tokens)
    for tokens in (1, 48, 256, 2048)
}

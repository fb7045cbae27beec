# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model that decide what its kernels are compiled for."""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt

_MODELS = Path(__file__).with_name("models")


class ModelShapes(BaseModel):
    """One rank's part of a model of the qwen3_next or qwen3_5 family.

    Head counts are the whole model's; the properties ending in `_per_rank` divide them by
    `tensor_parallel_size`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    tensor_parallel_size: PositiveInt = 1
    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    partial_rotary_factor: float
    linear_conv_kernel_dim: PositiveInt
    linear_key_head_dim: PositiveInt
    linear_value_head_dim: PositiveInt
    linear_num_key_heads: PositiveInt
    linear_num_value_heads: PositiveInt
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @property
    def label(self) -> str:
        """Such as "Qwen3.5-4B TP2"."""
        return f"{self.name} TP{self.tensor_parallel_size}"

    @property
    def key_heads_per_rank(self) -> int:
        """GDN key heads."""
        return self.linear_num_key_heads // self.tensor_parallel_size

    @property
    def value_heads_per_rank(self) -> int:
        """GDN value heads."""
        return self.linear_num_value_heads // self.tensor_parallel_size

    @property
    def convolution_dim(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        keys = 2 * self.key_heads_per_rank * self.linear_key_head_dim
        return keys + self.value_heads_per_rank * self.linear_value_head_dim

    @property
    def query_heads_per_rank(self) -> int:
        """Attention heads."""
        return self.num_attention_heads // self.tensor_parallel_size

    @property
    def kv_heads_per_rank(self) -> int:
        """Attention's key and value heads; each rank has at least one."""
        return max(1, self.num_key_value_heads // self.tensor_parallel_size)

    def attention_block_size(self, num_speculative_tokens: int) -> int:
        """Tokens in a block of the attention cache, a multiple of 16.

        Upstream gives attention and GDN pages of one size (vLLM 0.32,
        `Platform._align_hybrid_block_size`); here with fp16 activations and float32 states.
        """
        window = self.linear_conv_kernel_dim - 1 + num_speculative_tokens
        state = self.value_heads_per_rank * self.linear_value_head_dim * self.linear_key_head_dim
        gdn_page = 2 * self.convolution_dim * window + 4 * state
        bytes_per_token = 2 * 2 * self.kv_heads_per_rank * self.head_dim
        return 16 * math.ceil(gdn_page / (16 * bytes_per_token))


def known_models() -> tuple[Path, ...]:
    """The shape files that come with the project."""
    return tuple(sorted(_MODELS.glob("*.json")))


def load_shapes(path: Path, tensor_parallel_size: int = 1) -> ModelShapes:
    """Read a model's config.json, or one of `known_models()`.

    Raises:
        ValueError: not a model of this family, or its heads cannot be split that way.
    """
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise ValueError(f"{path} holds no description of a model")
    text: dict[str, Any] = config.get("text_config", config)
    rope = text.get("rope_parameters") or {}
    text = {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0), **text}
    name = config.get("name") or (path.parent.name if path.name == "config.json" else path.stem)
    shapes = ModelShapes(**{**text, "name": name, "tensor_parallel_size": tensor_parallel_size})
    for size in ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"):
        heads = getattr(shapes, size)
        if heads % tensor_parallel_size:
            raise ValueError(
                f"{name}: {size}={heads} cannot be split over {tensor_parallel_size} cards"
            )
    return shapes

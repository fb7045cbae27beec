# SPDX-License-Identifier: Apache-2.0
"""The GDN layer on a pre-Ampere box.

Upstream's layer with its parameters, loaders and projections, and our order of execution: the
projections and the gated norm stay in the compiled graph, the recurrent core between them is one
opaque operator, and on Volta under speculation the whole layer is (see `full_forward.py`).
"""

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from vllm.pre_ampere.gdn import full_forward
from vllm.pre_ampere.gdn.attention_backend import PreAmpereGDNAttentionBackend
from vllm.pre_ampere.gdn.chunk_rule import PreAmpereChunkGatedDeltaRule
from vllm.pre_ampere.gdn.core import GatedDeltaNetCore, GatedDeltaNetState
from vllm.pre_ampere.gdn.decode import resolve_gdn_kernels
from vllm.pre_ampere.gdn.weights import check_shapes_while_loading


class PreAmpereGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """Qwen3-Next's and Qwen3.5's GDN layer for Volta and Turing.

    The arguments are upstream's. `auto_sm70_qwen_gdn_full_forward` and
    `maybe_sm70_qwen_gdn_full_forward` say whether the eager wrapper would be armed without asking
    the device, and whether it is.
    """

    def __init__(
        self,
        config: object,
        vllm_config: VllmConfig,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        super().__init__(config, vllm_config, prefix, gqa_interleaved_layout, reduce_results)
        device = current_platform.worker_device()
        gate = full_forward.full_forward_gate(device, self.speculative_config is not None)
        self.auto_sm70_qwen_gdn_full_forward = gate.auto
        self.maybe_sm70_qwen_gdn_full_forward = gate.armed
        full_forward.write_rank_record(device, gate, vllm_config.parallel_config.rank)
        self.core = GatedDeltaNetCore(
            self,
            resolve_gdn_kernels(self, device),
            self.chunk_gated_delta_rule,
        )
        check_shapes_while_loading(self)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Upstream's metadata for this layer's steps."""
        return PreAmpereGDNAttentionBackend

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states: [num_tokens, hidden_size].

        Returns:
            [num_tokens, hidden_size].
        """
        if not self.maybe_sm70_qwen_gdn_full_forward:
            return self.forward_stages(hidden_states)
        output = torch.empty_like(hidden_states)
        torch.ops.vllm.qwen_gdn_full_forward(hidden_states, output, _encode_layer_name(self.prefix))
        return output

    def forward_stages(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Input projections, the recurrent core as one operator, gated norm and output projection."""
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        mixed_ba, _ = self.in_proj_ba(hidden_states)
        mixed_qkv, z, b, a = self._split_projections(mixed_qkvz, mixed_ba)
        # Zeros: rows after the actual tokens are padding and reach the norm.
        core_out = torch.zeros_like(z, memory_format=torch.contiguous_format)
        self._core_operator()(
            mixed_qkv,
            b.contiguous(),
            a.contiguous(),
            core_out,
            layer_name=_encode_layer_name(self.prefix),
        )
        return self._output_projection(core_out, z)

    def _split_projections(
        self, mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The projections in the core's order, from Qwen3-Next's interleaved or Qwen3.5's flat one.

        Returns:
            mixed_qkv [num_tokens, conv_dim], z [num_tokens, num_v_heads, head_v_dim],
            b and a [num_tokens, num_v_heads], all of this rank.
        """
        if self.gqa_interleaved_layout:
            query, key, value, z, b, a = self.fix_query_key_value_ordering(mixed_qkvz, mixed_ba)
            mixed_qkv = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
            return mixed_qkv, z, b, a
        value_size = self.value_dim // self.tp_size
        mixed_qkv, z = mixed_qkvz.split([mixed_qkvz.shape[-1] - value_size, value_size], dim=-1)
        b, a = self.split_ba(mixed_ba)
        return mixed_qkv, z.reshape(z.shape[0], -1, self.head_v_dim), b, a

    def _core_operator(self) -> torch._ops.OpOverloadPacket:
        if self.auto_sm70_qwen_gdn_full_forward:
            return torch.ops.vllm.qwen_gdn_attention_core_standard_spec
        return torch.ops.vllm.qwen_gdn_attention_core

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """What the core's operators call; the arguments are upstream's."""
        metadata_by_layer = get_forward_context().attn_metadata
        if not isinstance(metadata_by_layer, dict) or self.prefix not in metadata_by_layer:
            # A profiling run: launch the prefill kernels once, while memory is plentiful.
            if not current_platform.is_cpu():
                self._warmup_prefill_kernels(mixed_qkv, 0)
            return
        metadata = metadata_by_layer[self.prefix]
        assert isinstance(metadata, GDNAttentionMetadata)
        convolution, recurrent = self.kv_cache[0], self.kv_cache[1]
        if not is_conv_state_dim_first():
            convolution = convolution.transpose(-1, -2)
        state = GatedDeltaNetState(convolution, recurrent)
        self.core.forward(mixed_qkv, b, a, core_attn_out, state, metadata)


def qwen_gdn_attention_core_standard_spec(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """The core as a boundary of its own for speculative decoding under the compile-graph policy.

    The same arithmetic as upstream's `qwen_gdn_attention_core`; a name of its own, so that a graph
    or a profile shows which policy was active.
    """
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer._forward_core(mixed_qkv, b, a, core_attn_out)


def register() -> None:
    """Put our layer and operators in upstream's registries; a second call changes nothing."""
    if getattr(torch.ops.vllm, "qwen_gdn_full_forward", None) is not None:
        return
    full_forward.register()
    direct_register_custom_op(
        op_name="qwen_gdn_attention_core_standard_spec",
        op_func=qwen_gdn_attention_core_standard_spec,
        mutates_args=["core_attn_out"],
    )
    PluggableLayer.register_oot(PreAmpereGatedDeltaNetAttention, name="QwenGatedDeltaNetAttention")
    CustomOp.register_oot(PreAmpereChunkGatedDeltaRule, name="ChunkGatedDeltaRule")

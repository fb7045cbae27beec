# SPDX-License-Identifier: Apache-2.0
"""Upstream's prefill operator, `ChunkGatedDeltaRule`, with the kernel that fits the current card."""

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule
from vllm.platforms import current_platform

from vllm.pre_ampere.gdn import prefill

logger = init_logger("vllm.pre_ampere.gdn.chunk_rule")


class PreAmpereChunkGatedDeltaRule(ChunkGatedDeltaRule):
    """Upstream's prefill operator with the kernel that fits the current card."""

    def __init__(self) -> None:
        super().__init__()
        vllm_config = get_current_vllm_config()
        problem = prefill.prefill_problem(vllm_config)
        assert problem is not None, "a GDN layer in a model whose configuration names no GDN heads"
        selection = prefill._resolve_gdn_prefill_backend(
            problem,
            current_platform.worker_device(),
            prefill.requested_backend(vllm_config),
            current_platform.is_cpu(),
        )
        self.gdn_prefill_backend = selection.kernel.name
        self._kernel = selection.kernel.load()
        self._forward_method = self.forward_selected
        logger.info_once("GDN prefill kernel: %s", selection.kernel.name)

    def forward_selected(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        cu_seqlens: torch.Tensor,
        chunk_indices: torch.Tensor | None = None,
        chunk_offsets: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: torch.Tensor | None = None,
        aiter_prefill_metadata: object | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Upstream's signature: tensors carry a leading batch of 1, [1, num_tokens, heads, dim]."""
        out, final_state = self._kernel(
            q.squeeze(0),
            k.squeeze(0),
            v.squeeze(0),
            g.squeeze(0),
            beta.squeeze(0),
            initial_state,
            cu_seqlens,
            normalize_qk=use_qk_l2norm_in_kernel,
            chunk_indices=chunk_indices,
            chunk_offsets=chunk_offsets,
        )
        if core_attn_out is not None:
            core_attn_out.reshape(out.shape).copy_(out)
        return out.unsqueeze(0), final_state if output_final_state else None

# SPDX-License-Identifier: Apache-2.0
"""The recurrent core of a GDN layer: convolution and delta rule, over the state slots of a batch.

A step holds up to three kinds of requests, and each kind is one call here:

- `decode`: one token a request;
- `verify`: a token and its drafts a request, each draft's state in a slot of its own, so that the
  next step starts from the last accepted one;
- `prefill`: a stretch of a prompt a request, by chunks.

What runs is chosen once, when the layer is built (`GatedDeltaNetKernels`); the batch's layout is
upstream's `GDNAttentionMetadata` (vllm/v1/attention/backends/gdn_attn.py, 0.32.0).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


@dataclass(frozen=True)
class GatedDeltaNetKernels:
    """The operations of the core, each with the signature of its reference.

    The references are in `vllm.pre_ampere.kernels.host`, under the same names. One routine decodes
    and verifies, so that a token comes out the same with speculation and without.
    """

    causal_conv1d_prefill: Callable[..., torch.Tensor]
    causal_conv1d_update: Callable[..., torch.Tensor]
    packed_delta_rule_update: Callable[..., torch.Tensor]
    post_convolution: Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class GatedDeltaNetState:
    """One layer's views of the cache.

    Attributes:
        convolution: [num_slots, conv_dim, state_length].
        recurrent: [num_slots, num_v_heads, head_v_dim, head_k_dim].
    """

    convolution: torch.Tensor
    recurrent: torch.Tensor


class GatedDeltaNetCore:
    """Runs one layer's core over a batch.

    Args:
        layer: upstream's layer; its weights and head counts are read, nothing of it is called.
        kernels: what runs each operation.
        chunk_gated_delta_rule: the prefill operator, upstream's interface.
    """

    def __init__(
        self,
        layer: Any,
        kernels: GatedDeltaNetKernels,
        chunk_gated_delta_rule: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._layer = layer
        self._kernels = kernels
        self._chunk_gated_delta_rule = chunk_gated_delta_rule

    def forward(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        state: GatedDeltaNetState,
        metadata: GDNAttentionMetadata,
    ) -> None:
        """Compute the core for every token of the step.

        Args:
            mixed_qkv: [num_tokens, conv_dim], the projections of q, k and v side by side; may hold
                padding after `metadata.num_actual_tokens`.
            b, a: [num_tokens, num_v_heads], before sigmoid and softplus.
            out: [num_tokens, num_v_heads, head_v_dim], written for the actual tokens.
            state: updated in place.
            metadata: what the tokens are.
        """
        num_tokens = metadata.num_actual_tokens
        mixed_qkv, b, a = mixed_qkv[:num_tokens], b[:num_tokens], a[:num_tokens]
        out = out[:num_tokens]
        if metadata.spec_sequence_masks is None:
            if metadata.num_prefills > 0:
                self.prefill(mixed_qkv, b, a, out, state, metadata)
            elif metadata.num_decodes > 0:
                self.decode(mixed_qkv, b, a, out, state, metadata)
            return
        if metadata.num_prefills == 0:
            self.verify(mixed_qkv, b, a, out, state, metadata)
            return
        for part, tokens in (
            (self.verify, metadata.spec_token_indx),
            (self.prefill, metadata.non_spec_token_indx),
        ):
            assert tokens is not None
            part_out = torch.empty_like(out[: tokens.numel()])
            part(
                mixed_qkv.index_select(0, tokens),
                b.index_select(0, tokens),
                a.index_select(0, tokens),
                part_out,
                state,
                metadata,
            )
            out.index_copy_(0, tokens, part_out)

    def decode(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        state: GatedDeltaNetState,
        metadata: GDNAttentionMetadata,
    ) -> None:
        """One token for each request; row i belongs to slot i."""
        assert metadata.non_spec_state_indices_tensor is not None
        slots = metadata.non_spec_state_indices_tensor[: mixed_qkv.shape[0]]
        mixed_qkv = self._kernels.causal_conv1d_update(
            mixed_qkv, *self._convolution(), state.convolution, slots
        )
        self._recurrent_update(mixed_qkv, b, a, out, state, slots, None, None)

    def verify(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        state: GatedDeltaNetState,
        metadata: GDNAttentionMetadata,
    ) -> None:
        """A token and its drafts for each request, by one routine with the gating inside.

        The convolution keeps one sliding window a request, in the first of its slots. The delta
        rule starts from the slot of the last accepted token and writes one slot a token.
        """
        slots = metadata.spec_state_indices_tensor
        query_start_loc = metadata.spec_query_start_loc
        accepted = metadata.num_accepted_tokens
        assert slots is not None
        assert query_start_loc is not None
        assert accepted is not None
        count = metadata.num_spec_decodes
        slots, query_start_loc, accepted = (
            slots[:count],
            query_start_loc[: count + 1],
            accepted[:count],
        )
        mixed_qkv = self._kernels.causal_conv1d_update(
            mixed_qkv,
            *self._convolution(),
            state.convolution,
            slots[:, 0],
            query_start_loc,
            accepted,
            slots.shape[1],
        )
        self._recurrent_update(mixed_qkv, b, a, out, state, slots, query_start_loc, accepted)

    def prefill(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        state: GatedDeltaNetState,
        metadata: GDNAttentionMetadata,
    ) -> None:
        """A stretch of a prompt for each request, after any single-token requests of the batch.

        One convolution serves both; the delta rule takes the single tokens by the recurrent
        routine and the rest by chunks.
        """
        layer = self._layer
        mixed_qkv = self._kernels.causal_conv1d_prefill(
            mixed_qkv,
            *self._convolution(),
            state.convolution,
            metadata.non_spec_query_start_loc,
            metadata.non_spec_state_indices_tensor,
            metadata.has_initial_state,
            metadata,
        )
        decodes, decode_tokens = metadata.num_decodes, metadata.num_decode_tokens
        if decodes > 0:
            assert metadata.non_spec_state_indices_tensor is not None
            self._recurrent_update(
                mixed_qkv[:decode_tokens],
                b[:decode_tokens],
                a[:decode_tokens],
                out[:decode_tokens],
                state,
                metadata.non_spec_state_indices_tensor[:decodes],
                None,
                None,
            )
        q, k, v, g, beta = self._kernels.post_convolution(
            mixed_qkv[decode_tokens:],
            a[decode_tokens:],
            b[decode_tokens:],
            layer.A_log,
            layer.dt_bias,
            layer.num_k_heads // layer.tp_size,
            layer.head_k_dim,
            layer.head_v_dim,
        )
        slots = metadata.prefill_state_indices
        has_initial_state = metadata.prefill_has_initial_state
        assert slots is not None
        assert has_initial_state is not None
        initial_state = state.recurrent[slots]
        initial_state[~has_initial_state] = 0
        core_out, final_state = self._chunk_gated_delta_rule(
            q=q.unsqueeze(0),
            k=k.unsqueeze(0),
            v=v.unsqueeze(0),
            g=g.unsqueeze(0),
            beta=beta.unsqueeze(0),
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=metadata.prefill_query_start_loc,
            chunk_indices=metadata.chunk_indices,
            chunk_offsets=metadata.chunk_offsets,
            use_qk_l2norm_in_kernel=False,
        )
        state.recurrent[slots] = final_state.to(state.recurrent.dtype)
        out[decode_tokens:].copy_(core_out.squeeze(0))

    def _recurrent_update(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        state: GatedDeltaNetState,
        slots: torch.Tensor,
        query_start_loc: torch.Tensor | None,
        num_accepted_tokens: torch.Tensor | None,
    ) -> None:
        layer = self._layer
        self._kernels.packed_delta_rule_update(
            mixed_qkv,
            a,
            b,
            layer.A_log,
            layer.dt_bias,
            state.recurrent,
            slots,
            query_start_loc,
            num_accepted_tokens,
            out,
        )

    def _convolution(self) -> tuple[torch.Tensor, torch.Tensor | None, str]:
        """Weight [conv_dim, width], bias and activation, as the convolution routines take them."""
        convolution = self._layer.conv1d
        weight = convolution.weight
        return weight.view(weight.size(0), weight.size(2)), convolution.bias, self._layer.activation

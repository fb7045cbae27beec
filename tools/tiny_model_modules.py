# SPDX-License-Identifier: Apache-2.0
"""The tiny test model's configuration and its multi-token prediction (MTP) layer for training.

The model itself is transformers' `Qwen3_5ForCausalLM`. transformers has no MTP layer, so
`MultiTokenPredictor` builds one from transformers' own decoder layer, under the tensor names
that vLLM 0.32's `qwen3_5_mtp.py` reads after the prefix `mtp.`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

DRAFT_STEPS = 3


def tiny_config(vocab_size: int, end_of_turn: int, end_of_text: int) -> Qwen3_5TextConfig:
    """Qwen3.5's text configuration at a size of 3 million parameters.

    The GDN heads keep the real K = V = 128 and every head count splits evenly over two ranks.
    The three-part rotary positions of released checkpoints are left out: for text they are one
    position three times, and upstream's CPU drafter corrupts memory with them. Keys that only
    vLLM reads (`mtp_num_hidden_layers`, `mamba_ssm_dtype`, ...) are as in released checkpoints.
    """
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        full_attention_interval=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000.0,
            # As released checkpoints have it; for text the three positions are one.
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
        },
        tie_word_embeddings=True,
        attn_output_gate=True,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        eos_token_id=[end_of_turn, end_of_text],
    )


def initialise_decay(model: Qwen3_5ForCausalLM, generator: torch.Generator) -> None:
    """Spread the GDN heads' memory over short and long spans.

    transformers leaves `dt_bias` at one, with which every head forgets within a token or two.
    As in Mamba 2 (Dao and Gu, 2024), softplus(dt_bias) starts log-uniform in [0.001, 0.1].
    """
    for layer in model.model.layers:
        if layer.block_type != "linear_attention":
            continue
        bias = layer.linear_attn.dt_bias
        low, high = torch.tensor([0.001, 0.1]).log()
        step = (low + (high - low) * torch.rand(bias.shape, generator=generator)).exp()
        with torch.no_grad():
            bias.copy_(step + torch.log(-torch.expm1(-step)))


@dataclass
class DraftKeyValues:
    """Keys and values of every draft step so far, in the form of a transformers cache."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one step's tensors [batch, heads, length, dim]; return all steps' in a row."""
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def draft_mask(length: int, step: int, device: torch.device) -> torch.Tensor:
    """What row p of draft step `step` may attend to: bool [1, 1, length, (step + 1) * length].

    Row p of step j is the j-th draft after position p - j. A server has by then the step-0 keys
    up to position p - j, and one key of each later step i at position p - j + i.
    """
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    blocks = [column <= row - step]
    blocks += [column == row - (step - earlier) for earlier in range(1, step + 1)]
    return torch.cat(blocks, dim=1)[None, None]


class MultiTokenPredictor(nn.Module):
    """One MTP layer, unrolled over the draft steps as vLLM's proposer runs it."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=epsilon)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=epsilon)
        self.fc = nn.Linear(2 * width, width, bias=False)
        full_attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full_attention)])
        self.norm = Qwen3_5RMSNorm(width, eps=epsilon)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(
        self,
        hidden: torch.Tensor,
        next_embedding: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        steps: int = DRAFT_STEPS,
    ) -> list[torch.Tensor]:
        """Hidden states of each draft step; row p of any step predicts token p + 2.

        `hidden` [batch, length, width] is the model's output after its final norm at positions
        p, `next_embedding` the embedding of tokens p + 1. Step j + 1 reads step j's normed
        output of the position before, so its rows below j + 1 have no meaning.
        """
        length = hidden.shape[1]
        key_values = DraftKeyValues()
        outputs: list[torch.Tensor] = []
        for step in range(steps):
            joined = torch.cat(
                [self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)],
                dim=-1,
            )
            output = self.layers[0](
                self.fc(joined),
                position_embeddings=position_embeddings,
                # Without a mask, transformers takes the faster causal attention.
                attention_mask=draft_mask(length, step, hidden.device) if step else None,
                past_key_values=key_values,
            )
            outputs.append(self.norm(output))
            hidden = nn.functional.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
        return outputs


class TinyModel(nn.Module):
    """The main model and its MTP layer, sharing the embedding and the output head."""

    def __init__(self, config: Qwen3_5TextConfig, seed: int) -> None:
        super().__init__()
        self.main = Qwen3_5ForCausalLM(config)
        self.mtp = MultiTokenPredictor(self.main.config)
        initialise_decay(self.main, torch.Generator().manual_seed(seed))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [batch, length, vocab] of the model, and [batch, length - 1, vocab] of each draft
        step, where row p of the model is for token p + 1 and of a step for token p + 2.
        """
        hidden = self.main.model(input_ids=tokens, use_cache=False).last_hidden_state
        length = tokens.shape[1] - 1
        # transformers before 5.19 takes text, height and width positions; here they are the same.
        positions = torch.arange(length, device=tokens.device).expand(3, 1, -1)
        drafts = self.mtp(
            hidden[:, :length],
            self.main.model.embed_tokens(tokens[:, 1:]),
            self.main.model.rotary_emb(hidden, positions),
        )
        return self.main.lm_head(hidden), [self.main.lm_head(draft) for draft in drafts]

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """All tensors under their checkpoint names in bfloat16; the tied output head is left out."""
        tensors = {
            name: tensor
            for name, tensor in self.main.state_dict().items()
            if name != "lm_head.weight"
        }
        tensors |= {f"mtp.{name}": tensor for name, tensor in self.mtp.state_dict().items()}
        return {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in tensors.items()
        }

# SPDX-License-Identifier: Apache-2.0
"""Launches that prepare and close a step (vLLM 0.32, model runner V2)."""

import torch
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.mamba_utils import batch_memcpy

from vllm.pre_ampere.preflight.launches.launch import (
    PROMPT_TOKENS,
    REQUESTS,
    SPECULATIVE_TOKENS,
    Launch,
)
from vllm.pre_ampere.preflight.model import ModelShapes

_MAX_TOKENS = 4096
_STEP = SPECULATIVE_TOKENS + 1


def _int(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def _rows() -> torch.Tensor:
    return torch.arange(REQUESTS, dtype=torch.int32)


def _prefill_inputs(shapes: ModelShapes) -> None:
    input_batch.prepare_prefill_inputs(
        _int(PROMPT_TOKENS),
        _int(1, REQUESTS),
        _rows(),
        _int(REQUESTS + 1),
        _int(REQUESTS, _MAX_TOKENS),
        _int(REQUESTS),
        _int(REQUESTS),
    )


def _positions(shapes: ModelShapes) -> None:
    input_batch.prepare_pos_seq_lens(
        _rows(),
        _int(REQUESTS + 1),
        _int(REQUESTS),
        torch.zeros(PROMPT_TOKENS, dtype=torch.int64),
        _int(REQUESTS),
    )


def _draft_inputs(shapes: ModelShapes) -> None:
    tokens = REQUESTS * _STEP
    cu_num_logits = torch.arange(0, tokens + 1, _STEP, dtype=torch.int32)
    input_batch.expand_idx_mapping(_rows(), tokens, cu_num_logits, _STEP)
    input_batch.combine_sampled_and_draft_tokens(
        _int(tokens),
        _rows(),
        torch.zeros(REQUESTS, 1, dtype=torch.int64),
        _int(REQUESTS + 1),
        _int(REQUESTS),
        _int(REQUESTS),
        torch.zeros(REQUESTS, SPECULATIVE_TOKENS, dtype=torch.int64),
        cu_num_logits,
        tokens,
    )


def _update(shapes: ModelShapes) -> None:
    sampled, rejected = input_batch.get_num_sampled_and_rejected(
        _int(REQUESTS), _int(REQUESTS), _int(REQUESTS + 1), _rows(), _int(REQUESTS)
    )
    input_batch.post_update(
        _rows(),
        _int(REQUESTS),
        torch.zeros(REQUESTS, 1, dtype=torch.int64),
        None,
        torch.zeros(REQUESTS, _STEP, dtype=torch.int64),
        sampled,
        rejected,
        _int(REQUESTS + 1),
        _int(REQUESTS, _MAX_TOKENS),
        _int(REQUESTS),
    )


def _state_copy(shapes: ModelShapes) -> None:
    """Copies of GDN states for the prefix cache."""
    pointers = torch.zeros(REQUESTS, dtype=torch.uint64)
    batch_memcpy(pointers, pointers, _int(REQUESTS))


LAUNCHES: dict[str, Launch] = {
    "step, prefill inputs": _prefill_inputs,
    "step, positions": _positions,
    "step, draft inputs": _draft_inputs,
    "step, update": _update,
    "step, state copies": _state_copy,
}

# SPDX-License-Identifier: Apache-2.0
"""Launches of upstream's sampler and of the verification of drafts (vLLM 0.32, model runner V2)."""

import torch
from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import gather_draft_sampled
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from vllm.pre_ampere.preflight.launches.launch import REQUESTS, SPECULATIVE_TOKENS, Launch
from vllm.pre_ampere.preflight.model import ModelShapes

_STEP = SPECULATIVE_TOKENS + 1


def _logits(shapes: ModelShapes, tokens: int) -> torch.Tensor:
    return torch.empty(tokens, shapes.vocab_size, dtype=torch.float32)


def _rows() -> torch.Tensor:
    return torch.arange(REQUESTS, dtype=torch.int32)


class _OnCard(torch.Tensor):
    """A tensor that says it is on the card: this launcher chooses its tiles by that."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The card's."""
        return torch.device("cuda", 0)


def _temperature(shapes: ModelShapes) -> None:
    apply_temperature(_logits(shapes, REQUESTS), _rows(), torch.ones(REQUESTS))


def _min_p(shapes: ModelShapes) -> None:
    apply_min_p(_logits(shapes, REQUESTS), _rows(), torch.ones(REQUESTS))


def _top_k_top_p(shapes: ModelShapes) -> None:
    k = torch.full((REQUESTS,), 20, dtype=torch.int32)
    logits = _logits(shapes, REQUESTS).as_subclass(_OnCard)
    apply_top_k_top_p_triton(logits, k, torch.ones(REQUESTS))


def _sample(shapes: ModelShapes) -> None:
    gumbel_sample(
        _logits(shapes, REQUESTS),
        _rows(),
        torch.ones(REQUESTS),
        torch.zeros(REQUESTS, dtype=torch.int64),
        torch.zeros(REQUESTS, dtype=torch.int64),
        apply_temperature=False,
        is_drafting=False,
    )


def _log_probabilities(shapes: ModelShapes) -> None:
    compute_token_logprobs(_logits(shapes, REQUESTS), torch.zeros(REQUESTS, 6, dtype=torch.int64))


def _verify(shapes: ModelShapes) -> None:
    tokens = REQUESTS * _STEP
    expanded = _rows().repeat_interleave(_STEP)
    position = torch.arange(_STEP, dtype=torch.int32).repeat(REQUESTS)
    drafts, positions = gather_draft_sampled(
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
        torch.arange(tokens),
        expanded,
        position,
        torch.zeros(REQUESTS, dtype=torch.int32),
    )
    rejection_sample(
        _logits(shapes, tokens),
        None,
        drafts,
        torch.arange(0, tokens + 1, _STEP, dtype=torch.int32),
        positions,
        _rows(),
        expanded,
        position,
        torch.ones(REQUESTS),
        torch.zeros(REQUESTS, dtype=torch.int64),
        SPECULATIVE_TOKENS,
    )


LAUNCHES: dict[str, Launch] = {
    "sampling, temperature": _temperature,
    "sampling, min-p": _min_p,
    "sampling, top-k and top-p": _top_k_top_p,
    "sampling, draw": _sample,
    "sampling, log probabilities": _log_probabilities,
    "sampling, verify drafts": _verify,
}

# SPDX-License-Identifier: Apache-2.0
"""What the tiny test model's training log reports: held-out losses and draft acceptance."""

from __future__ import annotations

import math

import torch
from tiny_model_data import Stream
from tiny_model_modules import DRAFT_STEPS, TinyModel
from torch import nn

EVALUATION_LENGTH = 512
PROMPT_LENGTH = 32
GENERATED_LENGTH = 96


def draft_agreement(
    logits: torch.Tensor, drafts: list[torch.Tensor], first: int = 0
) -> list[torch.Tensor]:
    """Whether each draft step's argmax is the model's own: bool [batch, length - 1] a step.

    Row p of every step is compared with the model's row p + 1; rows before `first` + step have
    no such draft and are left out.
    """
    choice = logits[:, 1:].argmax(-1)
    return [(draft.argmax(-1) == choice)[:, first + step :] for step, draft in enumerate(drafts)]


@torch.no_grad()
def held_out_losses(model: TinyModel, tokens: torch.Tensor) -> dict[str, object]:
    """Mean next-token loss (nats) and each draft step's agreement with the model's argmax."""
    logits, drafts = model(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return {
        "loss": round(loss.item(), 4),
        "perplexity": round(math.exp(loss.item()), 2),
        "tokens": tokens.numel(),
        "draft_agreement": [
            round(step.float().mean().item(), 4) for step in draft_agreement(logits, drafts)
        ],
    }


@torch.no_grad()
def greedy_acceptance(model: TinyModel, prompts: torch.Tensor) -> dict[str, object]:
    """Replay greedy speculative decoding with three drafts and report tokens per step.

    The model writes `GENERATED_LENGTH` tokens, past any end of turn, after `prompts`
    [rows, length]. A draft is accepted exactly while it repeats the model's own greedy text, so
    one unrolled pass over that text holds every draft that a server would have accepted.
    """
    written, following, cache = prompts, prompts, None
    for _ in range(GENERATED_LENGTH):
        output = model.main(
            input_ids=following, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        following = output.logits.argmax(-1)
        written = torch.cat([written, following], dim=1)
    _, drafts = model(written)
    # The model chose token p + 2 itself in every row that counts, so the text is the reference.
    hits = torch.stack([draft[:, :-1].argmax(-1) == written[:, 2:] for draft in drafts]).cpu()
    steps = generated = 0
    accepted = [0] * DRAFT_STEPS
    for row in range(written.shape[0]):
        position = prompts.shape[1] - 1
        while position + DRAFT_STEPS < hits.shape[2]:
            length = 0
            while length < DRAFT_STEPS and hits[length, row, position + length]:
                accepted[length] += 1
                length += 1
            steps += 1
            generated += length + 1
            position += length + 1
    return {
        "drafts_a_step": DRAFT_STEPS,
        "tokens_a_step": round(generated / steps, 3),
        "acceptance_by_draft": [round(count / steps, 4) for count in accepted],
        "steps": steps,
    }


@torch.no_grad()
def largest_activation(model: TinyModel, tokens: torch.Tensor) -> float:
    """The largest magnitude that any module puts out, which fp16 has to hold (65504)."""
    largest = torch.zeros((), device=tokens.device)

    def look(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, torch.Tensor):
            largest = torch.maximum(largest, output.abs().max())

    handles = [module.register_forward_hook(look) for module in model.modules()]
    model(tokens)
    for handle in handles:
        handle.remove()
    return largest.item()


def evaluate(
    model: TinyModel, text: Stream, chat: Stream, rows: int, device: torch.device
) -> dict[str, object]:
    """All held-out figures, of the plain text and of the chat samples."""
    model.eval()
    report: dict[str, object] = {}
    for name, source in (("text", text), ("chat", chat)):
        generator = torch.Generator().manual_seed(0)
        length = min(EVALUATION_LENGTH, source.tokens.shape[0])
        tokens = source.crops(rows, length, generator, at_starts=name == "chat").to(device)
        report[name] = held_out_losses(model, tokens) | {
            "greedy": greedy_acceptance(model, tokens[:, :PROMPT_LENGTH]),
            "largest_activation": round(largest_activation(model, tokens[:4]), 2),
        }
    return report

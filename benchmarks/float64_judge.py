# SPDX-License-Identifier: Apache-2.0
"""Tell a rounding tie from a fault: the logits of two tokens in float64, by transformers.

Two greedy runs of one model may part where two candidates are so close that the order of a sum
decides. Whether they are is computed here by another implementation in another precision (the delta
rule of transformers computes in float32): their gap against the error that a run's own chances have
there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Divergence:
    """The first place where an answer leaves the one it is compared with.

    Attributes:
        prompt_tokens: length of the prompt.
        position: index of the generated token.
        tokens: of the run that is compared with, and of the other.
        float64_gap: between the two tokens' logits.
    """

    prompt_tokens: int
    position: int
    tokens: tuple[int, int]
    float64_gap: float


@dataclass(frozen=True)
class Verdict:
    """What `judge` found.

    Attributes:
        error: the largest distance of a chance's logarithm in the run from float64's.
        divergences: one for each answer that differs.
    """

    error: float
    divergences: tuple[Divergence, ...]

    @property
    def only_ties(self) -> bool:
        """Whether every gap is one that two logits with that error cannot tell."""
        return all(divergence.float64_gap <= 2 * self.error for divergence in self.divergences)


class Judge:
    """transformers' model in float64; `judge` compares runs of the same prompts."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def _logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocabulary]: those from which each of the tokens was chosen."""
        key = (*prompt, *tokens)
        if key not in self._known:
            ids = torch.tensor([key[:-1]])
            self._known[key] = self._model(ids, logits_to_keep=len(tokens)).logits[0]
        return self._known[key]

    def judge(
        self,
        prompts: Sequence[Sequence[int]],
        base: Sequence[dict[str, Any]],
        other: Sequence[dict[str, Any]],
    ) -> Verdict:
        """Compare two runs.

        Args:
            prompts: token ids.
            base: for each of them "tokens" and "logprobs", the logarithms of their chances.
            other: for each "tokens".
        """
        error = 0.0
        divergences = []
        for prompt, ours, theirs in zip(prompts, base, other, strict=True):
            exact = self._logits(prompt, ours["tokens"])
            chances = exact.log_softmax(-1)[range(len(exact)), ours["tokens"]]
            error = max(error, float((chances - torch.tensor(ours["logprobs"])).abs().max()))
            pairs = list(zip(ours["tokens"], theirs["tokens"], strict=True))
            place = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
            if place is not None:
                gap = float(abs(exact[place][pairs[place][0]] - exact[place][pairs[place][1]]))
                divergences.append(Divergence(len(prompt), place, pairs[place], gap))
        return Verdict(error, tuple(divergences))

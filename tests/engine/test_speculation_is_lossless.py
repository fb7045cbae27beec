# SPDX-License-Identifier: Apache-2.0
"""Served answers with speculation are the answers without it, token for token.

One real `vllm serve` for each k, as an emulated Turing box, without compilation (compiled serving is
test_compiled_serving.py's). The answers are kept, so that a server is started once.
"""

import json
from dataclasses import dataclass

import pytest
from engine_process import Answer, serve
from prompts import LENGTHS, prompts

MAX_TOKENS = 24
TOP_LOGITS = 5
BATCH_LENGTHS = (257, 19, 1543, 64, 511, 130)
SAMPLED = (1, 4)


@dataclass(frozen=True)
class Transcript:
    """What one server answered.

    Attributes:
        alone: to each length, asked one after the other.
        together: to `BATCH_LENGTHS`, arriving while earlier ones are being answered.
        beside_sampled: the same, with those of `SAMPLED` answered at temperature 1.
        tokens_a_step: mean acceptance length; 1 without speculation.
    """

    alone: list[Answer]
    together: list[Answer]
    beside_sampled: list[Answer]
    tokens_a_step: float


@pytest.fixture(scope="module")
def transcripts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Transcript]:
    return {k: transcript(k, tmp_path_factory) for k in (0, 1, 3, 4)}


def transcript(k: int, tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    arguments = ["--enforce-eager", "--max-model-len", "16384", "--max-num-seqs", "4"]
    arguments += ["--logprobs-mode", "raw_logits", "--no-enable-prefix-caching"]
    if k:
        speculative = {"method": "mtp", "num_speculative_tokens": k}
        arguments += ["--speculative-config", json.dumps(speculative)]
    with serve(tmp_path_factory.mktemp(f"k{k}"), arguments) as server:
        alone = server.complete(prompts(), MAX_TOKENS, logits=TOP_LOGITS)
        together = server.complete(prompts(BATCH_LENGTHS), MAX_TOKENS, seconds_apart=0.2)
        beside = server.complete(
            prompts(BATCH_LENGTHS), MAX_TOKENS, seconds_apart=0.2, sampled=SAMPLED
        )
        drafts = server.metric("vllm:spec_decode_num_drafts_total")
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    return Transcript(alone, together, beside, 1 + accepted / drafts if drafts else 1.0)


pytestmark = pytest.mark.engine


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("place", range(len(LENGTHS)), ids=[f"{n}-tokens" for n in LENGTHS])
def test_each_length_alone(transcripts: dict[int, Transcript], place: int, k: int) -> None:
    assert transcripts[k].alone[place].tokens == transcripts[0].alone[place].tokens


@pytest.mark.parametrize("k", [1, 3, 4])
def test_a_batch_of_mixed_lengths_arriving_at_different_times(
    transcripts: dict[int, Transcript], k: int
) -> None:
    batch = [answer.tokens for answer in transcripts[k].together]
    assert batch == [answer.tokens for answer in transcripts[0].together]


@pytest.mark.parametrize("k", [0, 1, 3, 4])
def test_sampled_requests_leave_greedy_ones_in_their_batch_alone(
    transcripts: dict[int, Transcript], k: int
) -> None:
    greedy = [index for index in range(len(BATCH_LENGTHS)) if index not in SAMPLED]
    beside, together = transcripts[k].beside_sampled, transcripts[0].together
    assert [beside[i].tokens for i in greedy] == [together[i].tokens for i in greedy]
    assert any(beside[i].tokens != together[i].tokens for i in SAMPLED), "nothing was sampled"


def test_the_prompts_are_answered_differently(transcripts: dict[int, Transcript]) -> None:
    """Equality of answers would say little if every answer were the same."""
    assert len({answer.tokens for answer in transcripts[0].alone}) > len(LENGTHS) // 2


@pytest.mark.parametrize("k", [1, 3, 4])
def test_drafts_are_accepted(transcripts: dict[int, Transcript], k: int) -> None:
    """A speculation that accepts nothing would pass every test above."""
    assert transcripts[k].tokens_a_step > 1.3


@pytest.mark.parametrize("k", [0, 3])
def test_logits_are_within_a_stated_bound_of_transformers(
    transcripts: dict[int, Transcript], k: int
) -> None:
    """float16 weights, activations and cache against transformers in float32 on the same tokens.

    The bound is on the largest difference of a logit; the logits span about 30.
    """
    import torch
    from engine_process import TINY_MODEL
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    largest = 0.0
    for prompt, answer in zip(prompts()[:6], transcripts[k].alone, strict=False):
        tokens = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            expected = model(tokens).logits[0, len(prompt) - 1 : -1]
        for position, top in enumerate(answer.logits):
            for token, logit in top.items():
                largest = max(largest, abs(expected[position, token].item() - logit))
    assert 0 < largest < 0.1

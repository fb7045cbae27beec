# SPDX-License-Identifier: Apache-2.0
"""Scenarios that have broken speculation on GDN models, played on one engine in its own process.

    python conversations.py SCENARIO BLOCK_SIZE SETTINGS RESULT

BLOCK_SIZE is that of the engine which caches prefixes, in tokens; the engine that it is compared with
plays around the same boundaries, whatever its own. SETTINGS is a JSON object of arguments for
`vllm.LLM`; RESULT is the file to write. Answers of two engines to the same scenario are compared by
`differences`.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm.pre_ampere.cli.prompts import draw_prompts

Ask = Callable[[Sequence[list[int]], int], list[list[int]]]


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        prompt: its digest.
        length: of the prompt, in tokens.
        cached: how many of them came from the prefix cache.
        tokens: the generated ids.
        logits: for each, of the two most likely tokens.
    """

    prompt: str
    length: int
    cached: int
    tokens: list[int]
    logits: list[list[float]]


def mixed_batches(prompts: list[list[int]], block_size: int, ask: Ask) -> None:
    """One request alone, two together, and eight that join and leave at different steps."""
    for count in (1, 2, 8):
        ask([prompt[: 150 + 97 * index] for index, prompt in enumerate(prompts[:count])], 48)


def shared_prefixes(prompts: list[list[int]], block_size: int, ask: Ask) -> None:
    """Conversations whose turns share prefixes that end at, before and after block boundaries."""
    for index, offset in enumerate((-2, -1, 0, 1, 3)):
        start = prompts[index][: 3 * block_size + offset]
        (answer,) = ask([start], 24)
        ask([start], 24)
        second = start + answer + prompts[5][:17]
        (reply,) = ask([second], 24)
        ask([second + reply + prompts[6][:7], start + prompts[7][:20], start + answer], 24)
    shared = prompts[5][: 3 * block_size - 20]
    for _ in range(2):
        # The answers pass a block boundary.
        ask([shared + prompts[6][i * 50 : i * 50 + 5 + i] for i in range(4)], 48)
    long = [prompts[i][: 2 * block_size + 200 * i] for i in range(4)]
    for _ in range(2):
        # With few blocks these do not fit together, so requests are preempted and resumed.
        ask(long, 64)


SCENARIOS = {"mixed_batches": mixed_batches, "shared_prefixes": shared_prefixes}


def main(scenario: str, block_size_text: str, settings: str, result: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(disable_log_stats=False, logprobs_mode="raw_logits", **json.loads(settings))
    block_size = int(block_size_text)
    cache = llm.llm_engine.vllm_config.cache_config
    if cache.enable_prefix_caching and cache.block_size != block_size:
        raise ValueError(f"the engine has blocks of {cache.block_size} tokens, not {block_size}")
    answers: list[Answer] = []

    def ask(prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        # Each leaves at another step.
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=tokens + 3 * i,
                ignore_eos=True,
                detokenize=False,
                logprobs=2,
            )
            for i in range(len(prompts))
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            completion = output.outputs[0]
            top = [
                sorted((x.logprob for x in at.values()), reverse=True)[:2]
                for at in completion.logprobs
            ]
            digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
            tokens_cached, ids = output.num_cached_tokens, list(completion.token_ids)
            answers.append(Answer(digest, len(prompt), tokens_cached, ids, top))
        return [answer.tokens for answer in answers[-len(prompts) :]]

    longest = 3 * block_size + 200
    prompts = draw_prompts(llm.get_tokenizer(), 0, [longest + index for index in range(8)])
    SCENARIOS[scenario](prompts, block_size, ask)
    preempted = sum(
        getattr(m, "value", 0) for m in llm.get_metrics() if m.name == "vllm:num_preemptions"
    )
    data = {"answers": [asdict(answer) for answer in answers], "preempted": preempted}
    Path(result).write_text(json.dumps(data))


@dataclass(frozen=True)
class Played:
    """What one engine answered.

    Attributes:
        answers: in the order of the scenario.
        preempted: how often a request was.
    """

    answers: tuple[Answer, ...]
    preempted: int


def start(
    scenario: str,
    block_size: int,
    settings: Mapping[str, Any],
    result: Path,
    environment: Mapping[str, str],
) -> "subprocess.Popen[bytes]":
    """Start an engine on a scenario; its log stands beside the result."""
    with result.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [
                sys.executable,
                __file__,
                scenario,
                str(block_size),
                json.dumps(settings),
                str(result),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def read(result: Path) -> Played:
    """What an engine that has ended wrote.

    Raises:
        RuntimeError: it wrote nothing; the message is the end of its log.
    """
    if not result.exists():
        raise RuntimeError(result.with_suffix(".log").read_text()[-6000:])
    data = json.loads(result.read_text())
    return Played(tuple(Answer(**answer) for answer in data["answers"]), data["preempted"])


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the reference's.

    Attributes:
        answer: its index in the scenario.
        length: of the prompt.
        cached: tokens of it from the prefix cache.
        position: of the first differing token.
        gap: between the reference's two most likely tokens there, in float16 steps.
    """

    answer: int
    length: int
    cached: int
    position: int
    gap: float


def differences(reference: Played, other: Played) -> Iterator[Difference]:
    """Compare token for token.

    A scenario's later prompts hold its earlier answers, so an answer to another prompt is passed
    over, but only after an answer that differed.

    Raises:
        ValueError: the engines were asked different things from the start.
    """
    pairs = zip(reference.answers, other.answers, strict=True)
    differed = False
    for index, (expected, answer) in enumerate(pairs):
        if expected.prompt != answer.prompt:
            if not differed:
                raise ValueError(f"prompt {index} is not the same for both engines")
            continue
        if expected.tokens == answer.tokens:
            continue
        differed = True
        position = next(
            p for p, (a, b) in enumerate(zip(expected.tokens, answer.tokens, strict=True)) if a != b
        )
        first, second = expected.logits[position]
        step = (
            float(torch.finfo(torch.float16).eps) * 2.0 ** torch.tensor(abs(first)).log2().floor()
        )
        yield Difference(
            index, answer.length, answer.cached, position, float((first - second) / step)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

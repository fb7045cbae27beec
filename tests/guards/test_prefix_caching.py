# SPDX-License-Identifier: Apache-2.0
"""Guard 1: prefix caching with MTP changes no answer of a GDN model."""

import os
from pathlib import Path
from typing import Any

import pytest
from conversations import Answer, Played, differences, read, start
from engine_process import START_SECONDS, TINY_MODEL, clean_environment

MODEL: dict[str, Any] = {
    "model": str(TINY_MODEL),
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "seed": 0,
}
# Tokens of an attention block of this model on a CPU, at every k; the engines check it.
BLOCK_SIZE = 640


def play(directory: Path, name: str, **settings: Any) -> Played:
    result = directory / f"{name}.json"
    environment = clean_environment(
        "7.5", PYTHONPATH=os.pathsep.join(map(str, [Path(__file__).parent]))
    )
    process = start("shared_prefixes", BLOCK_SIZE, MODEL | settings, result, environment)
    process.wait(2 * START_SECONDS)
    return read(result)


def drafting(k: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": k}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("reference"), "reference", enable_prefix_caching=False)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "blocks"),
    [
        pytest.param(1, None, id="k1"),
        pytest.param(3, None, id="k3"),
        pytest.param(3, 24, id="k3-preempted"),
    ],
)
def test_cached_prefixes_change_no_answer(
    reference: Played, tmp_path: Path, k: int, blocks: int | None
) -> None:
    played = play(
        tmp_path,
        "cached",
        enable_prefix_caching=True,
        num_gpu_blocks_override=blocks,
        **drafting(k),
    )
    assert list(differences(reference, played)) == []
    hits = [answer.cached for answer in played.answers]
    assert sum(hit > 0 for hit in hits) >= 10, "the cache was not used"
    assert (played.preempted > 0) is (blocks is not None)


def answer(prompt: str, *tokens: int) -> Answer:
    return Answer(prompt, 3, 0, list(tokens), [[2.0, 1.0]] * len(tokens))


def test_answers_to_different_prompts_are_no_comparison() -> None:
    ours = Played((answer("a", 1, 2), answer("b", 1)), 0)
    with pytest.raises(ValueError, match="prompt 1 is not the same"):
        list(differences(ours, Played((answer("a", 1, 2), answer("c", 1)), 0)))


def test_after_an_answer_that_differed_other_prompts_are_passed_over() -> None:
    ours = Played((answer("a", 1, 2), answer("b", 1)), 0)
    (found,) = differences(ours, Played((answer("a", 1, 3), answer("c", 4)), 0))
    assert (found.answer, found.position, found.gap) == (0, 1, 512.0)

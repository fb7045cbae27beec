# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two emulated cards: each decides by its own, and both compute one answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_process import Answer, serve
from prompts import prompts

pytestmark = pytest.mark.engine

ARGUMENTS = ("--tensor-parallel-size", "2", "--max-model-len", "1024", "--max-num-seqs", "2")
SPECULATIVE = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3}))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[Answer]]:
    directory = tmp_path_factory.mktemp("ranks")
    records = directory / "records"
    settings = {
        "VLLM_PRE_AMPERE_RANK_RECORD_DIR": str(records),
        # Upstream binds each rank to cores of its own, which two cores do not have for two ranks.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with serve(directory, [*ARGUMENTS, *SPECULATIVE], emulate="7.5,7.0", **settings) as server:
        answers = server.complete(prompts((64, 130)), 16)
    return [json.loads(path.read_text()) for path in sorted(Path(records).iterdir())], answers


def test_the_records_differ_as_the_cards_do(
    mixed: tuple[list[dict[str, Any]], list[Answer]],
) -> None:
    records, _ = mixed
    assert records == [
        {
            "rank": 0,
            "device": 0,
            "name": "Tesla T4",
            "capability": [7, 5],
            "volta": False,
            "auto": True,
            "maybe": False,
        },
        {
            "rank": 1,
            "device": 1,
            "name": "Tesla V100-SXM2-32GB",
            "capability": [7, 0],
            "volta": True,
            "auto": True,
            "maybe": True,
        },
    ]


def test_a_mixed_pair_answers(mixed: tuple[list[dict[str, Any]], list[Answer]]) -> None:
    """The wrapper on one rank and the compiled layer on the other still meet in each all-reduce."""
    _, answers = mixed
    assert [len(answer.tokens) for answer in answers] == [16, 16]
    assert len({answer.tokens for answer in answers}) == 2

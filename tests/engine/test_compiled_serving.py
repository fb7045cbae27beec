# SPDX-License-Identifier: Apache-2.0
"""Serving as a user gets it: compiled, the baseline set and logged, speculation lossless."""

import json
from dataclasses import dataclass

import pytest
from engine_process import Answer, serve
from prompts import prompts

from vllm.pre_ampere import environment

pytestmark = pytest.mark.engine

LENGTHS = (19, 130, 511)


@dataclass(frozen=True)
class Served:
    log: str
    answers: list[Answer]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Served]:
    result = {}
    for k in (0, 3):
        arguments = ["--max-model-len", "2048", "--max-num-seqs", "4"]
        if k:
            speculative = {"method": "mtp", "num_speculative_tokens": k}
            arguments += ["--speculative-config", json.dumps(speculative)]
        with serve(tmp_path_factory.mktemp(f"compiled{k}"), arguments) as server:
            answers = server.complete(prompts(LENGTHS), 32)
            result[k] = Served(server.log, answers)
    return result


@pytest.mark.parametrize("k", [0, 3])
def test_an_emulated_turing_box_logs_exactly_nine_defaults(
    served: dict[int, Served], k: int
) -> None:
    banners = [line for line in served[k].log.splitlines() if "EMULATION, NOT A GPU" in line]
    assert len(banners) == 1
    assert "as Tesla T4 would" in banners[0]
    lines = [line for line in served[k].log.splitlines() if "Auto-setting" in line]
    assert len(lines) == 9
    for variable in environment.BASELINE:
        assert sum(f"Auto-setting {variable.name}=1" in line for line in lines) == 1


def test_the_passed_over_prefill_kernel_is_named_once(served: dict[int, Served]) -> None:
    lines = [line for line in served[0].log.splitlines() if "flashqla_sm70" in line]
    assert len(lines) == 1
    assert "86016 B" in lines[0]
    assert "65536 B" in lines[0]


def test_compiled_answers_with_speculation_are_those_without(served: dict[int, Served]) -> None:
    with_drafts, without = served[3].answers, served[0].answers
    assert [answer.tokens for answer in with_drafts] == [answer.tokens for answer in without]


def test_an_unemulated_box_sets_no_default(tmp_path_factory: pytest.TempPathFactory) -> None:
    arguments = ["--max-model-len", "256", "--max-num-seqs", "1", "--enforce-eager"]
    with serve(tmp_path_factory.mktemp("upstream"), arguments, emulate=None) as server:
        assert "Auto-setting" not in server.log
        assert "pre_ampere" not in server.log.replace("pre_ampere -> vllm.pre_ampere", "")

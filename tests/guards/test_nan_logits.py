# SPDX-License-Identifier: Apache-2.0
"""Guard 5: a request with NaN logits fails, and no other request does."""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_process import TINY_MODEL
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_model_runner import count_nans_per_row, nans_to_dict

from vllm import SamplingParams
from vllm.pre_ampere import environment
from vllm.pre_ampere.guards import configuration, nan_logits
from vllm.pre_ampere.guards.nan_logits import NanCheckingScheduler, requests_with_nan

BLOCK_SIZE = 16


@given(st.data())
def test_a_count_is_credited_to_the_request_that_its_row_belongs_to(data: st.DataObject) -> None:
    """Against upstream's own counting of rows, whatever is verified."""
    drafts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    ids = [f"request {index}" for index in range(len(drafts))]
    corrupted = {name for name in ids if data.draw(st.booleans())}
    owners = [name for name, count in zip(ids, drafts, strict=True) for _ in range(count + 1)]
    logits = torch.zeros(len(owners), 8)
    for row, owner in enumerate(owners):
        if owner in corrupted:
            logits[row, row % 8] = torch.nan
    index = {name: place for place, name in enumerate(ids)}
    counts = nans_to_dict(count_nans_per_row(logits).tolist(), index)
    scheduled = {name: [7] * count for name, count in zip(ids, drafts, strict=True) if count}

    found = requests_with_nan(ids, counts, scheduled)
    # Upstream reports as many rows as there are requests; those owners can be told.
    visible = set(owners[: len(ids)])
    assert set(found) == corrupted & visible
    if corrupted and ids[0] in corrupted:
        assert ids[0] in found, "the first request is always seen, so all are in the end"


def test_counts_by_request_are_taken_as_they_are() -> None:
    counts = {"a": 0, "b": 5}
    drafts = {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert requests_with_nan(["a", "b"], counts, drafts, counted_by_request=True) == ["b"]
    assert requests_with_nan(["a", "b"], counts, drafts) == ["a"], "b's count is a's second row"


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return EngineArgs(
        model=str(TINY_MODEL), skip_tokenizer_init=True, max_model_len=512, max_num_seqs=4
    ).create_engine_config()


@pytest.fixture
def scheduler(config: VllmConfig) -> NanCheckingScheduler:
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16
    )
    cache = KVCacheConfig(
        num_blocks=256,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    config.cache_config.num_gpu_blocks = 256
    return NanCheckingScheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def add_requests(scheduler: NanCheckingScheduler, ids: Sequence[str]) -> None:
    init_none_hash(hash)
    for name in ids:
        request = Request(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(max_tokens=8, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, hash),
        )
        scheduler.add_request(request)


def step(scheduler: NanCheckingScheduler, nan_counts: dict[str, int]) -> list[EngineCoreOutput]:
    """One engine step in which the model answers token 0 to every request."""
    scheduled = scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    answer = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: index for index, name in enumerate(ids)},
        sampled_token_ids=[[0] for _ in ids],
        num_nans_in_logits={name: nan_counts.get(name, 0) for name in ids},
        pooler_output=[],
    )
    outputs = scheduler.update_from_output(scheduled, answer)
    return [output for of_client in outputs.values() for output in of_client.outputs]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.ERROR, logger=nan_logits.logger.name):
        yield caplog


def test_the_corrupted_request_fails_and_the_others_go_on(
    scheduler: NanCheckingScheduler, log: pytest.LogCaptureFixture
) -> None:
    add_requests(scheduler, ["good", "bad", "other"])
    first = step(scheduler, {})
    assert [(o.request_id, o.new_token_ids) for o in first] == [
        ("good", [0]),
        ("bad", [0]),
        ("other", [0]),
    ]
    by_id = {output.request_id: output for output in step(scheduler, {"bad": 2048})}
    assert by_id["bad"].finish_reason == FinishReason.ERROR
    assert by_id["bad"].new_token_ids == []
    assert "--probe" in str(by_id["bad"].stop_reason)
    assert by_id["good"].finish_reason is None
    assert by_id["good"].new_token_ids == [0]
    assert [record.getMessage() for record in log.records if "bad" in record.getMessage()] == [
        f"Request bad failed: {nan_logits.REASON}."
    ]
    assert {output.request_id for output in step(scheduler, {})} == {"good", "other"}


def test_a_failed_request_gives_its_memory_back(scheduler: NanCheckingScheduler) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    add_requests(scheduler, ["bad"])
    step(scheduler, {})
    assert pool.get_num_free_blocks() < free
    step(scheduler, {"bad": 1})
    assert pool.get_num_free_blocks() == free
    assert not scheduler.has_unfinished_requests()


def float16_config(**scheduler: Any) -> VllmConfig:
    result = VllmConfig(scheduler_config=SchedulerConfig.default_factory(**scheduler))
    result.model_config = EngineArgs(
        model=str(TINY_MODEL), skip_tokenizer_init=True, dtype="float16"
    ).create_model_config()
    return result


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> str:
    name = environment.COMPUTE_NANS_IN_LOGITS.name
    monkeypatch.setenv(name, "0")
    monkeypatch.delenv(name)
    return name


@pytest.mark.parametrize(
    ("asynchronous", "name"),
    [(False, "NanCheckingScheduler"), (True, "NanCheckingAsyncScheduler")],
)
def test_float16_models_get_it_with_the_scheduler_that_upstream_would_take(
    variable: str, asynchronous: bool, name: str
) -> None:
    box = float16_config()
    box.scheduler_config.async_scheduling = asynchronous
    for _ in range(2):
        action = configuration.fail_requests_with_nan_logits(box)
        assert action is not None
        assert action.did == "Requests with NaN logits fail"
        assert os.environ[variable] == "1"
        chosen = box.scheduler_config.get_scheduler_cls()
        assert chosen is getattr(nan_logits, name)
    box.scheduler_config.scheduler_cls = None
    assert issubclass(chosen, box.scheduler_config.get_scheduler_cls())


def test_the_users_scheduler_and_variable_stay(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = float16_config(scheduler_cls="a.Scheduler")
    action = configuration.fail_requests_with_nan_logits(box)
    assert box.scheduler_config.scheduler_cls == "a.Scheduler"
    assert action is not None
    assert "--scheduler-cls a.Scheduler was asked for" in str(action)
    assert variable not in os.environ

    monkeypatch.setenv(variable, "0")
    box = float16_config()
    action = configuration.fail_requests_with_nan_logits(box)
    assert box.scheduler_config.scheduler_cls is None
    assert action is not None
    assert f"{variable}=0 was asked for" in str(action)


def test_float32_needs_none_of_it(variable: str) -> None:
    box = float16_config()
    box.model_config.dtype = torch.float32
    assert configuration.fail_requests_with_nan_logits(box) is None
    assert variable not in os.environ
    assert box.scheduler_config.scheduler_cls is None

# SPDX-License-Identifier: Apache-2.0
"""Guard 2: CUDA graphs of whole verification steps are kept off GDN models, unless asked for."""

import pytest
from engine_process import TINY_MODEL
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm.pre_ampere.baseline import BaselineRecord, Decision, Entry
from vllm.pre_ampere.guards import configuration


@pytest.fixture(scope="module")
def speculative() -> VllmConfig:
    return EngineArgs(
        model=str(TINY_MODEL),
        skip_tokenizer_init=True,
        max_model_len=512,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    ).create_engine_config()


def record(decision: Decision) -> BaselineRecord:
    """What the baseline says it did about the mode."""
    entry = Entry("cudagraph_mode", "FULL_AND_PIECEWISE", decision, "")
    return BaselineRecord(True, "", policy=(entry,))


def with_mode(config: VllmConfig, mode: CUDAGraphMode) -> VllmConfig:
    config.compilation_config = CompilationConfig(cudagraph_mode=mode)
    return config


def test_a_mode_that_the_baseline_set_becomes_piecewise(speculative: VllmConfig) -> None:
    box = with_mode(speculative, CUDAGraphMode.FULL_AND_PIECEWISE)
    action = configuration.keep_verification_out_of_full_graphs(box, record(Decision.SET))
    assert box.compilation_config.cudagraph_mode is CUDAGraphMode.PIECEWISE
    assert action is not None
    assert "PIECEWISE instead of FULL_AND_PIECEWISE" in str(action)
    assert "lossless" in action.remedy
    again = configuration.keep_verification_out_of_full_graphs(box, record(Decision.SET))
    assert again is None
    assert box.compilation_config.cudagraph_mode is CUDAGraphMode.PIECEWISE


def test_the_users_mode_stays(speculative: VllmConfig) -> None:
    box = with_mode(speculative, CUDAGraphMode.FULL)
    assert configuration.keep_verification_out_of_full_graphs(box, record(Decision.KEPT)) is None
    assert box.compilation_config.cudagraph_mode is CUDAGraphMode.FULL


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE])
def test_other_modes_are_left_alone(speculative: VllmConfig, mode: CUDAGraphMode) -> None:
    box = with_mode(speculative, mode)
    assert configuration.keep_verification_out_of_full_graphs(box, record(Decision.SET)) is None
    assert box.compilation_config.cudagraph_mode is mode


def test_decoding_without_speculation_keeps_full_graphs(
    speculative: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = with_mode(speculative, CUDAGraphMode.FULL_AND_PIECEWISE)
    monkeypatch.setattr(box, "speculative_config", None)
    assert configuration.keep_verification_out_of_full_graphs(box, record(Decision.SET)) is None
    assert box.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE

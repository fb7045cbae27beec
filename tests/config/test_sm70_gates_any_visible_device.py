# SPDX-License-Identifier: Apache-2.0
"""Fix 2: any participating pre-Ampere card brings the baseline, in every topology."""

import logging
import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import AttentionConfig, CompilationConfig, CompilationMode, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm.pre_ampere import baseline, environment
from vllm.pre_ampere.baseline import BaselineRecord, Decision
from vllm.pre_ampere.devices import Capability, Device

VOLTA, XAVIER, TURING, AMPERE, HOPPER = (7, 0), (7, 2), (7, 5), (8, 0), (9, 0)
NAMES = tuple(variable.name for variable in environment.BASELINE)


def box(capabilities: Sequence[Capability]) -> list[Device]:
    return [Device(index, f"card {index}", c) for index, c in enumerate(capabilities)]


class Lines:
    """The messages that the baseline logged so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self) -> list[str]:
        name = baseline.logger.name
        return [r.getMessage() for r in self._caplog.records if r.name == name]


@pytest.fixture
def log(clean_environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    with caplog.at_level(logging.INFO, logger=baseline.logger.name):
        yield Lines(caplog)


def apply(capabilities: Sequence[Capability], config: VllmConfig | None = None) -> BaselineRecord:
    return baseline.apply(config or VllmConfig(), box(capabilities), ("TRITON_ATTN",))


TOPOLOGIES = [
    pytest.param([TURING], True, id="homogeneous-sm75-is-pre-ampere"),
    pytest.param([TURING, TURING], True, id="two-turing"),
    pytest.param([VOLTA], True, id="homogeneous-sm70"),
    pytest.param([VOLTA, VOLTA, VOLTA, VOLTA], True, id="four-volta"),
    pytest.param([XAVIER], True, id="xavier"),
    pytest.param([TURING, VOLTA], True, id="turing-then-volta"),
    pytest.param([VOLTA, TURING], True, id="volta-then-turing"),
    pytest.param([TURING, TURING, VOLTA, VOLTA], True, id="two-turing-two-volta"),
    pytest.param([AMPERE, TURING], True, id="ampere-then-turing"),
    pytest.param([TURING, AMPERE], True, id="turing-then-ampere"),
    pytest.param([HOPPER, VOLTA], True, id="hopper-then-volta"),
    pytest.param([AMPERE], False, id="ampere-only"),
    pytest.param([AMPERE, HOPPER], False, id="ampere-and-hopper"),
    pytest.param([(6, 1)], False, id="pascal-only"),
    pytest.param([], False, id="no-card"),
]


@pytest.mark.parametrize(("capabilities", "active"), TOPOLOGIES)
def test_sm70_baseline_defaults_follow_any_visible_device(
    log: Lines, capabilities: list[Capability], active: bool
) -> None:
    record = apply(capabilities)
    assert record.active is active
    expected = [f"Auto-setting {name}=1 for a pre-Ampere device." for name in NAMES]
    assert log() == (expected if active else [])
    assert all((os.environ.get(name) == "1") is active for name in NAMES)
    assert [entry.decision for entry in record.variables] == [Decision.SET] * (9 * active)


def test_the_nine_variables_are_the_specified_ones() -> None:
    assert set(NAMES) == {
        "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE",
        "VLLM_SM70_GDN_KKT_SCHEDULE",
        "VLLM_SM70_GDN_DELTA_H_SCHEDULE",
        "VLLM_SM70_GDN_CHUNK_O_SCHEDULE",
        "VLLM_SM70_FLA_RECURRENT_SCHEDULE",
        "VLLM_SM70_FUSED_SIGMOID_GATING_SCHED",
        "VLLM_SM70_GEMMA_RMS_NORM_COMPILE_NATIVE",
        "VLLM_SM70_GDN_DECODE_FLASHQLA",
        "VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH",
    }


def test_what_the_user_set_stays_and_the_record_says_so(
    log: Lines, clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.setenv("VLLM_SM70_GDN_KKT_SCHEDULE", "0")
    record = apply([VOLTA])
    kept = [entry for entry in record.variables if entry.decision is Decision.KEPT]
    assert [(entry.name, entry.value) for entry in kept] == [("VLLM_SM70_GDN_KKT_SCHEDULE", "0")]
    assert os.environ["VLLM_SM70_GDN_KKT_SCHEDULE"] == "0"
    kept_lines = [line for line in log() if "Auto-setting" not in line]
    assert len(log()) - len(kept_lines) == 8
    assert len(kept_lines) == 1
    assert "Keeping VLLM_SM70_GDN_KKT_SCHEDULE=0, set by the user." in kept_lines[0]


def test_a_second_run_of_the_hook_changes_and_logs_nothing(log: Lines) -> None:
    first = apply([VOLTA])
    lines, values = log(), {name: os.environ[name] for name in NAMES}
    second = apply([VOLTA])
    assert log() == lines
    assert {name: os.environ[name] for name in NAMES} == values
    assert second.variables == first.variables


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_neither_0_nor_1_is_an_error_that_names_the_setting(
    clean_environment: pytest.MonkeyPatch, name: str
) -> None:
    clean_environment.setenv(name, "yes")
    with pytest.raises(environment.EnvironmentVariableError, match=f"{name}='yes': use 0 or 1"):
        apply([VOLTA])


def disabled_by_mode() -> VllmConfig:
    return VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        pytest.param("TORCH_COMPILE_DISABLE", "1", id="torch-compile-disabled"),
        pytest.param("VLLM_USE_BREAKABLE_CUDAGRAPH", "1", id="breakable-cuda-graph"),
        pytest.param(None, None, id="mode-none"),
    ],
)
def test_the_policy_is_left_where_the_user_disabled_compilation(
    log: Lines,
    clean_environment: pytest.MonkeyPatch,
    variable: str | None,
    value: str | None,
) -> None:
    if variable is not None and value is not None:
        clean_environment.setenv(variable, value)
    config = disabled_by_mode() if variable is None else VllmConfig()
    record = apply([VOLTA], config)
    assert record.variables[-1].name == "VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH"
    assert record.variables[-1].decision is Decision.LEFT
    assert "compilation is disabled by" in record.variables[-1].reason
    assert len(log()) == 8
    assert record.policy == ()


@pytest.mark.parametrize(
    ("backend", "active"),
    [
        pytest.param(AttentionBackendEnum.TRITON_ATTN, True, id="our-own-choice-by-name"),
        pytest.param(AttentionBackendEnum.FLEX_ATTENTION, False, id="another-by-name"),
    ],
)
def test_a_foreign_attention_backend_turns_the_baseline_off(
    log: Lines, backend: AttentionBackendEnum, active: bool
) -> None:
    record = apply([VOLTA], VllmConfig(attention_config=AttentionConfig(backend=backend)))
    assert record.active is active
    assert bool(log()) is active
    if not active:
        assert "FLEX_ATTENTION" in record.reason


@given(st.lists(st.sampled_from([VOLTA, XAVIER, TURING, AMPERE, HOPPER, (6, 1)]), max_size=8))
def test_one_old_card_anywhere_is_enough(capabilities: list[Capability]) -> None:
    expected = any(capability in (VOLTA, XAVIER, TURING) for capability in capabilities)
    assert baseline._any_participating_device_is_pre_ampere(box(capabilities)) is expected

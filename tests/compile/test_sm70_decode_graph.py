# SPDX-License-Identifier: Apache-2.0
"""The compile-graph policy: what it fills in, what it leaves, and the boundaries of the graph."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from vllm.pre_ampere import baseline
from vllm.pre_ampere.baseline import BaselineRecord, Decision
from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.platform import hooks

VOLTA = [Device(0, "Tesla V100-SXM2-32GB", (7, 0))]


@pytest.fixture
def gpu(clean_environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The policy as on a box with a GPU: upstream's CPU platform has no graphs to configure."""
    clean_environment.setattr(type(current_platform), "is_cpu", lambda self: False)
    return clean_environment


def open_config(**settings: object) -> VllmConfig:
    """A configuration as it stands when the defaults hook runs: what nobody set is None."""
    config = VllmConfig()
    config.compilation_config = CompilationConfig(**settings)
    config.kernel_config.ir_op_priority.rms_norm = []
    config.kernel_config.ir_op_priority.fused_add_rms_norm = []
    return config


def apply(config: VllmConfig) -> BaselineRecord:
    return baseline.apply(config, VOLTA, ())


def decisions(record: BaselineRecord) -> dict[str, Decision]:
    return {entry.name: entry.decision for entry in record.policy}


def test_what_the_user_left_open_is_filled_in(gpu: pytest.MonkeyPatch) -> None:
    config = open_config()
    config.scheduler_config.max_num_seqs = 8
    record = apply(config)
    compilation = config.compilation_config
    assert compilation.mode == CompilationMode.VLLM_COMPILE
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    assert compilation.cudagraph_capture_sizes == [1, 2, 4, 8]
    assert compilation.inductor_compile_config["combo_kernels"] is True
    assert compilation.pass_config.eliminate_noops is True
    assert config.kernel_config.ir_op_priority.rms_norm[0] == "vllm_c"
    assert config.kernel_config.ir_op_priority.fused_add_rms_norm[0] == "vllm_c"
    assert compilation.custom_ops == ["-gemma_rms_norm"]
    assert set(decisions(record).values()) == {Decision.SET}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cudagraph_mode", CUDAGraphMode.PIECEWISE),
        # What the policy would choose, too: the user's all the same.
        ("cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE),
        ("cudagraph_capture_sizes", [3, 5]),
        ("mode", CompilationMode.DYNAMO_TRACE_ONCE),
    ],
)
def test_what_the_user_gave_stays(gpu: pytest.MonkeyPatch, name: str, value: object) -> None:
    config = open_config(**{name: value})
    for _ in range(2):
        record = apply(config)
        assert getattr(config.compilation_config, name) == value
        assert decisions(record)[name] is Decision.KEPT


def test_a_norm_that_the_user_asked_for_stays(gpu: pytest.MonkeyPatch) -> None:
    config = open_config(custom_ops=["+gemma_rms_norm"])
    config.kernel_config.ir_op_priority.rms_norm = ["native"]
    apply(config)
    assert config.compilation_config.custom_ops == ["+gemma_rms_norm"]
    assert config.kernel_config.ir_op_priority.rms_norm == ["native"]


def test_the_policy_is_off_where_its_variable_is_0(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH", "0")
    config = open_config()
    record = apply(config)
    assert record.policy == ()
    assert config.compilation_config.mode is None
    assert config.compilation_config.cudagraph_capture_sizes is None


def test_running_the_hook_twice_changes_nothing(gpu: pytest.MonkeyPatch) -> None:
    config = open_config()
    first = apply(config)
    before = repr(config.compilation_config)
    # As upstream completes the list before the hook runs again.
    config.kernel_config.ir_op_priority.rms_norm.append("native")
    assert decisions(apply(config)) == decisions(first)
    assert repr(config.compilation_config) == before


@pytest.mark.parametrize(
    ("max_num_seqs", "drafts", "tensor_parallel_size", "sizes"),
    [
        (16, 0, 1, [1, 2, 4, 8, 16]),
        (64, 0, 8, [1, 2, 4, 8, 16]),
        (5, 0, 1, [1, 2, 4]),
        (1, 0, 1, [1]),
        (8, 3, 1, [1, 2, 4, 8, 9]),
        (8, 4, 2, [1, 2, 4, 5, 8, 9]),
        (8, 1, 4, [1, 2, 4, 6, 8, 9, 18]),
        (8, 4, 4, [1, 2, 4, 5, 8, 9, 10, 15, 18, 20]),
        (2, 4, 4, [1, 2, 4, 5, 8, 9, 10, 18]),
        (8, 15, 1, [1, 2, 4, 8, 9, 16]),
    ],
)
def test_capture_sizes(
    max_num_seqs: int, drafts: int, tensor_parallel_size: int, sizes: list[int]
) -> None:
    assert baseline.capture_sizes(max_num_seqs, drafts, tensor_parallel_size, 8192) == sizes


@given(
    max_num_seqs=st.integers(1, 64),
    drafts=st.integers(0, 15),
    tensor_parallel_size=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 8192),
)
def test_capture_sizes_are_never_empty_and_never_too_large(
    max_num_seqs: int, drafts: int, tensor_parallel_size: int, max_num_batched_tokens: int
) -> None:
    sizes = baseline.capture_sizes(
        max_num_seqs, drafts, tensor_parallel_size, max_num_batched_tokens
    )
    assert sizes
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1
    assert sizes[-1] <= max_num_batched_tokens
    if drafts and drafts + 1 <= max_num_batched_tokens:
        assert drafts + 1 in sizes


def test_our_operators_are_boundaries_beside_all_of_upstreams() -> None:
    config = open_config(mode=CompilationMode.VLLM_COMPILE)
    hooks._split_at_our_operators(config)
    upstream = open_config(mode=CompilationMode.VLLM_COMPILE).compilation_config
    upstream.set_splitting_ops_for_v1(all2all_backend="naive")
    ours = config.compilation_config.splitting_ops
    assert ours == [
        *(upstream.splitting_ops or []),
        "vllm::qwen_gdn_full_forward",
        "vllm::qwen_gdn_attention_core_standard_spec",
    ]
    hooks._split_at_our_operators(config)
    assert config.compilation_config.splitting_ops == ours


def test_an_explicit_unsplit_graph_stays_unsplit() -> None:
    config = open_config(mode=CompilationMode.VLLM_COMPILE, splitting_ops=[])
    hooks._split_at_our_operators(config)
    assert config.compilation_config.splitting_ops == []

# SPDX-License-Identifier: Apache-2.0
"""Guard 9: the baseline's capture sizes pass every check that upstream makes of them."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from engine_process import TINY_MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm.pre_ampere import baseline

Box = dict[str, int]
MakeConfig = Callable[[Box], VllmConfig]


@pytest.fixture(scope="module")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeConfig]:
    """Makes a GPU box's configuration after the baseline and upstream's completion of its sizes.

    The process is in a process group of one meanwhile, as upstream's graph manager asks.
    """
    template = EngineArgs(
        model=str(TINY_MODEL),
        skip_tokenizer_init=True,
        max_model_len=1024,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()
    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    # The manager keeps the memory pool of the graphs, which a CPU has none of, for the capture.
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(template):
        patch.setattr(type(current_platform), "_global_graph_pool", object())
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend="gloo")
        initialize_model_parallel()
        # A function, for hypothesis prints what a test is given, and cannot print a configuration.
        yield lambda box: with_baseline_sizes(template, box)
    cleanup_dist_env_and_memory()


def with_baseline_sizes(template: VllmConfig, box: Box) -> VllmConfig:
    max_num_seqs, k = box["max_num_seqs"], box["k"]
    # Upstream itself refuses fewer tokens than these.
    max_num_batched_tokens = max(max_num_seqs, k + 1) + box["spare_tokens"]
    config = copy.copy(template)
    config.scheduler_config = copy.copy(template.scheduler_config)
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.speculative_config = copy.copy(template.speculative_config) if k else None
    if config.speculative_config is not None:
        config.speculative_config.num_speculative_tokens = k

    compilation = config.compilation_config = copy.deepcopy(template.compilation_config)
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.compile_sizes = None
    compilation.max_cudagraph_capture_size = None
    compilation.cudagraph_capture_sizes = baseline.capture_sizes(
        max_num_seqs, k, box["tensor_parallel_size"], max_num_batched_tokens
    )
    config._set_cudagraph_sizes()
    return config


boxes = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 64),
        "k": st.integers(0, 15),
        "tensor_parallel_size": st.integers(1, 8),
        "spare_tokens": st.sampled_from((0, 1, 7, 64, 2048)),
    }
)


def captured_requests(box: Box) -> range:
    """How many requests a decode step may hold and still be replayed from a FULL graph."""
    if box["k"] == 0:
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= box["max_num_seqs"]]
        return range(1, sizes[-1] + 1)
    return range(1, min(box["max_num_seqs"], 4 if box["tensor_parallel_size"] >= 4 else 1) + 1)


@settings(max_examples=250, deadline=None)
@given(box=boxes)
def test_the_first_model_runner_takes_the_sizes(make_config: MakeConfig, box: Box) -> None:
    config = make_config(box)
    step = box["k"] + 1
    config.compilation_config.adjust_cudagraph_sizes_for_spec_decode(step)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, step)
    batched_tokens = config.scheduler_config.max_num_batched_tokens
    for requests in captured_requests(box):
        if requests * step > batched_tokens:
            break
        mode, batch = dispatcher.dispatch(requests * step, uniform_decode=True)
        assert mode is CUDAGraphMode.FULL
        assert batch.num_tokens % step == 0
        assert batch.num_reqs is not None
        assert requests <= batch.num_reqs <= box["max_num_seqs"]


@settings(max_examples=250, deadline=None)
@given(box=boxes)
def test_the_second_model_runner_takes_the_sizes(make_config: MakeConfig, box: Box) -> None:
    config = make_config(box)
    step = box["k"] + 1
    manager = CudaGraphManager(
        config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, decode_query_len=step
    )
    assert manager.needs_capture()
    # Dispatch as after the capture, which alone needs a GPU.
    manager._graphs_captured = True
    batched_tokens = config.scheduler_config.max_num_batched_tokens
    for requests in captured_requests(box):
        if requests * step > batched_tokens:
            break
        graph = manager.dispatch(requests, requests * step, step, 0)
        assert graph.cg_mode is CUDAGraphMode.FULL
        assert graph.num_reqs is not None
        assert requests <= graph.num_reqs <= box["max_num_seqs"]


def test_upstream_still_rejects_sizes_that_hold_no_step() -> None:
    """What the property above guards against is a real error."""
    from vllm.config import CompilationConfig

    compilation = CompilationConfig(cudagraph_capture_sizes=[1, 2])
    compilation.max_cudagraph_capture_size = 2
    with pytest.raises(ValueError, match="No valid cudagraph sizes"):
        compilation.adjust_cudagraph_sizes_for_spec_decode(4)

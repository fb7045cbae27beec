# SPDX-License-Identifier: Apache-2.0
"""What the tensor-core lowering changes in Inductor: its cache keys and where it compiles."""

import subprocess
import sys

import torch
import torch.compiler.config as compiler_config
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
from torch._inductor.codecache import compiled_fx_graph_hash

from vllm.pre_ampere.kernels.triton import turing_mma


def _key_of_a_graph() -> str:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    key, _ = compiled_fx_graph_hash(graph, [torch.zeros(2)], {}, [])
    return key


def test_the_key_of_a_compiled_graph_changes_and_comes_back() -> None:
    before = _key_of_a_graph()
    turing_mma.enable()
    try:
        during = _key_of_a_graph()
        assert compiler_config.cache_key_tag == turing_mma.cache_factor()
    finally:
        turing_mma.disable()
    assert during != before
    assert _key_of_a_graph() == before


@config.patch(compile_threads=4, autotune_in_subproc=True)
def test_kernels_are_compiled_in_this_process() -> None:
    turing_mma.enable()
    try:
        assert config.compile_threads == 1
        assert not AsyncCompile.use_process_pool()
        assert not config.autotune_in_subproc
    finally:
        turing_mma.disable()
    assert (config.compile_threads, config.autotune_in_subproc) == (4, True)


@compiler_config.patch(cache_key_tag="mine")
def test_a_user_tag_is_kept() -> None:
    turing_mma.enable()
    try:
        assert compiler_config.cache_key_tag == "mine" + turing_mma.cache_factor()
    finally:
        turing_mma.disable()
    assert compiler_config.cache_key_tag == "mine"


def test_kernels_that_this_process_compiled_before_are_forgotten() -> None:
    CompiledTritonKernels._cache["kernel"] = object()  # type: ignore[assignment]
    turing_mma.enable()
    try:
        assert not CompiledTritonKernels._cache
    finally:
        turing_mma.disable()


def test_a_plain_triton_program_needs_no_vllm_engine() -> None:
    """The part is usable apart: of vLLM it imports the package alone, and none of its engine."""
    program = (
        "import sys, triton\n"
        "import vllm.pre_ampere.kernels.triton.turing_mma as turing_mma\n"
        "assert turing_mma.enable() and turing_mma.is_enabled()\n"
        "engine = [n for n in sys.modules if n.startswith(('vllm.config', 'vllm.platforms.',"
        " 'vllm.model_executor', 'vllm.v1'))]\n"
        "print(engine)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"

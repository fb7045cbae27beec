# SPDX-License-Identifier: Apache-2.0
"""Inductor's part in the tensor-core lowering: its caches and its processes.

Inductor keeps compiled graphs, tuned configurations and loaded kernels, each under keys that do not
ask Triton's stage hook; PyTorch's own tag for all of them (`torch.compiler.config.cache_key_tag`)
tells the lowerings apart. Its pool of worker processes (and the process that times templates) are
fresh interpreters without the hook, whose results this process would use as they come back; so
kernels are compiled here, as vLLM has it anyway.
"""

import sys
from typing import Any

_before: dict[str, Any] = {}


def enter(factor: str) -> None:
    """Set Inductor up for the lowering that `factor` stands for; nothing without PyTorch."""
    try:
        import torch._inductor.config as inductor
        import torch.compiler.config as compiler
    except ModuleNotFoundError:
        return
    _before.update(
        cache_key_tag=compiler.cache_key_tag,
        compile_threads=inductor.compile_threads,
        autotune_in_subproc=inductor.autotune_in_subproc,
    )
    compiler.cache_key_tag = _before["cache_key_tag"] + factor
    inductor.compile_threads = 1
    inductor.autotune_in_subproc = False
    _forget_compiled_kernels()


def leave() -> None:
    """Give Inductor back the settings that `enter` found."""
    if not _before:
        return
    import torch._inductor.config as inductor
    import torch.compiler.config as compiler

    compiler.cache_key_tag = _before["cache_key_tag"]
    inductor.compile_threads = _before["compile_threads"]
    inductor.autotune_in_subproc = _before["autotune_in_subproc"]
    _before.clear()
    _forget_compiled_kernels()


def _forget_compiled_kernels() -> None:
    """Inductor finds a kernel that this process compiled by its source alone."""
    async_compile = sys.modules.get("torch._inductor.async_compile")
    if async_compile is not None:
        async_compile.CompiledTritonKernels.cache_clear()

# SPDX-License-Identifier: Apache-2.0
"""One of upstream's Triton kernels on a box without Triton: sampling parameters for each draft token.

Verification gives every token of a request that request's temperature, top-k and top-p. Upstream's
replacement for CPUs (vLLM 0.32.0, utils/cpu_triton_utils.py) writes into a copy of the result, so that
the caller reads unset memory, and as integers: as soon as one request of a batch is sampled, the
greedy ones beside it are, too. `register_triton_kernel_overrides` is the hook; this goes when upstream's
keeps the result and its dtype.
"""

import torch
from torch import Tensor


def expand_kernel(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """output = each request's value, once for each of its tokens.

    Args:
        output: [num_tokens], of the values' dtype, written.
        input_val: [num_requests].
        cu_num_tokens: [num_requests], integers: tokens up to and with each request.
        replace_from, replace_to: a value that is replaced, and by what.
        MAX_NUM_TOKENS: the kernel's bound; not needed here.
    """
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = values.repeat_interleave(counts)
    output[: len(expanded)] = expanded


def register() -> None:
    """Put it in upstream's registry of replacements."""
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({f"vllm.v1.sample.rejection_sampler.{expand_kernel.__name__}": expand_kernel})

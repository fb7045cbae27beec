# SPDX-License-Identifier: Apache-2.0
"""What a launch is, and the sizes that all of them share."""

from collections.abc import Callable

import torch

from vllm.pre_ampere.preflight.model import ModelShapes

Launch = Callable[[ModelShapes], None]

REQUESTS = 3
PROMPT_TOKENS = 131
SPECULATIVE_TOKENS = 3

AUTOTUNED = ("GDN chunked prefill",)
"""Launches of kernels that upstream autotunes; the project pins one configuration of each."""


def half(*size: int) -> torch.Tensor:
    """A float16 tensor that nothing touches, so no memory is taken for weights of many experts."""
    return torch.empty(size, dtype=torch.float16)

# SPDX-License-Identifier: Apache-2.0
"""What a launch is, and the sizes that all of them share."""

from collections.abc import Callable

from vllm.pre_ampere.preflight.model import ModelShapes

Launch = Callable[[ModelShapes], None]

REQUESTS = 3
PROMPT_TOKENS = 131
SPECULATIVE_TOKENS = 3

AUTOTUNED = ("GDN chunked prefill",)
"""Launches of kernels that upstream autotunes; the project pins one configuration of each."""
